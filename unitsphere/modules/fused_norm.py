"""How the norm kernels are launched, differentiated and seen by compilers.

This module needs Triton; it is imported only where the kernels run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from unitsphere.modules.norm_kernels import backward, forward

COUNTERS = 1 << 16
KEPT_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}


class Shape(NamedTuple):
    """How the work is divided. Tuned on an H200.

    values: of a tile; columns: at most so many of it; warps: of a program; stages: tiles under way at once; programs:
    that share a problem, at most; share_kib: what a program reads at least; cache_mib: how much of the problems may be
    under way at once. alone: from so many problems on, those that read at most alone_kib are each left to one program.
    """

    values: int = 2048
    columns: int = 64
    warps: int = 4
    stages: int = 4
    programs: int = 264
    share_kib: float = 64
    cache_mib: float = 20
    alone: int = 64
    alone_kib: int = 160


FORWARD = Shape()
BACKWARD = Shape(programs=528, share_kib=128)


class Work(NamedTuple):
    """rows of a group, and of a share; shares of a problem; groups; problems under way at once."""

    rows: int
    share: int
    shares: int
    groups: int
    ahead: int


def divided(shape: Shape, pixels: int, channels: int, groups: int, bytes_: int) -> tuple[Work, int, dict[str, int]]:
    """The work, the number of programs, and their tiles. bytes_: read of each value."""
    block_c = max(8, min(shape.columns, triton.next_power_of_2(channels)))
    rows = pixels // groups
    problems = groups * triton.cdiv(channels, block_c)
    kib = rows * block_c * bytes_ / 1024  # of a problem
    alone, values, warps = problems >= shape.alone and kib <= shape.alone_kib, shape.values, shape.warps
    if alone:  # half as wide, so that they are twice as many, and more of each under way
        block_c, values, warps = max(8, block_c // 2), 2 * values, 2 * warps
        problems = groups * triton.cdiv(channels, block_c)
    block_p = values // block_c
    shares = 1 if alone else max(1, min(shape.programs, int(kib / shape.share_kib)))
    share = triton.cdiv(triton.cdiv(rows, shares), block_p) * block_p
    shares = triton.cdiv(rows, share)
    alone = shares == 1
    ahead = min(problems, max(2, int(1024 * shape.cache_mib / kib)))
    tiles = {"BLOCK_P": block_p, "BLOCK_C": block_c, "STAGES": shape.stages, "ALONE": alone, "num_warps": warps}
    return Work(rows, share, shares, groups, ahead), (2 - alone) * shares * problems, tiles


def counters_for(x: Tensor) -> Tensor:
    """Zeros that each launch leaves as zeros. Launches on one stream follow each other; other streams have others.

    Those first asked for in a recording are the recording's own: it makes them zeros whenever it is replayed."""
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    found = KEPT_COUNTERS.get((x.device, stream))
    if found is None:
        found = torch.zeros(COUNTERS, dtype=torch.int32, device=x.device)
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            KEPT_COUNTERS[x.device, stream] = found
    return found


def as_matrix(x: Tensor) -> Tensor:
    """With the memory of a (P, C) matrix: a row for each pixel."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.contiguous()


@torch.library.custom_op("unitsphere::normalise", mutates_args=("running_mean", "running_var", "tracked"))
def normalise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    tracked: Tensor,
    groups: int,
    momentum: float,
    eps: float,
    relu: bool,
    keep_signs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y as x; statistics (groups, 3, C); the signs of y as bits (P, C / 8), of no pixel if they are not to be kept."""
    y, statistics, signs = outputs(x, weight, groups, keep_signs)
    channels = x.shape[1]
    work, programs, tiles = divided(FORWARD, x.numel() // channels, channels, groups, x.element_size())
    partials = weight.new_empty(groups, work.shares, 2, channels)
    with torch.cuda.device_of(x):
        forward[programs,](
            x, residual, y, signs if keep_signs else None, weight, bias, statistics, running_mean, running_var, tracked,
            partials, counters_for(x), *work, eps, momentum, channels, RELU=relu, **tiles,
        )  # fmt: skip
    return y, statistics, signs


def outputs(x: Tensor, weight: Tensor, groups: int, keep_signs: bool) -> tuple[Tensor, Tensor, Tensor]:
    channels = x.shape[1]
    bits = (x.numel() // channels if keep_signs else 0, triton.cdiv(channels, 8))
    return torch.empty_like(x), weight.new_empty(groups, 3, channels), x.new_empty(bits, dtype=torch.uint8)


@normalise.register_fake
def _(x, weight, bias, residual, running_mean, running_var, tracked, groups, momentum, eps, relu, keep_signs):  # type: ignore[no-untyped-def]
    return outputs(x, weight, groups, keep_signs)


@torch.library.custom_op("unitsphere::normalise_backward", mutates_args=())
def gradients(
    x: Tensor,
    gradient: Tensor,
    also: Tensor | None,
    signs: Tensor,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    relu: bool,
    residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of x, weight, bias and the residual; also: a second gradient of y, which is added."""
    groups, _, channels = statistics.shape
    bytes_ = x.element_size() + gradient.element_size() * (1 if also is None else 2)
    work, programs, tiles = divided(BACKWARD, x.numel() // channels, channels, groups, bytes_)
    into, into_weight, into_bias, into_residual = inputs_like(x, weight, bias, residual)
    sums = weight.new_empty(groups, 2, channels)
    partials = weight.new_empty(groups, work.shares, 2, channels)
    with torch.cuda.device_of(x):
        backward[programs,](
            x, gradient, also, signs if len(signs) else None, into, into_residual if residual else None, weight, bias,
            statistics, sums, into_weight, into_bias, partials, counters_for(x), *work, channels, RELU=relu, **tiles,
        )  # fmt: skip
    return into, into_weight, into_bias, into_residual


def inputs_like(x: Tensor, weight: Tensor, bias: Tensor, residual: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_residual = torch.empty_like(x) if residual else x.new_empty(0)
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias), of_residual


@gradients.register_fake
def _(x, gradient, also, signs, weight, bias, statistics, relu, residual):  # type: ignore[no-untyped-def]
    return inputs_like(x, weight, bias, residual)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor | None,
        running_mean: Tensor,
        running_var: Tensor,
        tracked: Tensor,
        groups: int,
        momentum: float,
        eps: float,
        relu: bool,
        twice: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        x = as_matrix(x)
        residual = None if residual is None else as_matrix(residual)
        keep_signs = residual is not None and relu and any(ctx.needs_input_grad)
        y, statistics, signs = normalise(
            x, weight, bias, residual, running_mean, running_var, tracked, groups, momentum, eps, relu, keep_signs
        )
        ctx.save_for_backward(x, weight, bias, statistics, signs)
        ctx.given = relu, residual is not None
        return (y, y.detach()) if twice else y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, also: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, weight, bias, statistics, signs = ctx.saved_tensors
        relu, residual = ctx.given
        gradient, also = as_matrix(gradient), None if also is None else as_matrix(also)
        if also is not None and not (relu and residual):
            gradient, also = gradient + also, None
        found = gradients(x, gradient, also, signs, weight, bias, statistics, relu, residual and relu)
        of_residual = None if not residual else found[3] if relu else gradient
        return *found[:3], of_residual, *[None] * 8


@torch.compiler.allow_in_graph
def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    tracked: Tensor,
    groups: int,
    momentum: float,
    eps: float,
    relu: bool,
    twice: bool = False,
) -> Any:
    """Normalise each of `groups` contiguous parts of the batch by its own statistics; add the residual; apply ReLU.

    x (N, C) or (N, C, H, W), residual the same, in float32 or half precision; weight, bias (C,) in float32. groups
    divides N. The running mean, variance (C,) and number of batches move by the mean of the groups' statistics.
    Comes back as x, channels-last; with twice as a pair of the same values, whose two gradients are added in passing.
    """
    return _Norm.apply(
        x, weight, bias, residual, running_mean, running_var, tracked, groups, momentum, eps, relu, twice
    )
