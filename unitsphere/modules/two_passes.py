"""Two passes over the same memory in one launch: sums over all of it, then what needs the sums.

The work falls into problems, each of which has sums of its own, and a problem into shares. The second pass over a
problem follows the first closely, and it walks from the last rows back to the first: so most of what it reads again
comes from the cache. While some programs wait for the sums of one problem, others read the next.

A program of a second pass waits until all of the first have arrived. Those have lower numbers, and a GPU starts
programs in the order of their numbers: they run already, so the wait must end.

Each problem has a counter, which begins at 0 and ends at 0: every program of the first pass adds 1, and so does the
last of them when the sums are there; then every program of the second pass adds 1, and the last sets it back.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def turn(shares, problems, ahead, ALONE):  # type: ignore[no-untyped-def]
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
def is_last(counter, count):  # type: ignore[no-untyped-def]
    """Count this program, whose stores come before; true for the last of `count`."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1) == count - 1


@triton.jit
def ready(counter, ALONE):  # type: ignore[no-untyped-def]
    """Let the second pass begin."""
    tl.debug_barrier()
    if not ALONE:
        tl.atomic_add(counter, 1)


@triton.jit
def wait(counter, shares, ALONE):  # type: ignore[no-untyped-def]
    """Until the sums of a problem are there."""
    if not ALONE:
        while tl.atomic_add(counter, 0) <= shares:
            pass


@triton.jit
def leave(counter, shares, ALONE):  # type: ignore[no-untyped-def]
    """The last program of a second pass sets the counter back for the next launch."""
    if not ALONE and tl.atomic_add(counter, 1) == 2 * shares:
        tl.store(counter, 0)


@triton.jit
def gathered(first, second, partials, own, columns, within, shares, C, ALONE):  # type: ignore[no-untyped-def]
    """Two sums over the rows of a problem, (BLOCK_C,) each, from those of its shares; true in the last program, which
    alone has them. partials: of this share, (2, C); before it are those of other shares."""
    sum_ = tl.sum(first, 0)
    other = tl.sum(second, 0)
    last = True
    if not ALONE:
        tl.store(partials + columns, sum_, mask=within)
        tl.store(partials + C + columns, other, mask=within)
        last = is_last(own, shares)
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
def sum_of(numbers, groups, stride, columns, within):  # type: ignore[no-untyped-def]
    """Over the groups, each of which has its numbers (C,) `stride` after those of the last."""
    total = tl.zeros((16, columns.shape[0]), tl.float32)
    for start in range(0, groups, 16):
        these = start + tl.arange(0, 16)[:, None]
        mask = (these < groups) & within[None, :]
        total += tl.load(numbers + these * stride + columns[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)
