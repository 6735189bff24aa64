"""Whether the end of a bottleneck is faster as a matrix product whose norm comes from the moments of its input.

    python -m benchmarks.gram --json benchmarks/results/gram-h200.json

For y = A W' the mean of y is mean(A) W', and its variance diag(W Cov(A) W'): so relu(norm(y) + residual) is one product
with scaled weights, and y is never stored. Measured beside a 1x1 convolution, batch norm, sum and ReLU compiled by
torch, bf16, channels-last, forward and backward. Errors are norm-wise against float64.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measuring import machine
from benchmarks.norm_kernels import replayed

SHAPES = [(802_816, 64, 256), (200_704, 128, 512), (50_176, 256, 1024), (12_544, 512, 2048)]  # P, K, O of ResNet-50
EPS = 1e-5


@triton.jit
def _cross(
    x,
    other,
    partials,
    column_sums,
    P,
    share,
    M: tl.constexpr,
    N: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """x' other over one share of the rows, and the column sums of x."""
    part, i, j = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if SYMMETRIC and i > j:
        return
    m = i * BLOCK_M + tl.arange(0, BLOCK_M)
    n = j * BLOCK_N + tl.arange(0, BLOCK_N)
    lines = tl.arange(0, BLOCK_P)
    begin = part.to(tl.int64) * share
    count = tl.minimum(share, P - part * share)
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, count, BLOCK_P):
        here = (start + lines < count)[:, None]
        at = begin * M + (start + lines)[:, None] * M + m[None, :]
        a = tl.load(x + at, mask=here, other=0.0)
        b = tl.load(other + begin * N + (start + lines)[:, None] * N + n[None, :], mask=here, other=0.0)
        product = tl.dot(tl.trans(a), b, product)
        total += tl.sum(a.to(tl.float32), 0)
    tl.store(partials + (part * M + m)[:, None] * N + n[None, :], product)
    if j == i if SYMMETRIC else j == 0:
        tl.store(column_sums + part * M + m, total)


def cross(x: Tensor) -> tuple[Tensor, Tensor]:
    """x' x (M, M) and the sums of x's columns (M,) in float32."""
    pixels, m = x.shape
    block, block_p = min(m, 128), 64
    tiles = m // block
    parts = max(1, min(4 * 132 // (tiles * (tiles + 1)), pixels // 256))
    share = triton.cdiv(triton.cdiv(pixels, parts), block_p) * block_p
    parts = triton.cdiv(pixels, share)
    partials, sums = torch.zeros(parts, m, m, device=x.device), torch.empty(parts, m, device=x.device)
    _cross[parts, tiles, tiles](
        x, x, partials, sums, pixels, share, M=m, N=m, SYMMETRIC=True, BLOCK_M=block, BLOCK_N=block, BLOCK_P=block_p,
        num_warps=8 if block > 64 else 4, num_stages=3,
    )  # fmt: skip
    product = partials.sum(0)
    if tiles > 1:  # the tiles below the diagonal
        rows = torch.arange(m, device=x.device) // block
        product = torch.where(rows[:, None] <= rows[None, :], product, product.T)
    return product, sums.sum(0)


@triton.jit
def _mask(gradient, out, masked, sums, P, share, O: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr):  # noqa: E741
    """The gradient where out is positive, and the sums of its columns over a share of the rows."""
    columns = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    first = tl.program_id(0).to(tl.int64) * share
    count = tl.minimum(share, P - first).to(tl.int32)
    total = tl.zeros((BLOCK_P, BLOCK_O), tl.float32)
    for start in tl.range(0, count, BLOCK_P, num_stages=3):
        here = start + tl.arange(0, BLOCK_P)[:, None]
        at = here * O + columns[None, :]
        given = tl.load(gradient + first * O + at, mask=here < count, other=0.0)
        given = tl.where(tl.load(out + first * O + at, mask=here < count, other=0.0) > 0, given, 0.0)
        tl.store(masked + first * O + at, given, mask=here < count)
        total += given.to(tl.float32)
    tl.store(sums + tl.program_id(0) * O + columns, tl.sum(total, 0))


def mask(gradient: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient (P, O) where out is positive, and the sums of its columns (O,)."""
    pixels, outputs = out.shape
    parts = max(1, min(4 * 132 * 64 // outputs, pixels // 64))
    share = triton.cdiv(triton.cdiv(pixels, parts), 64) * 64
    parts = triton.cdiv(pixels, share)
    masked, sums = torch.empty_like(gradient), torch.empty(parts, outputs, device=out.device)
    _mask[parts, outputs // 64](gradient, out, masked, sums, pixels, share, O=outputs, BLOCK_P=64, BLOCK_O=64)
    return masked, sums.sum(0)


@triton.jit
def _product(
    a,
    w,
    shift,
    residual,
    out,
    P,
    K: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    RELU: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles: tl.constexpr = O // BLOCK_O
    program = tl.program_id(0)
    first = (program // tiles).to(tl.int64) * BLOCK_P
    rows = tl.arange(0, BLOCK_P)
    mask = (first + rows < P)[:, None]
    columns = (program % tiles) * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.arange(0, BLOCK_K)
    found = tl.zeros((BLOCK_P, BLOCK_O), tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(a + first * K + rows[:, None] * K + start + k[None, :], mask=mask, other=0.0)
        y = tl.load(w + columns[:, None] * K + start + k[None, :])
        found = tl.dot(x, tl.trans(y), found)
    at = first * O + rows[:, None] * O + columns[None, :]
    found += tl.load(shift + columns)[None, :] + tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        found = tl.where(found < 0, 0.0, found)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=mask)


def product(a: Tensor, w: Tensor, shift: Tensor, residual: Tensor, relu: bool) -> Tensor:
    """relu(a w' + shift + residual); a (P, K), w (O, K), shift (O,) float32, residual (P, O)."""
    (pixels, k), outputs = a.shape, len(w)
    out = torch.empty_like(residual)
    block_o, block_p, block_k = 64, 128, 64
    _product[triton.cdiv(pixels, block_p) * (outputs // block_o),](
        a, w, shift, residual, out, pixels, K=k, O=outputs, RELU=relu, BLOCK_P=block_p, BLOCK_O=block_o,
        BLOCK_K=block_k, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def scaled(moment: Tensor, mean: Tensor, weight: Tensor, gain: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The weights with the norm in them, and the shift, from E[a a'] (K, K) and E[a] (K,)."""
    covariance = moment - mean[:, None] * mean[None, :]
    variance = ((weight @ covariance) * weight).sum(1)
    scale = gain * torch.rsqrt(variance + EPS)
    return weight * scale[:, None], bias - scale * (weight @ mean)


class Gram(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        moment, mean = cross(a)
        small = [moment / len(a), mean / len(a), weight, gain, bias]
        with torch.enable_grad():
            small = [each.detach().requires_grad_() for each in small]
            folded, shift = scaled(*small)
        out = product(a, folded.to(a.dtype), shift.detach(), residual, True)
        ctx.small, ctx.folded = small, (folded, shift)
        ctx.save_for_backward(a, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        a, out = ctx.saved_tensors
        masked, into_shift = mask(gradient, out)
        into_folded = (masked.T @ a).float()
        folded = ctx.folded[0].detach().to(a.dtype)
        through = masked @ folded  # (P, K)
        moment, mean, *others = torch.autograd.grad(ctx.folded, ctx.small, (into_folded, into_shift), retain_graph=True)
        both = ((moment + moment.T) / len(a)).to(a.dtype)
        return product(a, both, mean / len(a), through, False), *others, masked


def usual(a: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """a (N, K, H, W), weight (O, K)."""
    y = F.conv2d(a, weight.to(a.dtype)[:, :, None, None])
    return (F.batch_norm(y, None, None, gain, bias, True, 0.1, EPS) + residual).relu()


def measure(pixels: int, k: int, outputs: int, device: torch.device) -> dict[str, Any]:
    random = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device)

    images = 256 if pixels % 256 == 0 else 1
    size = round((pixels / images) ** 0.5)
    a = drawn(pixels, k).relu_().bfloat16()
    residual, gradient = drawn(pixels, outputs).relu_().bfloat16(), drawn(pixels, outputs).bfloat16()
    small = [drawn(outputs, k) / k**0.5, 1 + 0.3 * drawn(outputs), 0.3 * drawn(outputs)]

    def leaves(*given: Tensor) -> list[Tensor]:
        return [each.detach().requires_grad_() for each in given]

    def maps(x: Tensor) -> Tensor:
        return x.view(images, size, size, -1).permute(0, 3, 1, 2)

    # float64, in the definition's form
    exact = leaves(*(t.double() for t in (a, *small, residual)))
    y = exact[0] @ exact[1].T
    y = F.batch_norm(y, None, None, exact[2], exact[3], True, 0.1, EPS)
    truth = [y := (y + exact[4]).relu(), *torch.autograd.grad(y, exact, gradient.double())]
    truth = [each.detach() for each in truth]
    del y, exact
    forms: dict[str, tuple[Callable[..., Tensor], list[Tensor], Tensor]] = {
        "gram": (Gram.apply, leaves(a, *small, residual), gradient),
        "compiled": (
            torch.compile(usual, dynamic=False) if device.type == "cuda" else usual,
            leaves(maps(a), *small, maps(residual)),
            maps(gradient),
        ),
    }
    row: dict[str, Any] = {"pixels": pixels, "k": k, "outputs": outputs}
    for name, (form, given, up) in forms.items():
        out = form(*given)
        found = [out, *torch.autograd.grad(out, given, up, retain_graph=True)]
        flat = [t.permute(0, 2, 3, 1).reshape(pixels, -1) if t.dim() == 4 else t for t in found]
        errors = [((t.double() - e).norm() / e.norm()).item() for t, e in zip(flat, truth, strict=True)]
        row[f"{name}_errors"] = dict(zip(("y", "a", "weight", "gain", "bias", "residual"), errors, strict=True))
        del found, flat
        row[f"{name}_forward_ms"] = replayed(lambda form=form, given=given: form(*given), device)
        row[f"{name}_backward_ms"] = replayed(
            lambda out=out, given=given, up=up: torch.autograd.grad(out, given, up, retain_graph=True), device
        )
        row[f"{name}_ms"] = row[f"{name}_forward_ms"] + row[f"{name}_backward_ms"]
    if device.type == "cuda":
        row["parts"] = parts_of(a, small, residual, gradient, device)
    return row


def parts_of(
    a: Tensor, small: list[Tensor], residual: Tensor, gradient: Tensor, device: torch.device
) -> dict[str, Any]:
    """Milliseconds of each kernel of the Gram form."""
    half = small[0].bfloat16()
    out = product(a, half, small[2], residual, True)
    square = torch.eye(a.shape[1], device=device).bfloat16()
    zeros = torch.zeros(a.shape[1], device=device)
    work: dict[str, Callable[[], Any]] = {
        "moments": lambda: cross(a),
        "product": lambda: product(a, half, small[2], residual, True),
        "mask": lambda: mask(gradient, out),
        "gradient of weights": lambda: gradient.T @ a,
        "through": lambda: gradient @ half,
        "gradient of a": lambda: product(a, square, zeros, a, False),
    }
    return {name: replayed(each, device) for name, each in work.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch._functorch.config.donated_buffer = False  # type: ignore[attr-defined]  # backward passes are repeated
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())
    about, rows = machine(device), []
    for shape in SHAPES if device.type == "cuda" else [(1024, 64, 128)]:
        try:
            row = measure(*shape, device)
            print(f"P {shape[0]} K {shape[1]} O {shape[2]}: gram {row['gram_forward_ms']:.3f} + "
                  f"{row['gram_backward_ms']:.3f}, compiled {row['compiled_forward_ms']:.3f} + "
                  f"{row['compiled_backward_ms']:.3f} ms", {k: round(v, 3) for k, v in row.get("parts", {}).items()},
                  *(" ".join(f"{e:.1e}" for e in row[f"{name}_errors"].values()) for name in ("gram", "compiled")),
                  sep="; ", flush=True)  # fmt: skip
        except Exception as error:
            row = {"shape": shape, "error": f"{type(error).__name__}: {error}"}
            print(row, flush=True)
        rows.append(row)
        options.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
