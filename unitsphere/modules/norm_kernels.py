"""Batch norm over groups of a batch, with the residual sum and the ReLU that follow it, in one kernel a direction.

    y = relu((x - mean) / sqrt(variance + eps) * weight + bias + residual)

An activation is read as a matrix: a row for each pixel of each image, a column for each channel (channels-last). The
rows of a group and a block of columns are one problem: they have their own statistics. Each problem takes two passes.
The first sums its rows; the second reads them again and writes the result. The order of the passes lets the second
read come from the cache: it follows the first closely, and it walks from the last rows back to the first.

One launch does all of that. A program of a second pass waits until all of the first have arrived. Those have lower
numbers, and a GPU starts programs in the order of their numbers: they run already, so the wait must end.

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

    values: of a tile; columns: at most so many of it; warps: of a program; stages: tiles under way at once; programs:
    that share a problem, at most; share_kib: what a program reads at least; cache_mib: how much of the problems may be
    under way at once. alone: from so many problems on, those that read at most alone_kib are each left to one program.
    """

    values: int = 2048
    columns: int = 64
    warps: int = 4
    stages: int = 4
    programs: int = 264
    share_kib: float = 16
    cache_mib: float = 20
    alone: int = 64
    alone_kib: int = 160


FORWARD = Shape()
BACKWARD = Shape()


@triton.jit
def _turn(shares, problems, ahead, ALONE):  # type: ignore[no-untyped-def]
    """What this program does: the problem, the share of its rows, and whether it is the second pass.

    First passes of `ahead` problems come first, then second and first passes in turn, then the last second passes.
    ALONE: one program does both passes of a problem."""
    place = tl.program_id(0) // shares
    share = tl.program_id(0) % shares
    later = place - ahead
    paired = 2 * (problems - ahead)
    second = (later >= paired) | ((later >= 0) & (later % 2 == 0))
    mixed = tl.where(second, later // 2, ahead + later // 2)
    problem = tl.where(later < 0, place, tl.where(later < paired, mixed, later - (problems - ahead)))
    if ALONE:
        problem = tl.program_id(0)
    return problem, tl.where(second, shares - 1 - share, share), second


@triton.jit
def _is_last(counter, count):  # type: ignore[no-untyped-def]
    """Count this program, whose stores come before; true for the last of `count`."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1) == count - 1


@triton.jit
def _ready(counter, ALONE):  # type: ignore[no-untyped-def]
    """Let the second pass begin."""
    tl.debug_barrier()
    if not ALONE:
        tl.atomic_add(counter, 1)


@triton.jit
def _wait(counter, shares, ALONE):  # type: ignore[no-untyped-def]
    """Until the sums of a problem are there."""
    if not ALONE:
        while tl.atomic_add(counter, 0) <= shares:
            pass


@triton.jit
def _leave(counter, shares, ALONE):  # type: ignore[no-untyped-def]
    """The last program of a second pass sets the counter back for the next launch."""
    if not ALONE and tl.atomic_add(counter, 1) == 2 * shares:
        tl.store(counter, 0)


@triton.jit
def _gathered(first, second, partials, own, columns, within, shares, C, ALONE):  # type: ignore[no-untyped-def]
    """Two sums over the rows of a problem, (BLOCK_C,) each, from those of its shares; true in the last program, which
    alone has them. partials: of this share, (2, C); before it are those of other shares."""
    sum_ = tl.sum(first, 0)
    other = tl.sum(second, 0)
    last = True
    if not ALONE:
        tl.store(partials + columns, sum_, mask=within)
        tl.store(partials + C + columns, other, mask=within)
        last = _is_last(own, shares)
        if last:
            partials -= (tl.program_id(0) % shares) * (2 * C)
            sums = tl.zeros(first.shape, tl.float32)
            others = tl.zeros(first.shape, tl.float32)
            for start in tl.range(0, shares, first.shape[0], num_stages=2):
                these = start + tl.arange(0, first.shape[0])[:, None]
                mask = (these < shares) & within[None, :]
                places = partials + these * (2 * C) + columns[None, :]
                sums += tl.load(places, mask=mask, other=0.0, cache_modifier=".cg")
                others += tl.load(places + C, mask=mask, other=0.0, cache_modifier=".cg")
            sum_ = tl.sum(sums, 0)
            other = tl.sum(others, 0)
    return sum_, other, last


@triton.jit
def _sum_of(numbers, groups, stride, columns, within):  # type: ignore[no-untyped-def]
    """Over the groups, each of which has its numbers (C,) `stride` after those of the last."""
    total = tl.zeros((16, columns.shape[0]), tl.float32)
    for start in range(0, groups, 16):
        these = start + tl.arange(0, 16)[:, None]
        mask = (these < groups) & within[None, :]
        total += tl.load(numbers + these * stride + columns[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit
def _forward_sums(  # type: ignore[no-untyped-def]
    x, statistics, running_mean, running_var, tracked, partials, counters, own, columns, within, part, count, block,
    rows, shares, group, groups, eps, momentum, C, ALONE, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The first pass: sums of a share of a group's rows, x; the last program makes them the statistics."""
    origin = tl.load(x + columns, mask=within, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    x += part.to(tl.int64) * C
    for start in tl.range(0, count, BLOCK_P, num_stages=STAGES):
        here = start + tl.arange(0, BLOCK_P)[:, None]
        held = (here < count) & within[None, :]
        value = tl.load(x + here * C + columns[None, :], mask=held, other=0.0).to(tl.float32)
        value = tl.where(held, value - origin[None, :], 0.0)
        total += value
        squares += value * value
    sum_, square, last = _gathered(total, squares, partials, own, columns, within, shares, C, ALONE)
    if last:
        moved = sum_ / rows
        variance = tl.maximum(square / rows - moved * moved, 0.0, propagate_nan=tl.PropagateNan.ALL)
        own_statistics = statistics + group * 3 * C
        tl.store(own_statistics + columns, origin + moved, mask=within)
        tl.store(own_statistics + C + columns, 1.0 / tl.sqrt_rn(variance + eps), mask=within)
        tl.store(own_statistics + 2 * C + columns, variance, mask=within)
        _ready(own, ALONE)
        if _is_last(counters + block, groups):
            tl.store(counters + block, 0)
            mean = _sum_of(statistics, groups, 3 * C, columns, within)
            spread = _sum_of(statistics + 2 * C, groups, 3 * C, columns, within) * (rows / (rows - 1.0))
            before = tl.load(running_mean + columns, mask=within, other=0.0)
            tl.store(running_mean + columns, before + momentum * (mean / groups - before), mask=within)
            before = tl.load(running_var + columns, mask=within, other=0.0)
            tl.store(running_var + columns, before + momentum * (spread / groups - before), mask=within)
            if block == 0:
                tl.store(tracked, tl.load(tracked) + 1)


@triton.jit
def _forward_values(  # type: ignore[no-untyped-def]
    x, residual, y, signs, weight, bias, statistics, own, columns, within, count, block, shares, C, RELU, ALONE,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The second pass over a share of the rows; x, residual, y and signs begin with it."""
    scale = tl.load(weight + columns, mask=within, other=0.0)
    shift = tl.load(bias + columns, mask=within, other=0.0)
    _wait(own, shares, ALONE)
    mean = tl.load(statistics + columns, mask=within, other=0.0, cache_modifier=".cg")
    scale *= tl.load(statistics + C + columns, mask=within, other=0.0, cache_modifier=".cg")
    bytes_ = tl.cdiv(C, 8)
    eights = block * (BLOCK_C // 8) + tl.arange(0, BLOCK_C // 8)[None, :]
    for start in tl.range(0, count, BLOCK_P, num_stages=STAGES):
        here = start + tl.arange(0, BLOCK_P)[:, None]
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
    _leave(own, shares, ALONE)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _forward(  # type: ignore[no-untyped-def]
    x, residual, y, signs, weight, bias, statistics, running_mean, running_var, tracked, partials, counters,
    rows, share, shares, groups, ahead, eps, momentum, C,
    RELU: tl.constexpr, ALONE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """statistics (groups, 3, C): mean, 1 / deviation, variance; signs (P, C / 8): a bit where y is positive."""
    blocks = tl.cdiv(C, BLOCK_C)
    problem, part, second = _turn(shares, groups * blocks, ahead, ALONE)
    group = problem // blocks
    block = problem % blocks
    columns = block * BLOCK_C + tl.arange(0, BLOCK_C)
    within = columns < C
    own = counters + blocks + problem
    begin = group.to(tl.int64) * rows
    part *= share
    count = tl.minimum(share, rows - part)
    if ALONE | (not second):
        _forward_sums(
            x + begin * C, statistics, running_mean, running_var, tracked,
            partials + (group * shares + part // share) * (2 * C), counters, own, columns, within, part, count, block,
            rows, shares, group, groups, eps, momentum, C, ALONE, BLOCK_P, BLOCK_C, STAGES,
        )  # fmt: skip
    if ALONE | second:
        begin += part
        if residual is not None:
            residual += begin * C
        if signs is not None:
            signs += begin * tl.cdiv(C, 8)
        _forward_values(
            x + begin * C, residual, y + begin * C, signs, weight, bias, statistics + group * 3 * C, own, columns,
            within, count, block, shares, C, RELU, ALONE, BLOCK_P, BLOCK_C, STAGES,
        )  # fmt: skip


@triton.jit
def _backward_sums(  # type: ignore[no-untyped-def]
    x, gradient, signs, into_residual, weight, bias, statistics, sums, into_weight, into_bias, partials, counters, own,
    columns, within, count, block, shares, group, groups, C, RELU, ALONE,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The first pass: sums of the gradient and of its product with x over a share of the rows. Where y was not positive
    the gradient is 0; so masked, it is the residual's."""
    statistics += group * 3 * C
    mean = tl.load(statistics + columns, mask=within, other=0.0)
    inverse = tl.load(statistics + C + columns, mask=within, other=0.0)
    scale = inverse * tl.load(weight + columns, mask=within, other=0.0)
    shift = tl.load(bias + columns, mask=within, other=0.0)
    bytes_ = tl.cdiv(C, 8)
    eights = block * (BLOCK_C // 8) + tl.arange(0, BLOCK_C // 8)[None, :]
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    product = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in tl.range(0, count, BLOCK_P, num_stages=STAGES):
        here = start + tl.arange(0, BLOCK_P)[:, None]
        at = here * C + columns[None, :]
        held = (here < count) & within[None, :]
        centred = tl.load(x + at, mask=held, other=0.0).to(tl.float32) - mean[None, :]
        given = tl.load(gradient + at, mask=held, other=0.0).to(tl.float32)
        if signs is not None:
            packed = tl.load(signs + here * bytes_ + eights, mask=(here < count) & (eights < bytes_), other=0)
            bits = (packed.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
            given = tl.where(tl.reshape(bits, (BLOCK_P, BLOCK_C)) != 0, given, 0.0)
            tl.store(into_residual + at, given.to(into_residual.dtype.element_ty), mask=held)
        elif RELU:
            given = tl.where(centred * scale[None, :] + shift[None, :] > 0, given, 0.0)
        total += given
        product += given * centred
    sum_, along, last = _gathered(total, product, partials, own, columns, within, shares, C, ALONE)
    if last:
        tl.store(sums + group * 2 * C + columns, sum_, mask=within)
        tl.store(sums + group * 2 * C + C + columns, along * inverse, mask=within)
        _ready(own, ALONE)
        if _is_last(counters + block, groups):
            tl.store(counters + block, 0)
            tl.store(into_bias + columns, _sum_of(sums, groups, 2 * C, columns, within), mask=within)
            tl.store(into_weight + columns, _sum_of(sums + C, groups, 2 * C, columns, within), mask=within)


@triton.jit
def _backward_values(  # type: ignore[no-untyped-def]
    x, gradient, into, weight, bias, statistics, sums, own, columns, within, count, rows, shares, C, RELU, ALONE,
    BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The second pass over a share of the rows; x, gradient and into begin with it."""
    mean = tl.load(statistics + columns, mask=within, other=0.0)
    inverse = tl.load(statistics + C + columns, mask=within, other=0.0)
    scale = inverse * tl.load(weight + columns, mask=within, other=0.0)
    shift = tl.load(bias + columns, mask=within, other=0.0)
    _wait(own, shares, ALONE)
    less = tl.load(sums + columns, mask=within, other=0.0, cache_modifier=".cg") / rows
    slope = tl.load(sums + C + columns, mask=within, other=0.0, cache_modifier=".cg") / rows * inverse
    for start in tl.range(0, count, BLOCK_P, num_stages=STAGES):
        here = start + tl.arange(0, BLOCK_P)[:, None]
        at = here * C + columns[None, :]
        held = (here < count) & within[None, :]
        centred = tl.load(x + at, mask=held, other=0.0, eviction_policy="evict_first").to(tl.float32) - mean[None, :]
        given = tl.load(gradient + at, mask=held, other=0.0, cache_modifier=".cg").to(tl.float32)
        if RELU:
            given = tl.where(centred * scale[None, :] + shift[None, :] > 0, given, 0.0)
        found = scale[None, :] * (given - less[None, :] - centred * slope[None, :])
        tl.store(into + at, found.to(into.dtype.element_ty), mask=held)
    _leave(own, shares, ALONE)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _backward(  # type: ignore[no-untyped-def]
    x, gradient, signs, into, into_residual, weight, bias, statistics, sums, into_weight, into_bias, partials, counters,
    rows, share, shares, groups, ahead, C,
    RELU: tl.constexpr, ALONE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """sums (groups, 2, C): of the masked gradient, and of it times the normalised x. With signs the first pass writes
    the masked gradient for the residual, and the second reads that."""
    blocks = tl.cdiv(C, BLOCK_C)
    problem, part, second = _turn(shares, groups * blocks, ahead, ALONE)
    group = problem // blocks
    block = problem % blocks
    columns = block * BLOCK_C + tl.arange(0, BLOCK_C)
    within = columns < C
    own = counters + blocks + problem
    partials += (group * shares + part) * (2 * C)
    part *= share
    count = tl.minimum(share, rows - part)
    begin = group.to(tl.int64) * rows + part
    x += begin * C
    gradient += begin * C
    if signs is not None:
        signs += begin * tl.cdiv(C, 8)
        into_residual += begin * C
    if ALONE | (not second):
        _backward_sums(
            x, gradient, signs, into_residual, weight, bias, statistics, sums, into_weight, into_bias, partials,
            counters, own, columns, within, count, block, shares, group, groups, C, RELU, ALONE,
            BLOCK_P, BLOCK_C, STAGES,
        )  # fmt: skip
    if ALONE | second:
        _backward_values(
            x, gradient if signs is None else into_residual, into + begin * C, weight, bias,
            statistics + group * 3 * C, sums + group * 2 * C, own, columns, within, count, rows, shares, C,
            RELU and signs is None, ALONE, BLOCK_P, STAGES,
        )  # fmt: skip


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
    problems = groups * triton.cdiv(channels, block_c)
    kib = rows * block_c * bytes_ / 1024  # of a problem
    shares = max(1, min(shape.programs, int(kib / shape.share_kib)))
    if problems >= shape.alone and kib <= shape.alone_kib:
        shares = 1
    share = triton.cdiv(triton.cdiv(rows, shares), block_p) * block_p
    shares = triton.cdiv(rows, share)
    ahead = min(problems, max(2, int(1024 * shape.cache_mib / kib)))
    tiles = {"BLOCK_P": block_p, "BLOCK_C": block_c, "STAGES": shape.stages, "num_warps": shape.warps}
    alone = shares == 1
    return Work(rows, share, shares, groups, ahead), (2 - alone) * shares * problems, tiles | {"ALONE": alone}


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
