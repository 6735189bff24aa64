"""Pre-train on CIFAR-10 (or any labelled data), judge by k-NN and linear, and write one JSON file.

    python benchmarks/cifar10.py --data cifar10.pack --recipe cifar10 --epochs 100 --json result.json
    python benchmarks/cifar10.py --data cifar10.pack --recipe cifar10 --epochs 100 --symmetric true --json result.json

Every other word is a field of `unitsphere pretrain`. k-NN: k 200, T 0.1, on the embedding and on the backbone; linear:
MoCo's protocol on cached features, the rate chosen on a tenth of the training images. Last epoch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

import unitsphere
from unitsphere.config.layers import Layer
from unitsphere.data.sharing import keep_decoded
from unitsphere.jobs.pretrain import train
from unitsphere.runs.run import Run
from unitsphere.training.log import read_metrics
from unitsphere.training.prepare import prepare

RATES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


# The README's rows of November 2026 were measured with these settings, which were the defaults then.
AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "simclr": {"zero_init_residual": False, "head": "mlp-bn"},
    "byol": {"zero_init_residual": False},
}


def measure(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run and its numbers."""
    run = Run(folder)
    started = time.perf_counter()
    train(prepare(run, Layer("command line", fields), None, resume=False), run)
    seconds = time.perf_counter() - started
    lines = list(read_metrics(run.metrics_file))
    data = fields["data"]
    value: dict[str, Any] = {}
    for features in ("embedding", "backbone"):
        found = unitsphere.evaluate(run, protocol="knn", data=data, features=features, k=[20, 200], temperature=0.1)
        value |= {f"knn {features} {k}": accuracy for k, accuracy in found["value"].items()}
    found = unitsphere.evaluate(run, protocol="linear", data=data, lr=RATES)
    value |= {f"linear {name}": number for name, number in found["value"].items()}
    return {
        "value": value,
        "seconds_of_training": round(seconds, 1),
        "images_per_second": round(statistics.median(line["images_per_second"] for line in lines[1:] or lines)),
        "peak_memory_mib": round(torch.cuda.max_memory_allocated() / 2**20) if torch.cuda.is_available() else None,
        "config": run.config.model_dump(mode="json"),
        "curve": [
            {name: line[name] for name in ("epoch", "loss", "knn") if name in line} for line in lines if "knn" in line
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="moco-v2")
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    options, rest = parser.parse_known_args()
    fields = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(rest[::2], rest[1::2], strict=True)
    }
    with tempfile.TemporaryDirectory() as scratch, keep_decoded():
        result = measure(
            {"method": options.method, **AS_PUBLISHED.get(options.method, {}), **fields}, Path(scratch) / "run"
        )
    result |= {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "unitsphere": unitsphere.__version__,
        "command": " ".join(["python", "benchmarks/cifar10.py", *sys.argv[1:]]),
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("value", "images_per_second", "seconds_of_training")}))


if __name__ == "__main__":
    main()
