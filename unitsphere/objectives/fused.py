"""The log-sum-exp of the negatives and its gradient in one pass over them, without the N x K matrix of scores.

    lse_i = log sum_j exp(q_i.n_j / tau)        d lse_i / d q_i = (1/tau) sum_j softmax_j(q_i.n_j / tau) n_j

The gradient is attention with keys = values = negatives, so a tile of negatives is read once and serves both; the
backward pass only multiplies. Programs share out the queries and, to fill the card when these are few, the negatives;
a second kernel merges the parts of a query by their log-sum-exp.

Accuracy follows the type of the negatives:

- float32: both products keep float32's accuracy, each as several products of shorter floats.
- bfloat16: the scores stay those of float32 queries, split into two bfloat16 that lack 2^-18 of a component (a
  bfloat16 query needs no split). The weights of the gradient are rounded to bfloat16; divided by the sum of what they
  were rounded to, they stay an average of negatives.

Only the query gets a gradient: a queue takes none, and of a batch that does the matrix is small.
This module needs Triton; it is imported only where the fused form runs. (TRITON_INTERPRET=1 runs it on a CPU.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

PROGRAMS_PER_PROCESSOR = 4  # an uneven share of the last round is then small
SMALLEST_SHARE = 512  # negatives a program must have to be worth its part of the merge
PRECISION = "tf32x3"  # of products of float32


class Tiles(NamedTuple):
    """How much of the problem a program holds at once: queries, negatives; its warps, its loads under way."""

    queries: int
    negatives: int
    warps: int
    stages: int


# By type of the negatives and largest dimension. They fill the registers and the shared memory of a Hopper processor.
TILES = {
    (torch.bfloat16, 128): Tiles(128, 128, 8, 3),
    (torch.bfloat16, 256): Tiles(64, 64, 4, 3),
    (torch.float32, 128): Tiles(128, 32, 8, 2),
    (torch.float32, 256): Tiles(64, 16, 4, 2),
}


@triton.jit
def _stream(  # type: ignore[no-untyped-def]
    query,
    negatives,
    mask,
    lse,
    direction,
    N,
    K,
    share,
    temperature,
    D: tl.constexpr,
    RAGGED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A block of queries against one share of the negatives: its log-sum-exp and gradient into their part."""
    part = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    within = (rows < N)[:, None] & (columns < D)[None, :]
    q = tl.load(query + rows[:, None] * D + columns[None, :], mask=within, other=0.0)
    high = q.to(negatives.dtype.element_ty)
    low = (q - high.to(tl.float32)).to(negatives.dtype.element_ty)

    first = part.to(tl.int64) * share
    count = tl.minimum(K - first, share).to(tl.int32)
    negatives += first * D
    if mask is not None:
        mask += rows.to(tl.int64)[:, None] * K + first

    scale = 1.4426950408889634 / temperature  # log2(e): exponentials are powers of two
    largest = tl.full((BLOCK_N,), -1e30, tl.float32)  # finite, so that a query without negatives makes no NaN
    total = tl.zeros((BLOCK_N,), tl.float32)
    rounded = tl.zeros((BLOCK_N,), tl.float32)
    weighted = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, count, BLOCK_K):
        these = start + tl.arange(0, BLOCK_K)
        held = (these < count)[:, None] & (columns < D)[None, :]
        n = tl.load(negatives + these[:, None] * D + columns[None, :], mask=held, other=0.0)
        scores = tl.dot(high, tl.trans(n), input_precision=PRECISION)
        if query.dtype.element_ty != negatives.dtype.element_ty:
            scores = tl.dot(low, tl.trans(n), scores)
        if RAGGED:
            scores = tl.where((these < count)[None, :], scores, float("-inf"))
        if mask is not None:
            counts = tl.load(mask + these[None, :], mask=(rows < N)[:, None] & (these < count)[None, :], other=0)
            scores = tl.where(counts != 0, scores, float("-inf"))
        before = largest
        largest = tl.maximum(before, tl.max(scores, 1) * scale)
        fade = tl.exp2(before - largest)
        p = tl.exp2(scores * scale - largest[:, None])
        weights = p.to(n.dtype)
        total = total * fade + tl.sum(p, 1)
        rounded = rounded * fade + tl.sum(weights.to(tl.float32), 1)
        weighted = tl.dot(weights, n, weighted * fade[:, None], input_precision=PRECISION)

    some = total > 0
    found = (largest + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453
    weighted = weighted / (tl.where(some, rounded, 1.0) * temperature)[:, None]
    tl.store(lse + part * N + rows, tl.where(some, found, -1e30), mask=rows < N)
    tl.store(direction + (part * N + rows)[:, None] * D + columns[None, :], weighted, mask=within)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    lse,
    direction,
    merged_lse,
    merged_direction,
    N,
    parts,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One query's parts into one: log-sum-exps add, gradients are averaged with the share of each in the sum."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK_D)
    every = tl.arange(0, PARTS)
    found = tl.load(lse + every * N + row, mask=every < parts, other=float("-inf"))
    largest = tl.max(found, 0)
    whole = largest + tl.log(tl.sum(tl.exp(found - largest), 0))
    mean = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, parts, CHUNK):
        some = start + tl.arange(0, CHUNK)
        weights = tl.exp(tl.load(lse + some * N + row, mask=some < parts, other=float("-inf")) - whole)
        within = (some < parts)[:, None] & (columns < D)[None, :]
        tile = tl.load(direction + (some * N + row)[:, None] * D + columns[None, :], mask=within, other=0.0)
        mean += tl.sum(weights[:, None] * tile, 0)
    tl.store(merged_lse + row, whole)
    tl.store(merged_direction + row * D + columns, mean, mask=columns < D)


def share_of_negatives(query: Tensor, negatives: int, tiles: Tiles) -> int:
    """How many negatives a program takes: whole tiles, and few enough that the programs fill the card."""
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count if query.is_cuda else 2
    blocks = triton.cdiv(len(query), tiles.queries)
    parts = max(1, PROGRAMS_PER_PROCESSOR * processors // blocks)
    return triton.cdiv(max(SMALLEST_SHARE, triton.cdiv(negatives, parts)), tiles.negatives) * tiles.negatives


def stream_and_merge(
    query: Tensor, negatives: Tensor, mask: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """lse (N,) and its gradient (N, D), in float32. All tensors are contiguous."""
    (n, dim), k = query.shape, len(negatives)
    tiles = TILES[negatives.dtype, 128 if dim <= 128 else 256]
    share = share_of_negatives(query, k, tiles)
    parts = triton.cdiv(k, share)
    block_dim = max(16, triton.next_power_of_2(dim))
    lse = query.new_empty(parts, n, dtype=torch.float32)
    direction = query.new_empty(parts, n, dim, dtype=torch.float32)
    with torch.cuda.device_of(query):
        _stream[triton.cdiv(n, tiles.queries), parts](
            query,
            negatives,
            None if mask is None else mask.view(torch.uint8),
            lse,
            direction,
            n,
            k,
            share,
            temperature,
            D=dim,
            RAGGED=k % tiles.negatives != 0,
            PRECISION=PRECISION if negatives.dtype == torch.float32 else None,
            BLOCK_N=tiles.queries,
            BLOCK_K=tiles.negatives,
            BLOCK_D=block_dim,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        if parts == 1:
            return lse[0], direction[0]
        whole, mean = torch.empty_like(lse[0]), torch.empty_like(direction[0])
        _merge[n,](
            lse,
            direction,
            whole,
            mean,
            n,
            parts,
            D=dim,
            PARTS=triton.next_power_of_2(parts),
            CHUNK=16,
            BLOCK_D=block_dim,
        )
    return whole, mean


class _LseOfNegatives(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, negatives: Tensor, mask: Tensor | None, temperature: float) -> Tensor:
        lse, direction = stream_and_merge(query, negatives, mask, temperature)
        ctx.save_for_backward(direction)
        return lse

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():  # create_graph
            raise NotImplementedError("the fused form has no second derivative: call info_nce with fused=False")
        return gradient[:, None] * ctx.saved_tensors[0], None, None, None


def lse_of_negatives(query: Tensor, negatives: Tensor, temperature: float, mask: Tensor | None = None) -> Tensor:
    """log sum_j exp(q.n_j / tau), (N,) in float32, differentiable in the query.

    query (N, D), negatives (K, D), D at most 256; mask (N, K) is true where a negative counts. Bfloat16 negatives are
    taken as they are, any other type as float32; a query without negatives gets -1e30 and no gradient.
    """
    if negatives.dtype != torch.bfloat16 or query.dtype != torch.bfloat16:
        query = query.float()
    if negatives.dtype != torch.bfloat16:
        negatives = negatives.float()
    mask = None if mask is None else mask.contiguous()
    return _LseOfNegatives.apply(query.contiguous(), negatives.contiguous(), mask, temperature)
