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

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

UNSPECIALISED = ["rows", "share", "shares", "groups", "ahead"]


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
    x, gradient, also, signs, into_residual, weight, bias, statistics, sums, into_weight, into_bias, partials, counters,
    own, columns, within, count, block, shares, group, groups, C, RELU, ALONE,
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
        if also is not None:
            given += tl.load(also + at, mask=held, other=0.0).to(tl.float32)
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
    x, gradient, also, signs, into, into_residual, weight, bias, statistics, sums, into_weight, into_bias, partials,
    counters, rows, share, shares, groups, ahead, C,
    RELU: tl.constexpr, ALONE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """sums (groups, 2, C): of the masked gradient, and of it times the normalised x. With signs the first pass writes
    the masked gradient for the residual, and the second reads that. also: added to the gradient, only with signs."""
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
    if also is not None:
        also += begin * C
    if ALONE | (not second):
        _backward_sums(
            x, gradient, also, signs, into_residual, weight, bias, statistics, sums, into_weight, into_bias, partials,
            counters, own, columns, within, count, block, shares, group, groups, C, RELU, ALONE,
            BLOCK_P, BLOCK_C, STAGES,
        )  # fmt: skip
    if ALONE | second:
        _backward_values(
            x, gradient if signs is None else into_residual, into + begin * C, weight, bias,
            statistics + group * 3 * C, sums + group * 2 * C, own, columns, within, count, rows, shares, C,
            RELU and signs is None, ALONE, BLOCK_P, STAGES,
        )  # fmt: skip
