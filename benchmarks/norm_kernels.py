"""The norm kernels against torch's batch norm: time, bandwidth and error, for the activations of both networks.

    python -m benchmarks.norm_kernels --json benchmarks/results/norm-kernels-h200.json
    python -m benchmarks.norm_kernels --tune --json tuned.json

bf16, channels-last, each call replayed as a CUDA graph with a cold cache. "Ideal" is the traffic if every second read
came from the cache: x (and residual) in, y out; backward x and gradient in, gradient (two with a residual) out.
Errors are norm-wise against float64 on the same inputs. torch's form: F.batch_norm for each group, add, ReLU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measuring import machine
from unitsphere.modules import fused_norm as kernels
from unitsphere.modules.fused_norm import Shape

PEAK = 4.3e12  # bytes a second, a large copy on an H200
EPS, MOMENTUM = 1e-5, 0.1


class Case(NamedTuple):
    n: int
    channels: int
    size: int
    groups: int = 1
    residual: bool = False


RESNET50 = [
    Case(256, 64, 112), Case(256, 64, 56), Case(256, 256, 56, 1, True), Case(256, 128, 28), Case(256, 512, 28, 1, True),
    Case(256, 256, 14), Case(256, 1024, 14, 1, True), Case(256, 512, 7), Case(256, 2048, 7, 1, True),
    Case(256, 64, 56, 8), Case(256, 1024, 14, 8, True),
]  # fmt: skip
RESNET18 = [
    Case(n, channels, size, groups, residual)
    for n, groups in ((512, 1), (512, 8), (1024, 16))
    for channels, size in ((64, 32), (128, 16), (256, 8), (512, 4))
    for residual in (False, True)
]
TINY = [Case(4, 16, 5), Case(4, 16, 5, 2, True)]
TUNED = [
    Case(1024, 64, 32, 16), Case(512, 64, 32, 1, True), Case(512, 128, 16, 8), Case(512, 512, 4, 8),
    Case(1024, 512, 4, 16),
    Case(256, 256, 56, 1, True), Case(256, 64, 112), Case(256, 1024, 14, 1, True), Case(256, 64, 56),
]  # fmt: skip


def replayed(work: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of a call in a CUDA graph, its inputs not in the cache: the median. Not on the default stream, which
    cannot be recorded: a backward pass runs where the forward pass ran."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - started)
    from triton.testing import do_bench

    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        work()
    return do_bench(graph.replay, warmup=5, rep=30, return_mode="median")


class Inputs:
    """Random inputs of a case, and both forms of the norm over them."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        random = torch.Generator(device).manual_seed(0)
        shape = (case.n, case.channels, case.size, case.size)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device=device)

        def activation() -> Tensor:
            return drawn(*shape).to(dtype).contiguous(memory_format=torch.channels_last)

        self.case = case
        self.x = (2 * activation() + 1).requires_grad_()
        self.residual = activation().requires_grad_() if case.residual else None
        self.gradient = activation()
        self.weight = (1 + 0.3 * drawn(case.channels)).requires_grad_()
        self.bias = (0.3 * drawn(case.channels)).requires_grad_()
        zeros = torch.zeros(case.channels, device=device)
        self.running = (zeros, zeros + 1, torch.zeros((), dtype=torch.long, device=device))
        self.leaves = [t for t in (self.x, self.weight, self.bias, self.residual) if t is not None]

    def fused(self) -> Tensor:
        given = (self.weight, self.bias, self.residual, *self.running)
        return kernels.norm(self.x, *given, self.case.groups, MOMENTUM, EPS, True)

    def plain(self, dtype: torch.dtype | None = None) -> tuple[Tensor, list[Tensor]]:
        leaves = self.leaves if dtype is None else [t.detach().to(dtype).requires_grad_() for t in self.leaves]
        x, weight, bias, *residual = leaves
        parts = [
            F.batch_norm(part, None, None, weight, bias, True, MOMENTUM, EPS) for part in x.chunk(self.case.groups)
        ]
        y = torch.cat(parts) if len(parts) > 1 else parts[0]
        for other in residual:
            y = y + other if dtype else y.add_(other)
        return (y.relu() if dtype else y.relu_()), leaves

    def backward(self, y: Tensor) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(y, self.leaves, self.gradient, retain_graph=True)

    def errors(self) -> dict[str, float]:
        y, leaves = self.plain(torch.float64)
        expected = [y, *torch.autograd.grad(y, leaves, self.gradient.double())]
        y = self.fused()
        found = [y, *torch.autograd.grad(y, self.leaves, self.gradient)]
        names = ("y", "x", "weight", "bias", "residual")
        return {
            name: float(f"{((a.double() - b).norm() / b.norm()).item():.2e}")
            for name, a, b in zip(names, found, expected, strict=False)
        }


def measure(case: Case, device: torch.device, *, plain: bool = True) -> dict[str, Any]:
    inputs = Inputs(case, device)
    values = inputs.x.numel()
    ideal = {"forward": values * 2 * (2 + case.residual), "backward": values * 2 * (3 + case.residual)}
    row: dict[str, Any] = {}

    def inference() -> Tensor:
        with torch.no_grad():
            return inputs.fused()

    if plain:
        row["keys_ms"] = replayed(inference, device)
    row["forward_ms"] = replayed(inputs.fused, device)
    row["backward_ms"] = replayed(inputs.backward(inputs.fused()), device)
    if plain:
        row["errors"] = inputs.errors()
        row["torch_forward_ms"] = replayed(inputs.plain, device)
        row["torch_backward_ms"] = replayed(inputs.backward(inputs.plain()[0]), device)
    for way, bytes_ in ideal.items():
        row[f"{way}_ideal_ms"] = 1e3 * bytes_ / PEAK
        row[f"{way}_gb_s"] = bytes_ / row[f"{way}_ms"] / 1e6
    return {key: value if isinstance(value, dict) else round(value, 4) for key, value in row.items()}


def tune(device: torch.device, cases: list[Case]) -> Iterator[dict[str, Any]]:
    """Every case with other shapes of the work. Those that need a compilation come outermost."""
    tiles = [(2048, 64, 4, 4), (4096, 64, 8, 3), (4096, 64, 4, 3)]  # values, columns, warps, stages
    divided = [  # programs, share_kib, cache_mib, alone, alone_kib
        (264, 32, 20), (264, 16, 20), (264, 64, 20), (132, 32, 20), (132, 64, 30), (264, 32, 30), (264, 32, 40),
        (528, 32, 20), (264, 32, 20, 64, 0),
    ]  # fmt: skip
    for number, (tile, division) in enumerate(itertools.product(tiles, divided)):
        if number >= len(divided) and number % len(divided) not in (0, 4):
            continue  # the first with each division of the work, the others with two
        kernels.FORWARD = kernels.BACKWARD = Shape(*tile, *division)
        for case in cases:
            yield {"case": case._asdict(), "shape": list(kernels.FORWARD), **measure(case, device, plain=False)}


def in_words(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['case']} {row['error']}"
    case = Case(**row["case"])
    words = f"{case.n}x{case.channels}x{case.size}x{case.size} g{case.groups}{' +r' if case.residual else ''}"
    words = f"{words:<24}{row.get('shape', '')!s:<32}"
    for way in ("forward", "backward"):
        words += f" {way[:3]} {row[f'{way}_ms']:.4f} ({row[f'{way}_ideal_ms']:.4f}, {row[f'{way}_gb_s']:.0f} GB/s"
        words += f", torch {row[f'torch_{way}_ms']:.4f})" if "errors" in row else ")"
    return words + (" off " + " ".join(f"{error:.0e}" for error in row["errors"].values()) if "errors" in row else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after so long")
    options = parser.parse_args()
    device = torch.device(options.device)
    tiny = device.type != "cuda"
    cases = TINY if tiny else TUNED if options.tune else RESNET18 + RESNET50

    def rows() -> Iterator[dict[str, Any]]:
        if options.tune:
            yield from tune(device, cases)
        for case in cases if not options.tune else []:
            try:
                yield {"case": case._asdict(), **measure(case, device)}
            except Exception as error:
                yield {"case": case._asdict(), "error": f"{type(error).__name__}: {error}"}

    if not tiny:
        torch.cuda.set_stream(torch.cuda.Stream())
    about, kept, started = machine(device) | {"peak_bytes_a_second": PEAK}, [], time.perf_counter()
    for row in rows():
        if "shape" in row:  # a line for each shape
            if not kept or kept[-1]["shape"] != row["shape"]:
                print(f"\n{row['shape']!s:<44}", end="")
            print(f" {1e3 * row['forward_ms']:4.0f}/{1e3 * row['backward_ms']:<4.0f}", end="", flush=True)
        else:
            print(in_words(row), flush=True)
        kept.append(row)
        options.json.write_text(json.dumps(about | {"rows": kept}, indent=1) + "\n")
        if time.perf_counter() - started > options.seconds:
            break


if __name__ == "__main__":
    main()
