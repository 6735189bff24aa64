"""Where the time of a training step goes, kernel by kernel, with the norm kernels and without.

    python -m benchmarks.kernels --json benchmarks/results/kernels-h200.json
    python -m benchmarks.kernels --only recorded --json part.json

Each row is a step of MoCo v2, views on the device: its time, first losses, memory, and a table of kernels from torch's
profiler (milliseconds a step, launches, share). Kernels are counted by kind, and the largest by name.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import Results, Row
from benchmarks.steps import Take, on_device, settings, timed, unitsphere_step
from unitsphere.modules import fused_blocks

STEPS = 3  # profiled
LARGEST = 40  # kernels kept by name
KINDS = {  # the first that fits
    "norm kernels": r"^_?(forward|backward)$",
    "loss kernels": r"^_(stream|merge|products)$",
    "compiled reductions": r"^triton_(red|per)",
    "compiled pointwise": r"^triton_poi",
    "torch's norms": r"batch_norm|bn_fw|bn_bw|batchnorm",
    "convolutions and products": r"conv|xmma|gemm|cutlass|cudnn|implicit|wgrad|dgrad|fprop|nvjet",
    "optimiser": r"multi_tensor|foreach",
    "copies": r"[Mm]em(cpy|set)|copy|CatArray",
    "pooling": r"pool",
    "torch's pointwise": r"elementwise|threshold",
    "torch's reductions": r"reduce",
}
ROWS: dict[str, tuple[str, bool, str, dict[str, Any]]] = {  # network, compiled, norm kernels, fields
    "resnet18 symmetric 8 groups recorded": ("resnet18", False, "off", {"symmetric": True, "bn_groups": 8}),
    "resnet18 symmetric 8 groups recorded, kernels": ("resnet18", False, "plain", {"symmetric": True, "bn_groups": 8}),
    "resnet18 recorded": ("resnet18", False, "off", {"bn_groups": 1}),
    "resnet18 recorded, kernels": ("resnet18", False, "plain", {"bn_groups": 1}),
    "resnet18 8 groups recorded": ("resnet18", False, "off", {"bn_groups": 8}),
    "resnet18 8 groups recorded, kernels": ("resnet18", False, "plain", {"bn_groups": 8}),
    "resnet50 recorded": ("resnet50", False, "off", {"bn_groups": 1}),
    "resnet50 recorded, kernels": ("resnet50", False, "plain", {"bn_groups": 1}),
    "resnet50 8 groups recorded, kernels": ("resnet50", False, "plain", {"bn_groups": 8}),
    "resnet18 compiled": ("resnet18", True, "off", {"bn_groups": 1}),
    "resnet18 compiled, kernels": ("resnet18", True, "all", {"bn_groups": 1}),
    "resnet50 compiled": ("resnet50", True, "off", {"bn_groups": 1}),
    "resnet50 compiled, kernels": ("resnet50", True, "all", {"bn_groups": 1}),
    "resnet18 symmetric 8 groups compiled": ("resnet18", True, "off", {"symmetric": True, "bn_groups": 8}),
    "resnet18 symmetric 8 groups compiled, kernels": ("resnet18", True, "all", {"symmetric": True, "bn_groups": 8}),
}


def measure(
    network: str, compiled: bool, kernels: str, fields: dict[str, Any], *, device: torch.device, tiny: bool
) -> Row:
    """A row as in `steps.timed`, with the kernels of a step."""
    config = settings(network, tiny, **fields)
    cuda, takes = device.type == "cuda", []
    fused_blocks.KERNELS = kernels

    def build() -> Take:
        method = on_device(config, device, compiled and cuda)
        takes.append(unitsphere_step(method, config, device, cuda))
        return takes[0]

    row = timed(build, config, device)
    table = profiled(takes[0], device)
    report(table)
    return row | {"kernels": table}


def profiled(take: Take, device: torch.device) -> dict[str, Any]:
    """ms and launches a step of each kind of kernel, and of the largest kernels."""
    kind = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kind.CUDA if device.type == "cuda" else kind.CPU]) as profile:
        for number in range(STEPS):
            take(number)
        if device.type == "cuda":
            torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profile.events():
        if device.type != "cuda" or event.device_type == torch.autograd.DeviceType.CUDA:
            spent = event.device_time_total if device.type == "cuda" else event.self_cpu_time_total
            found[event.name][0] += spent / 1e3 / STEPS
            found[event.name][1] += 1 / STEPS
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, (ms, count) in found.items():
        own = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")
        kinds[own][0] += ms
        kinds[own][1] += count
    largest = sorted(found.items(), key=lambda item: -item[1][0])[:LARGEST]
    return {
        "ms": round(sum(ms for ms, _ in found.values()), 3),
        "kinds": {name: [round(x, 3) for x in row] for name, row in sorted(kinds.items(), key=lambda i: -i[1][0])},
        "largest": [[name[:140], *(round(x, 3) for x in row)] for name, row in largest],
    }


def report(table: dict[str, Any]) -> None:
    kinds = ", ".join(f"{name} {ms:.2f} ({count:.0f})" for name, (ms, count) in table["kinds"].items())
    print(f"    {table['ms']:.2f} ms of kernels: {kinds}")
    for name, ms, count in table["largest"][:6]:
        print(f"      {ms:7.3f} {count:5.0f}  {name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="rows with one of these in their name")
    parser.add_argument("--without", nargs="+", default=[], metavar="WORD", help="rows with none of these")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy network: to try the command, not to measure")
    parser.add_argument("--shape", type=float, nargs="+", help="of the norm kernels' work, in place of their own")
    options = parser.parse_args()
    if options.shape:
        from unitsphere.modules import fused_norm

        fields = [
            kind(value) for kind, value in zip((int, int, int, int, int, float, float), options.shape, strict=False)
        ]
        fused_norm.FORWARD = fused_norm.BACKWARD = fused_norm.Shape(*fields)
    device = torch.device(options.device)
    results = Results(options.json, device, options.only)
    results.section("step", "MoCo v2, ResNet-50 at 224, batch 256; ResNet-18 at 32, batch 512")
    for name, row in ROWS.items():
        if not any(word in name for word in options.without):
            results.add("step", name, partial(measure, *row, device=device, tiny=options.tiny))


if __name__ == "__main__":
    main()
