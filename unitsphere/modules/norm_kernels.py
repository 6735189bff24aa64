"""Batch norm over groups of a batch, with the residual sum and the ReLU that follow it, in one kernel a direction.

    y = relu((x - mean) / sqrt(variance + eps) * weight + bias + residual)

An activation is read as a matrix: a row for each pixel of each image, a column for each channel (channels-last). The
rows of a group and a block of columns are one problem: they have their own statistics. Each problem takes two passes
of one launch (`two_passes.py`): the first sums its rows; the second reads them again and writes the result.

Sums are float32, shifted by the first row so that nothing cancels. The backward pass computes the mask of the ReLU
again from x, or reads it as one bit a value where a residual was added.
This module needs Triton; it is imported only where the kernels run. (TRITON_INTERPRET=1 runs them on a CPU.)
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from unitsphere.modules.two_passes import gathered, is_last, leave, ready, sum_of, turn, wait

UNSPECIALISED = ["rows", "share", "shares", "groups", "ahead"]


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
    sum_, square, last = gathered(total, squares, partials, own, columns, within, shares, C, ALONE)
    if last:
        moved = sum_ / rows
        variance = tl.maximum(square / rows - moved * moved, 0.0, propagate_nan=tl.PropagateNan.ALL)
        own_statistics = statistics + group * 3 * C
        tl.store(own_statistics + columns, origin + moved, mask=within)
        tl.store(own_statistics + C + columns, 1.0 / tl.sqrt_rn(variance + eps), mask=within)
        tl.store(own_statistics + 2 * C + columns, variance, mask=within)
        ready(own, ALONE)
        if is_last(counters + block, groups):
            tl.store(counters + block, 0)
            mean = sum_of(statistics, groups, 3 * C, columns, within)
            spread = sum_of(statistics + 2 * C, groups, 3 * C, columns, within) * (rows / (rows - 1.0))
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
    wait(own, shares, ALONE)
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
    leave(own, shares, ALONE)


@triton.jit(do_not_specialize=UNSPECIALISED)
def forward(  # type: ignore[no-untyped-def]
    x, residual, y, signs, weight, bias, statistics, running_mean, running_var, tracked, partials, counters,
    rows, share, shares, groups, ahead, eps, momentum, C,
    RELU: tl.constexpr, ALONE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """statistics (groups, 3, C): mean, 1 / deviation, variance; signs (P, C / 8): a bit where y is positive."""
    blocks = tl.cdiv(C, BLOCK_C)
    problem, part, second = turn(shares, groups * blocks, ahead, ALONE)
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
    sum_, along, last = gathered(total, product, partials, own, columns, within, shares, C, ALONE)
    if last:
        tl.store(sums + group * 2 * C + columns, sum_, mask=within)
        tl.store(sums + group * 2 * C + C + columns, along * inverse, mask=within)
        ready(own, ALONE)
        if is_last(counters + block, groups):
            tl.store(counters + block, 0)
            tl.store(into_bias + columns, sum_of(sums, groups, 2 * C, columns, within), mask=within)
            tl.store(into_weight + columns, sum_of(sums + C, groups, 2 * C, columns, within), mask=within)


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
    wait(own, shares, ALONE)
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
    leave(own, shares, ALONE)


@triton.jit(do_not_specialize=UNSPECIALISED)
def backward(  # type: ignore[no-untyped-def]
    x, gradient, also, signs, into, into_residual, weight, bias, statistics, sums, into_weight, into_bias, partials,
    counters, rows, share, shares, groups, ahead, C,
    RELU: tl.constexpr, ALONE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """sums (groups, 2, C): of the masked gradient, and of it times the normalised x. With signs the first pass writes
    the masked gradient for the residual, and the second reads that. also: added to the gradient, only with signs."""
    blocks = tl.cdiv(C, BLOCK_C)
    problem, part, second = turn(shares, groups * blocks, ahead, ALONE)
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
