"""Inner products of many pairs of rows in one pass, without a copy of the rows.

MoCHi's mixtures need n_i.n_j for hundreds of thousands of pairs of a queue. Gathered, their rows are written and read
again several times; here each is read once, mostly from the cache that holds the queue.
This module needs Triton; it is imported only where the fused form runs. (TRITON_INTERPRET=1 runs it on a CPU.)
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

VALUES_HELD = 4096  # of one row of each pair, by a program


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    vectors, first, second, products, count, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    these = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = these < count
    one = tl.load(first + these, mask=there, other=0)
    other = tl.load(second + these, mask=there, other=0)
    columns = tl.arange(0, BLOCK_D)
    within = there[:, None] & (columns < D)[None, :]
    x = tl.load(vectors + one[:, None] * D + columns[None, :], mask=within, other=0.0)
    y = tl.load(vectors + other[:, None] * D + columns[None, :], mask=within, other=0.0)
    tl.store(products + these, tl.sum(x * y, 1), mask=there)


def dots_of_pairs(vectors: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """x_i.x_j of float32 vectors (K, D) at places first and second (int64, of any one shape). Without gradient."""
    vectors, first, second = vectors.contiguous(), first.contiguous(), second.contiguous()
    products = torch.empty(first.shape, dtype=torch.float32, device=vectors.device)
    block_dim = triton.next_power_of_2(vectors.shape[1])
    block = max(1, VALUES_HELD // block_dim)
    if products.numel():
        with torch.cuda.device_of(vectors):
            _products[triton.cdiv(products.numel(), block),](
                vectors, first, second, products, products.numel(), D=vectors.shape[1], BLOCK=block, BLOCK_D=block_dim
            )
    return products
