"""Times the training step and the views in every form on one CUDA device, and writes JSON.

    python benchmarks/step.py --json step.json

MoCo, ResNet-18 with the small stem, 32x32, batch 512, queue 4096, one direction, bf16; views already on the device. The
losses of the first steps are written beside the times: all forms must agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from antipode.config.resolve import Layer, resolve
from antipode.data.canvas import Canvas
from antipode.methods.build import build_method
from antipode.randomness import generator
from antipode.training.step import PlainStep, RecordedStep, TakeStep, build_optimizer
from antipode.views.apply import apply, render
from antipode.views.draw import draw
from antipode.views.policies import POLICIES

BATCH = 512
DEVICE = torch.device("cuda")


def milliseconds(work: Callable[[], Any], repeats: int = 5, each: int = 20) -> float:
    """Median over a few rounds, warmed up, the device waited for."""
    for _ in range(5):
        work()
    rounds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(each):
            work()
        torch.cuda.synchronize()
        rounds.append(1e3 * (time.perf_counter() - started) / each)
    return statistics.median(rounds)


def time_step(groups: int, compiled: bool, recorded: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.cuda.reset_peak_memory_stats()
    config = resolve(Layer("benchmark", {"method": "moco-v2", "data": "cifar10", "bn_groups": groups})).config
    method = build_method(config).to(device=DEVICE, memory_format=torch.channels_last)  # type: ignore[call-overload]
    random = torch.Generator(device=DEVICE).manual_seed(0)
    batches = [[torch.randn(BATCH, 3, 32, 32, device=DEVICE, generator=random) for _ in range(2)] for _ in range(4)]
    orders = [method.order_of_keys(BATCH, generator(0, "order", n)) for n in range(4)]
    inputs = [(views, None if o is None else o.to(DEVICE)) for views, o in zip(batches, orders, strict=True)]
    started = time.perf_counter()
    if compiled:
        method.online.compile(dynamic=False)
        method.slow.compile(dynamic=False)
    take: TakeStep = PlainStep(method, build_optimizer(config, method), bf16=True)
    if recorded:
        take = RecordedStep(take, *inputs[0])  # type: ignore[arg-type]
    losses = [round(take(*given, 0.06).loss.item(), 4) for given in inputs]
    ready = time.perf_counter() - started
    count = iter(range(10**9))
    time_ms = milliseconds(lambda: take(*inputs[next(count) % 4], 0.01))
    return {
        "ms": round(time_ms, 2),
        "images_per_second": round(1e3 * BATCH / time_ms),
        "seconds_to_first_steps": round(ready, 1),
        "peak_memory_mib": round(torch.cuda.max_memory_allocated() / 2**20),
        "losses": losses,
    }


def time_views(compiled: bool) -> float:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(BATCH)]
    canvas = Canvas.of(images).to(DEVICE)
    function = torch.compile(render, dynamic=False) if compiled else render
    count = iter(range(10**9))

    def two_views() -> None:
        for view in range(2):
            table = draw(POLICIES["moco-v2-small"], BATCH, generator(0, "views", next(count), view))
            apply(canvas, table, size=32, mean=[0.5] * 3, std=[0.25] * 3, render=function)

    return round(milliseconds(two_views), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    forms = {
        f"{name}, {groups} BN groups": (groups, compiled, recorded)
        for groups in (1, 8)
        for name, compiled, recorded in (("plain", False, False), ("recorded", False, True), ("both", True, True))
    }
    steps = {}
    for name, form in forms.items():
        steps[name] = time_step(*form)
        print(f"{name:<24} {steps[name]['ms']:>8.2f} ms {steps[name]['images_per_second']:>8,} images/s", flush=True)
    views = {"plain": time_views(False), "compiled": time_views(True)}
    print("two views", views)
    about = {"date": date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    options.json.write_text(json.dumps(about | {"steps": steps, "two_views_ms": views}, indent=1) + "\n")


if __name__ == "__main__":
    main()
