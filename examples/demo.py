"""What `make demo` does: pre-train on drawn shapes without labels, judge the result, say what was learnt."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import unitsphere

DATA = "shapes"
RUN = Path("runs/demo")
RATES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def judge(what: str | Path) -> tuple[float, float]:
    """k-NN (k 20) and linear accuracy in percent."""
    common = {"data": DATA, "backbone": "resnet-tiny", "image_size": 32}
    knn = unitsphere.evaluate(what, protocol="knn", k=[20], **common)["value"]["k=20"]
    linear = unitsphere.evaluate(what, protocol="linear", lr=RATES, epochs=50, **common)["value"]["top1"]
    return knn, linear


def main() -> None:
    unitsphere.fast_cpu()
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else None
    started = time.perf_counter()
    shutil.rmtree(RUN, ignore_errors=True)
    print(f"Pre-training MoCo v2 on `{DATA}`: no label is used.", flush=True)
    unitsphere.pretrain("moco-v2", data=DATA, out=RUN, **({"epochs": epochs} if epochs else {}))
    rows = {"raw pixels": judge("pixels"), "random backbone": judge("random"), "after pre-training": judge(RUN)}
    print("\nAccuracy on held-out shapes, 12 classes (chance 8.3 %), with a frozen backbone:\n")
    print(f"  {'':<20} {'k-NN':>8} {'linear':>8}")
    for name, (knn, linear) in rows.items():
        print(f"  {name:<20} {knn:>6.1f} % {linear:>6.1f} %")
    print(f"\n{time.perf_counter() - started:.0f} s. The run is in {RUN}/: look at {RUN}/neighbours.png")


if __name__ == "__main__":
    main()
