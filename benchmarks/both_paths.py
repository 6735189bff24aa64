"""Whether the fast path learns as much as the plain one: the same short runs on both, over some seeds.

    python -m benchmarks.both_paths --data cifar10.pack --recipe cifar10 --json benchmarks/results/both-paths-h200.json
    python -m benchmarks.both_paths --kernels --data cifar10.pack --recipe cifar10 --json norms.json

Symmetric MoCo v2; fast is compiled and recorded (on a CUDA device), plain neither. With --kernels both are recorded and
not compiled; fast computes the norms and the stem in kernels of our own, plain does not.

Judged by k-NN on the backbone's features and on the embedding. The difference of the means is shown beside what the
seeds alone would make of it: the standard error of that difference.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import torch

import unitsphere
from benchmarks.measuring import machine
from unitsphere.modules import fused_blocks
from unitsphere.training.log import read_metrics

JUDGED = {"k-NN": "backbone", "k-NN, embedding": "embedding"}


def train(fields: dict[str, Any], fast: bool, kernels: bool) -> dict[str, Any]:
    """One run: accuracies, the last loss, and how fast it went."""
    started = time.perf_counter()
    fused_blocks.KERNELS = "plain" if fast or not kernels else "off"
    way = {"compile": False, "record": torch.cuda.is_available()} if kernels else {"compile": fast, "record": fast}
    with tempfile.TemporaryDirectory() as scratch:
        run = unitsphere.pretrain(
            "moco-v2", out=Path(scratch) / "run", symmetric=True, tensorboard=False, **way, **fields
        )
        lines = list(read_metrics(run.metrics_file))
        how = {"protocol": "knn", "data": fields["data"], "k": [200], "temperature": 0.1}
        found = {name: unitsphere.evaluate(run, features=which, **how)["value"] for name, which in JUDGED.items()}
    return {name: value["k=200"] for name, value in found.items()} | {
        "loss": lines[-1]["loss"],
        "images_per_second": round(lines[-1]["images_per_second"]),
        "seconds": round(time.perf_counter() - started, 1),
    }


def compare(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each judge the means, their difference, and its standard error over the seeds."""
    found = {}
    for name in (*JUDGED, "loss"):
        fast, plain = ([row[name] for row in rows if row["path"] == path] for path in ("fast", "plain"))
        error = (
            math.sqrt(sum(variance(values) / len(values) for values in (fast, plain))) if len(fast) > 1 else math.nan
        )
        means = {"fast": fmean(fast), "plain": fmean(plain), "difference": fmean(fast) - fmean(plain)}
        found[name] = {key: round(value, 4) for key, value in (means | {"standard_error": error}).items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="CIFAR-10, or any labelled images")
    parser.add_argument("--recipe", help="where the data's name does not tell it")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--fraction", type=float, default=0.2, help="of the training images: the plain path is slow")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--kernels", action="store_true", help="compare with and without the kernels for norms")
    parser.add_argument("--tiny", action="store_true", help="a toy network: to try the command, not to measure")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given: dict[str, Any] = {name: getattr(options, name) for name in ("data", "recipe", "epochs", "fraction")}
    fields = {name: value for name, value in given.items() if value is not None}
    if options.tiny:
        fields |= {"backbone": "resnet-tiny", "batch_size": 64}
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        for path in ("fast", "plain"):
            fast = path == "fast" and (device.type == "cuda" or options.kernels)
            rows.append({"path": path, "seed": seed, **train({**fields, "seed": seed}, fast, options.kernels)})
            print(rows[-1], flush=True)
            about = machine(device) | {"fields": fields, "rows": rows}
            options.json.write_text(json.dumps(about, indent=1) + "\n")
    means = compare(rows)
    options.json.write_text(json.dumps(about | {"means": means}, indent=1) + "\n")
    for name, row in means.items():
        print(f"{name:18s} fast {row['fast']:.2f}, plain {row['plain']:.2f}: {row['difference']:+.2f}, "
              f"standard error {row['standard_error']:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
