"""How fast unitsphere is, and how much faster than what others run: everything measured in one process on one device.

    python -m benchmarks.speed --cifar cifar10.pack --json benchmarks/results/speed-h200.json
    python -m benchmarks.speed --only resnet18 queue --json part.json

Prints a table and writes the JSON file row by row. The first row of a section is what its others are compared with.
Rows are warmed up and medians; memory is the most that torch had allocated while the row was measured. Needs a CUDA
device (--device cpu --tiny only shows that it works), lightly for its row, and CIFAR-10 as a pack or a folder for
`end to end`. Most of the time goes into compiling, which torch keeps on the disk for the next time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.end_to_end import compare_runs
from benchmarks.evaluating import time_evaluation
from benchmarks.measuring import Results
from benchmarks.steps import compare_methods, compare_steps, sweep, sweep_views


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument(
        "--cifar", type=Path, help="CIFAR-10 as a pack or a folder; without it `end to end` is left out"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="rows with one of these in SECTION/ROW")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy network: to try the command, not to measure")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --tiny tries the command")
    results = Results(options.json, torch.device(options.device), options.only)
    compare_steps(results, "resnet18", options.tiny)
    if options.cifar is not None:
        compare_runs(results, options.cifar, options.tiny)
    time_evaluation(results, options.tiny)
    sweep(results, options.tiny)
    sweep_views(results, options.tiny)
    compare_steps(results, "resnet50", options.tiny)  # last: it compiles longest
    compare_methods(results, options.tiny)


if __name__ == "__main__":
    main()
