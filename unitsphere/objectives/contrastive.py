"""One loss behind MoCo, SimCLR, EqCo, SiMo, JCL and MoCHi.

Write, for a query q with positive keys k_1..k_M and negatives n_1..n_K, all scores over the temperature,

    p_m = q.k_m / tau        mean = (1/M) sum_m p_m        var = (1/M) sum_m (p_m - mean)^2
    l_j = q.n_j / tau        lse  = log sum_j exp(l_j)

    L = log( exp(mean + (lambda/2) var) + (alpha/K) exp(lse) ) - mean

M = 1 and alpha = K is InfoNCE (MoCo Eq. 1); a free alpha is EqCo's margin (Eq. 5); M > 1 with lambda > 0 is
JCL (Eq. S.3: q' Sigma q / tau^2 is the variance of the positive scores, so no covariance is formed); MoCHi
appends scores to the negatives. The seam is the log-sum-exp of the negatives: every source of negatives gives,
per query, a log-sum-exp and a count; sources add; the formula below never sees a mask or a queue.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from unitsphere.common.devices import TRITON
from unitsphere.common.errors import UsageError, check_word

# Stands for the score of a negative that does not count. Finite, so that a query without any negative has a
# gradient of zero and not of NaN; exp of it is zero in every floating type.
NOTHING = -1e30

FUSED_DIM = 256  # the fused form keeps a block of whole queries on the chip
FUSED_MEMORY = 196_608  # bytes of shared memory that its largest tiles take: an H100 has them, an A100 has not
FUSED_SCORES = 2**22  # N x K from which it is the faster


@dataclass(frozen=True)
class Negatives:
    """What the loss needs to know of the negatives: per query a log-sum-exp (N,) and a count, (N,) or one."""

    lse: Tensor
    count: Tensor | int

    def __add__(self, other: Negatives) -> Negatives:
        return Negatives(torch.logaddexp(self.lse, other.lse), self.count + other.count)

    def weighed(self, alpha: float | Tensor | None) -> Tensor:
        """(N,): the log-sum-exp as if there were alpha of them, or (N,) of each query's; log(alpha/K) on every score is
        EqCo's margin over tau."""
        if alpha is None:
            return self.lse
        wanted = alpha.to(self.lse.dtype).log() if isinstance(alpha, Tensor) else math.log(alpha)
        if isinstance(self.count, int):  # stays on the host: moving it would break a recording of the step
            return self.lse + (wanted - math.log(max(self.count, 1)))
        return self.lse + (wanted - self.count.to(self.lse.dtype).clamp(min=1).log())


def negatives_of_scores(scores: Tensor, mask: Tensor | None = None) -> Negatives:
    """Negatives given by their scores (N, K), already over the temperature; mask is true where one counts."""
    if mask is None:
        return Negatives(torch.logsumexp(scores, dim=1), scores.shape[1])
    return Negatives(torch.logsumexp(scores.masked_fill(~mask, NOTHING), dim=1), mask.sum(dim=1))


def scores(query: Tensor, others: Tensor, temperature: float) -> Tensor:
    """q.n / tau as (N, K): query (N, D) against others shared (K, D) or of its own (N, K, D)."""
    if others.dim() == 2:
        return query @ others.T / temperature
    return torch.einsum("nd,nkd->nk", query, others) / temperature


def why_not_fused(query: Tensor, negatives: Tensor) -> str | None:
    """What forbids the fused form for these negatives, if anything does."""
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


def fused_pays(query: Tensor, negatives: Tensor) -> bool:
    """Whether the fused form is possible here and the faster one: many scores, on a card its tiles were cut for."""
    return (
        query.is_cuda
        and query.shape[0] * negatives.shape[0] >= FUSED_SCORES
        and torch.cuda.get_device_properties(query.device).shared_memory_per_block_optin >= FUSED_MEMORY
        and why_not_fused(query, negatives) is None
    )


def fused_negatives(query: Tensor, negatives: Tensor, temperature: float, mask: Tensor | None) -> Negatives:
    """The negatives (K, D) of each query (N, D) in one pass over them: no (N, K) scores are held."""
    from unitsphere.objectives.fused import lse_of_negatives  # the only place that needs Triton

    lse = lse_of_negatives(query, negatives, temperature, mask)
    return Negatives(lse, len(negatives) if mask is None else mask.sum(dim=1))


def contrastive_loss(mean: Tensor, variance: Tensor, against: Tensor, variance_weight: float | Tensor) -> Tensor:
    """The formula of this module, per query (N,). against: the log-sum-exp of the negatives."""
    positive = mean + 0.5 * variance_weight * variance
    return torch.logaddexp(positive, against) - mean


def gradient_bound(positive: Tensor, against: Tensor, temperature: float) -> Tensor:
    """(N,): EqCo's Theorem 2, how large |dL/dq| can be with one unit key of score `positive` over the temperature:
    (2/tau) (1 - e^s0 / (e^s0 + alpha E e^s)). against: as in the loss."""
    return (2 / temperature) * torch.sigmoid(against - positive)


def info_nce(
    query: Tensor,
    keys: Tensor,
    negatives: Tensor,
    *,
    temperature: float,
    alpha: float | None = None,
    alpha_on: str = "all",
    variance_weight: float | Tensor = 0.0,
    extra_scores: Tensor | None = None,
    mask: Tensor | None = None,
    each: bool = False,
    reduction: str = "mean",
    fused: bool | None = None,
) -> Tensor:
    """The contrastive loss of N queries: their mean or sum, or (N,) with reduction="none".

    query (N, D); keys (N, D), or (N, M, D) for M positives each; negatives (K, D) shared or (N, K, D).
    mask (N, K) is true where a negative counts. extra_scores (N, S) are further negatives given by their scores,
    already divided by the temperature, NOTHING where there is none. alpha=None is plain InfoNCE; otherwise the factor
    is alpha over the number of negatives of that query, extra scores included, or with alpha_on="real" of those alone
    that are no extra scores, which then have the factor 1. variance_weight is JCL's lambda. With
    `each` every key has a term of its own, and the loss is their mean: JCL's vanilla form, of which variance_weight is
    no part.

    Nothing is normalised here: pass unit vectors where the method wants cosines. Scores are float32 (float64
    for float64 inputs) whatever the autocast type.

    fused: take the negatives in one pass that never holds their (N, K) scores. It needs CUDA, and shared negatives
    without gradient; None takes it where it pays. It reads bfloat16 negatives as they are, which is fastest.
    """
    if alpha is not None and not alpha > 0:
        raise UsageError(f"alpha: given {alpha}; it must be greater than 0.")
    if not temperature > 0:
        raise UsageError(f"temperature: given {temperature}; it must be greater than 0.")
    check_word("alpha_on", alpha_on, ("all", "real"))
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    if fused is None:
        fused = fused_pays(query, negatives)
    elif fused and (reason := why_not_fused(query, negatives)):
        raise UsageError(f"fused: given True, but {reason}. Leave it out, or give False.")
    with torch.autocast(query.device.type, enabled=False):
        if fused:
            real = fused_negatives(query, negatives, temperature, mask)
        else:
            real = negatives_of_scores(scores(query.to(dtype), negatives.to(dtype), temperature), mask)
        query, keys = query.to(dtype), keys.to(dtype)
        positive = scores(query, keys if keys.dim() == 3 else keys[:, None], temperature)  # (N, M)
        if extra_scores is None:
            against = real.weighed(alpha)
        else:
            extra_scores = extra_scores.to(dtype)
            extra = negatives_of_scores(extra_scores, extra_scores > NOTHING)
            only_real = alpha_on == "real"
            against = torch.logaddexp(real.weighed(alpha), extra.lse) if only_real else (real + extra).weighed(alpha)
        if each:
            loss = contrastive_loss(positive.T, torch.zeros_like(positive.T), against, 0.0).mean(dim=0)
        else:
            mean, variance = positive.mean(dim=1), positive.var(dim=1, correction=0)
            loss = contrastive_loss(mean, variance, against, variance_weight)
    return reduced(loss, reduction)


def reduced(loss: Tensor, reduction: str) -> Tensor:
    match reduction:
        case "mean":
            return loss.mean()
        case "sum":
            return loss.sum()
        case "none":
            return loss
    raise UsageError(f"reduction: {reduction!r} given; allowed are mean, sum, none.")
