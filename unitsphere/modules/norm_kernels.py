"""Batch norm over groups of a batch, with the residual sum and the ReLU that follow it, in one kernel a direction.

    y = relu((x - mean) / sqrt(variance + eps) * weight + bias + residual)

An activation is read as a matrix: a row for each pixel of each image, a column for each channel (channels-last). The
rows of a group and a block of columns are one problem: they have their own statistics. Each problem takes two passes.
The first sums its rows; the second reads them again and writes the result. The order of the passes lets the second
read come from the cache: it follows the first closely, and it walks from the last rows back to the first.

One launch does all of that. Its programs draw tickets, which say what to do; a program of a second pass waits until
all of the first have arrived. Those have lower tickets, so they run already, and the wait must end.

Sums are float32, shifted by the first row so that nothing cancels. The backward pass computes the mask of the ReLU
again from x, or reads it as one bit a value where a residual was added.
This module needs Triton; it is imported only where the kernels run. (TRITON_INTERPRET=1 runs them on a CPU.)
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

COUNTERS = 1 << 14
UNSPECIALISED = ["rows", "share", "shares", "groups", "ahead"]


class Shape(NamedTuple):
    """How the work is divided. Tuned on an H200.

    values: of a tile; columns: at most so many of it; warps: of a program; stages: tiles
    under way at once; programs: that share a problem, at most;
    share_kib: what a program reads at least; cache_mib: how much of the problems may be under way at once.
    """

    values: int = 4096
    columns: int = 64
    warps: int = 8
    stages: int = 3
    programs: int = 528
    share_kib: int = 32
    cache_mib: int = 20


FORWARD = Shape()
BACKWARD = Shape()


@triton.jit
def _turn(counters, shares, problems, ahead):  # type: ignore[no-untyped-def]
    """The next work to do: problem, share of its rows, and whether it is the second pass.

    First passes of `ahead` problems come first, then second and first passes in turn, then the last second passes."""
    ticket = tl.atomic_add(counters, 1)
    if ticket == 2 * shares * problems - 1:
        tl.store(counters, 0)  # for the next launch
    place = ticket // shares
    share = ticket % shares
    later = place - ahead
    paired = 2 * (problems - ahead)
    second = (later >= paired) | ((later >= 0) & (later % 2 == 0))
    mixed = tl.where(second, later // 2, ahead + later // 2)
    problem = tl.where(later < 0, place, tl.where(later < paired, mixed, later - (problems - ahead)))
    return problem, tl.where(second, shares - 1 - share, share), second


@triton.jit
def _is_last(counter, count):  # type: ignore[no-untyped-def]
    """Count this program, whose stores come before; true for the last of `count`."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1) == count - 1


@triton.jit
def _ready(counter):  # type: ignore[no-untyped-def]
    tl.debug_barrier()
    tl.atomic_add(counter, 1)


@triton.jit
def _wait(counter, shares):  # type: ignore[no-untyped-def]
    """Until the sums of a problem are there. The last program that has seen them sets the counter back."""
    while tl.load(counter, volatile=True) <= shares:
        pass
    if tl.atomic_add(counter, 1) == 2 * shares:
        tl.store(counter, 0)


@triton.jit
def _merged(partials, shares, columns, C, within, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two sums of a problem from those of its shares, (shares, 2, C)."""
    every = tl.arange(0, WIDTH)
    first = tl.zeros((WIDTH, columns.shape[0]), tl.float32)
    second = tl.zeros((WIDTH, columns.shape[0]), tl.float32)
    for start in range(0, shares, WIDTH):
        these = start + every
        mask = (these < shares)[:, None] & within[None, :]
        places = partials + these[:, None] * (2 * C) + columns[None, :]
        first += tl.load(places, mask=mask, other=0.0, cache_modifier=".cg")
        second += tl.load(places + C, mask=mask, other=0.0, cache_modifier=".cg")
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _sum_of(numbers, groups, stride, columns, within):  # type: ignore[no-untyped-def]
    """Over the groups, each of which has its numbers (C,) `stride` after those of the last."""
    total = tl.zeros((columns.shape[0],), tl.float32)
    for group in range(0, groups):
        total += tl.load(numbers + group * stride + columns, mask=within, other=0.0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=UNSPECIALISED)
def _forward(  # type: ignore[no-untyped-def]
    x,
    residual,
    y,
    signs,
    weight,
    bias,
    statistics,
    running_mean,
    running_var,
    tracked,
    partials,
    counters,
    rows,
    share,
    shares,
    groups,
    ahead,
    eps,
    momentum,
    C,
    RELU: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """statistics (groups, 3, C): mean, 1 / deviation, variance; signs (P, C / 8): a bit where y is positive."""
    blocks = tl.cdiv(C, BLOCK_C)
    problem, part, second = _turn(counters, shares, groups * blocks, ahead)
    group = problem // blocks
    block = problem % blocks
    columns = block * BLOCK_C + tl.arange(0, BLOCK_C)
    within = columns < C
    own = counters + 1 + blocks + problem
    statistics += group * 3 * C
    begin = group.to(tl.int64) * rows + part * share
    count = tl.minimum(share, rows - part * share)
    lines = tl.arange(0, BLOCK_P)[:, None]
    if second:
        scale = tl.load(weight + columns, mask=within, other=0.0)
        shift = tl.load(bias + columns, mask=within, other=0.0)
        _wait(own, shares)
        mean = tl.load(statistics + columns, mask=within, other=0.0, cache_modifier=".cg")
        scale *= tl.load(statistics + C + columns, mask=within, other=0.0, cache_modifier=".cg")
        x += begin * C
        y += begin * C
        bytes_ = tl.cdiv(C, 8)
        eights = block * (BLOCK_C // 8) + tl.arange(0, BLOCK_C // 8)[None, :]
        if residual is not None:
            residual += begin * C
        if signs is not None:
            signs += begin * bytes_
        for start in tl.range(0, count, BLOCK_P, num_stages=STAGES):
            here = start + lines
            at = here * C + columns[None, :]
            held = (here < count) & within[None, :]
            value = tl.load(x + at, mask=held, other=0.0, eviction_policy="evict_first").to(tl.float32)
            value = (value - mean[None, :]) * scale[None, :] + shift[None, :]
            if residual is not None:
                value += tl.load(residual + at, mask=held, other=0.0).to(tl.float32)
            if signs is not None:
                packed = tl.reshape((value > 0).to(tl.int32), (BLOCK_P, BLOCK_C // 8, 8))
                packed = tl.sum(packed << tl.arange(0, 8)[None, None, :], 2).to(tl.uint8)
                tl.store(signs + here * bytes_ + eights, packed, mask=(here < count) & (eights < bytes_))
            if RELU:
                value = tl.where(value < 0, 0.0, value)  # NaN stays
            tl.store(y + at, value.to(y.dtype.element_ty), mask=held)
    else:
        origin = tl.load(x + group.to(tl.int64) * rows * C + columns, mask=within, other=0.0).to(tl.float32)
        total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
        squares = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
        x += begin * C
        for start in tl.range(0, count, BLOCK_P, num_stages=STAGES):
            here = start + lines
            held = (here < count) & within[None, :]
            value = tl.load(x + here * C + columns[None, :], mask=held, other=0.0).to(tl.float32)
            value = tl.where(held, value - origin[None, :], 0.0)
            total += value
            squares += value * value
        partials += group * shares * (2 * C)
        tl.store(partials + part * (2 * C) + columns, tl.sum(total, 0), mask=within)
        tl.store(partials + part * (2 * C) + C + columns, tl.sum(squares, 0), mask=within)
        if _is_last(own, shares):
            sum_, square = _merged(partials, shares, columns, C, within, BLOCK_P)
            moved = sum_ / rows
            variance = tl.maximum(square / rows - moved * moved, 0.0, propagate_nan=tl.PropagateNan.ALL)
            tl.store(statistics + columns, origin + moved, mask=within)
            tl.store(statistics + C + columns, 1.0 / tl.sqrt_rn(variance + eps), mask=within)
            tl.store(statistics + 2 * C + columns, variance, mask=within)
            _ready(own)
            if _is_last(counters + 1 + block, groups):
                tl.store(counters + 1 + block, 0)
                statistics -= group * 3 * C
                mean = _sum_of(statistics, groups, 3 * C, columns, within)
                spread = _sum_of(statistics + 2 * C, groups, 3 * C, columns, within) * (rows / (rows - 1.0))
                before = tl.load(running_mean + columns, mask=within, other=0.0)
                tl.store(running_mean + columns, before + momentum * (mean / groups - before), mask=within)
                before = tl.load(running_var + columns, mask=within, other=0.0)
                tl.store(running_var + columns, before + momentum * (spread / groups - before), mask=within)
                if block == 0:
                    tl.store(tracked, tl.load(tracked) + 1)


@triton.jit
def _read(x, gradient, signs, mean, scale, shift, at, held, bits, held_bits, RELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """x less its mean, and the gradient where y was positive."""
    centred = tl.load(x + at, mask=held, other=0.0).to(tl.float32) - mean[None, :]
    given = tl.load(gradient + at, mask=held, other=0.0).to(tl.float32)
    if RELU:
        if signs is not None:
            packed = tl.load(signs + bits, mask=held_bits, other=0).to(tl.int32)
            positive = tl.reshape((packed[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1, given.shape) != 0
        else:
            positive = centred * scale[None, :] + shift[None, :] > 0
        given = tl.where(positive, given, 0.0)
    return centred, given


@triton.jit(do_not_specialize=UNSPECIALISED)
def _backward(  # type: ignore[no-untyped-def]
    x,
    gradient,
    signs,
    into,
    into_residual,
    weight,
    bias,
    statistics,
    sums,
    into_weight,
    into_bias,
    partials,
    counters,
    rows,
    share,
    shares,
    groups,
    ahead,
    C,
    RELU: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """sums (groups, 2, C): of the masked gradient, and of it times the normalised x."""
    blocks = tl.cdiv(C, BLOCK_C)
    problem, part, second = _turn(counters, shares, groups * blocks, ahead)
    group = problem // blocks
    block = problem % blocks
    columns = block * BLOCK_C + tl.arange(0, BLOCK_C)
    within = columns < C
    own = counters + 1 + blocks + problem
    statistics += group * 3 * C
    sums += group * 2 * C
    begin = group.to(tl.int64) * rows + part * share
    count = tl.minimum(share, rows - part * share)
    x += begin * C
    gradient += begin * C
    bytes_ = tl.cdiv(C, 8)
    if signs is not None:
        signs += begin * bytes_
    lines = tl.arange(0, BLOCK_P)[:, None]
    eights = block * (BLOCK_C // 8) + tl.arange(0, BLOCK_C // 8)[None, :]
    mean = tl.load(statistics + columns, mask=within, other=0.0)
    inverse = tl.load(statistics + C + columns, mask=within, other=0.0)
    scale = inverse * tl.load(weight + columns, mask=within, other=0.0)
    shift = tl.load(bias + columns, mask=within, other=0.0)
    if second:
        _wait(own, shares)
        less = tl.load(sums + columns, mask=within, other=0.0, cache_modifier=".cg") / rows
        slope = tl.load(sums + C + columns, mask=within, other=0.0, cache_modifier=".cg") / rows * inverse
        into += begin * C
        if into_residual is not None:
            into_residual += begin * C
        for start in tl.range(0, count, BLOCK_P, num_stages=STAGES):
            here = start + lines
            at = here * C + columns[None, :]
            held = (here < count) & within[None, :]
            held_bits = (here < count) & (eights < bytes_)
            centred, given = _read(
                x, gradient, signs, mean, scale, shift, at, held, here * bytes_ + eights, held_bits, RELU
            )
            found = scale[None, :] * (given - less[None, :] - centred * slope[None, :])
            tl.store(into + at, found.to(into.dtype.element_ty), mask=held)
            if into_residual is not None:
                tl.store(into_residual + at, given.to(into_residual.dtype.element_ty), mask=held)
    else:
        total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
        product = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
        for start in tl.range(0, count, BLOCK_P, num_stages=STAGES):
            here = start + lines
            at = here * C + columns[None, :]
            held = (here < count) & within[None, :]
            held_bits = (here < count) & (eights < bytes_)
            centred, given = _read(
                x, gradient, signs, mean, scale, shift, at, held, here * bytes_ + eights, held_bits, RELU
            )
            total += given
            product += given * centred
        partials += group * shares * (2 * C)
        tl.store(partials + part * (2 * C) + columns, tl.sum(total, 0), mask=within)
        tl.store(partials + part * (2 * C) + C + columns, tl.sum(product, 0) * inverse, mask=within)
        if _is_last(own, shares):
            sum_, along = _merged(partials, shares, columns, C, within, BLOCK_P)
            tl.store(sums + columns, sum_, mask=within)
            tl.store(sums + C + columns, along, mask=within)
            _ready(own)
            if _is_last(counters + 1 + block, groups):
                tl.store(counters + 1 + block, 0)
                sums -= group * 2 * C
                tl.store(into_bias + columns, _sum_of(sums, groups, 2 * C, columns, within), mask=within)
                tl.store(into_weight + columns, _sum_of(sums + C, groups, 2 * C, columns, within), mask=within)


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
    block_p = shape.values // block_c
    rows = pixels // groups
    least = max(block_p, shape.share_kib * 1024 // (block_c * bytes_))
    shares = max(1, min(shape.programs, rows // least))
    share = triton.cdiv(triton.cdiv(rows, shares), block_p) * block_p
    shares = triton.cdiv(rows, share)
    problems = groups * triton.cdiv(channels, block_c)
    ahead = max(1, min(problems, shape.cache_mib * 2**20 // (rows * block_c * bytes_)))
    tiles = {"BLOCK_P": block_p, "BLOCK_C": block_c, "STAGES": shape.stages, "num_warps": shape.warps}
    return Work(rows, share, shares, groups, ahead), 2 * shares * problems, tiles


@cache
def counters_of(device: torch.device, stream: int) -> Tensor:
    """Zeros that each launch leaves as zeros. Launches on one stream follow each other; other streams have others."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def counters_for(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return counters_of(x.device, 0)
    return counters_of(x.device, torch.cuda.current_stream(x.device).cuda_stream)


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
        _forward[programs,](
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
    signs: Tensor,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    relu: bool,
    residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of x, weight, bias and the residual."""
    groups, _, channels = statistics.shape
    bytes_ = x.element_size() + gradient.element_size()
    work, programs, tiles = divided(BACKWARD, x.numel() // channels, channels, groups, bytes_)
    into, into_weight, into_bias, into_residual = inputs_like(x, weight, bias, residual)
    sums = weight.new_empty(groups, 2, channels)
    partials = weight.new_empty(groups, work.shares, 2, channels)
    with torch.cuda.device_of(x):
        _backward[programs,](
            x, gradient, signs if len(signs) else None, into, into_residual if residual else None, weight, bias,
            statistics, sums, into_weight, into_bias, partials, counters_for(x), *work, channels, RELU=relu, **tiles,
        )  # fmt: skip
    return into, into_weight, into_bias, into_residual


def inputs_like(x: Tensor, weight: Tensor, bias: Tensor, residual: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_residual = torch.empty_like(x) if residual else x.new_empty(0)
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias), of_residual


@gradients.register_fake
def _(x, gradient, signs, weight, bias, statistics, relu, residual):  # type: ignore[no-untyped-def]
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
    ) -> Tensor:
        x = as_matrix(x)
        residual = None if residual is None else as_matrix(residual)
        keep_signs = residual is not None and relu and any(ctx.needs_input_grad)
        y, statistics, signs = normalise(
            x, weight, bias, residual, running_mean, running_var, tracked, groups, momentum, eps, relu, keep_signs
        )
        ctx.save_for_backward(x, weight, bias, statistics, signs)
        ctx.given = relu, residual is not None
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, statistics, signs = ctx.saved_tensors
        relu, residual = ctx.given
        gradient = as_matrix(gradient)
        found = gradients(x, gradient, signs, weight, bias, statistics, relu, residual and relu)
        of_residual = None if not residual else found[3] if relu else gradient
        return *found[:3], of_residual, *[None] * 7


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
) -> Tensor:
    """Normalise each of `groups` contiguous parts of the batch by its own statistics; add the residual; apply ReLU.

    x (N, C) or (N, C, H, W), residual the same, in float32 or half precision; weight, bias (C,) in float32. groups
    divides N. The running mean, variance (C,) and number of batches move by the mean of the groups' statistics.
    Comes back as x, channels-last.
    """
    return _Norm.apply(x, weight, bias, residual, running_mean, running_var, tracked, groups, momentum, eps, relu)
