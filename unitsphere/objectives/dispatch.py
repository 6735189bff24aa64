"""Which form of the negatives' log-sum-exp runs: plain operations, or the fused kernel of `fused.py`."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from unitsphere.common.devices import TRITON
from unitsphere.common.errors import UsageError

FUSED_DIM = 256  # the kernel keeps a block of whole queries on the chip
FUSED_MEMORY = 196_608  # bytes of shared memory that its largest tiles take: an H100 has them, an A100 has not
FUSED_SCORES = 2**22  # N x K from which the kernel is faster


def why_not_fused(query: Tensor, negatives: Tensor) -> str | None:
    """Say what forbids the fused form for these negatives; None where nothing does."""
    if not TRITON:
        return "Triton is not installed"
    if not query.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the queries are on the {query.device.type}"
    if negatives.dim() != 2:
        return "each query has negatives of its own"
    if negatives.requires_grad:
        return "the negatives take a gradient"
    if query.dtype == torch.float64 or negatives.dtype == torch.float64:
        return "the inputs are float64"
    if query.shape[1] > FUSED_DIM:
        return f"the vectors have {query.shape[1]} dimensions, more than {FUSED_DIM}"
    return None


def takes_fused(query: Tensor, negatives: Tensor, asked: bool | None) -> bool:
    """Decide whether the fused form runs. asked: what the caller wants; None takes it where it is possible and faster,
    which is for many scores on a card that its tiles were cut for."""
    if asked is None:
        return (
            query.is_cuda
            and query.shape[0] * negatives.shape[0] >= FUSED_SCORES
            and torch.cuda.get_device_properties(query.device).shared_memory_per_block_optin >= FUSED_MEMORY
            and why_not_fused(query, negatives) is None
        )
    if asked and (reason := why_not_fused(query, negatives)):
        raise UsageError(f"fused: given True, but {reason}. Leave it out, or give False.")
    return asked


def fused_log_sum_exp(query: Tensor, negatives: Tensor, temperature: float, mask: Tensor | None) -> Tensor:
    """Compute log sum_j exp(q.n_j / tau), (N,), in one pass over the negatives (K, D): no (N, K) scores are held."""
    from unitsphere.objectives.fused import lse_of_negatives  # the only place that needs Triton

    return lse_of_negatives(query, negatives, temperature, mask)
