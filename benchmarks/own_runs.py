"""Images a second of whole runs that are not compiled, as their own logs tell: views, k-NN after each epoch and all.

python -m benchmarks.own_runs --data cifar10.pack --recipe cifar10 --json benchmarks/results/own-runs-h200.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

import unitsphere
from benchmarks.measuring import machine
from unitsphere.training.log import read_metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="CIFAR-10, or any labelled images")
    parser.add_argument("--recipe", help="where the data's name does not tell it")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="a toy network: to try the command, not to measure")
    options = parser.parse_args()
    cuda, rows = torch.cuda.is_available(), {}
    fields = {"data": options.data, "recipe": options.recipe, "epochs": options.epochs, "knn_every": 1}
    fields = {name: value for name, value in fields.items() if value is not None}
    if options.tiny:
        fields |= {"backbone": "resnet-tiny", "batch_size": 64}
    for name, symmetric in (("one direction", False), ("symmetric", True)):
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            own = {"symmetric": symmetric, "compile": False, "record": cuda, "tensorboard": False}
            run = unitsphere.pretrain("moco-v2", out=Path(scratch) / "run", **own, **fields)
            lines = list(read_metrics(run.metrics_file))
        speeds = [line["images_per_second"] for line in lines if "images_per_second" in line]
        rows[name] = {
            "images_per_second": round(statistics.median(speeds)),
            "images_per_second_of_lines": [round(each) for each in speeds],
            "knn": [line["knn"] for line in lines if "knn" in line],
            "seconds": round(time.perf_counter() - started, 1),
        }
        print(name, rows[name], flush=True)
        about = machine(torch.device("cuda" if cuda else "cpu")) | {"fields": fields, "rows": rows}
        options.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
