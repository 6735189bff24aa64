"""One loss behind MoCo, SimCLR, EqCo, SiMo, JCL and MoCHi.

Write, for a query q with positive keys k_1..k_M and negatives n_1..n_K, all scores over the temperature,

    p_m = q.k_m / tau        mean = (1/M) sum_m p_m        var = (1/M) sum_m (p_m - mean)^2
    l_j = q.n_j / tau        lse  = log sum_j exp(l_j)

    L = log( exp(mean + (lambda/2) var) + (alpha/K) exp(lse) ) - mean

M = 1 and alpha = K is InfoNCE (MoCo Eq. 1); a free alpha is EqCo's margin (Eq. 5); M > 1 with lambda > 0 is
JCL (Eq. S.3: q' Sigma q / tau^2 is the variance of the positive scores, so no covariance is formed); MoCHi
appends scores to the negatives. Every source of negatives gives, per query, a log-sum-exp and a count, and sources
add: the formula never sees a mask or a queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unitsphere.common.errors import UsageError
from unitsphere.objectives.dispatch import fused_log_sum_exp, takes_fused

__all__ = ["Negatives", "contrastive_loss", "info_nce", "log_sum_exp_of", "negatives_of_scores", "scores"]

# Stands for the score of a negative that does not count. Finite, so that a query without any negative has a
# gradient of zero and not of NaN; exp of it is zero in every floating type.
NOTHING = -1e30


def contrastive_loss(mean: Tensor, variance: Tensor, against: Tensor, variance_weight: float | Tensor) -> Tensor:
    """Compute the formula of this module for each query.

    mean, variance: (N,), of the scores of its keys; against: (N,), log((alpha/K) sum_j exp(l_j)), the log-sum-exp of
    its negatives; variance_weight: lambda. Returns (N,).
    """
    positive = mean + 0.5 * variance_weight * variance
    return torch.logaddexp(positive, against) - mean


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
    """Compute the contrastive loss of N queries: their mean or sum, or (N,) with reduction="none".

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
    if alpha_on not in ("all", "real"):
        raise UsageError(f"alpha_on: {alpha_on!r} given; allowed are all, real.")
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    with torch.autocast(query.device.type, enabled=False):
        against = log_sum_exp_of(query, negatives, temperature, alpha, alpha_on, extra_scores, mask, fused)
        keys = keys if keys.dim() == 3 else keys[:, None]
        positive = scores(query.to(dtype), keys.to(dtype), temperature)  # (N, M)
        if each:
            loss = contrastive_loss(positive.T, torch.zeros_like(positive.T), against, 0.0).mean(dim=0)
        else:
            mean, variance = positive.mean(dim=1), positive.var(dim=1, correction=0)
            loss = contrastive_loss(mean, variance, against, variance_weight)
    match reduction:
        case "mean":
            return loss.mean()
        case "sum":
            return loss.sum()
        case "none":
            return loss
    raise UsageError(f"reduction: {reduction!r} given; allowed are mean, sum, none.")


def log_sum_exp_of(
    query: Tensor,
    negatives: Tensor,
    temperature: float,
    alpha: float | None,
    alpha_on: str,
    extra_scores: Tensor | None,
    mask: Tensor | None,
    fused: bool | None,
) -> Tensor:
    """Compute log((alpha/K) sum_j exp(l_j)), (N,), over all negatives of each query. Arguments as of `info_nce`."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    # On a CPU the plain form runs, unless the caller insists.
    if (query.is_cuda or fused) and takes_fused(query, negatives, fused):
        lse = fused_log_sum_exp(query, negatives, temperature, mask)
        real = Negatives(lse, len(negatives) if mask is None else mask.sum(dim=1))
    else:
        real = negatives_of_scores(scores(query.to(dtype), negatives.to(dtype), temperature), mask)
    if extra_scores is None:
        return real.weighed(alpha)
    extra_scores = extra_scores.to(dtype)
    extra = negatives_of_scores(extra_scores, extra_scores > NOTHING)
    if alpha_on == "real":
        return torch.logaddexp(real.weighed(alpha), extra.lse)
    return (real + extra).weighed(alpha)


@dataclass(frozen=True)
class Negatives:
    """What the loss needs to know about the negatives: for each query a log-sum-exp (N,) and a count, (N,) or one."""

    lse: Tensor
    count: Tensor | int

    def __add__(self, other: Negatives) -> Negatives:
        return Negatives(torch.logaddexp(self.lse, other.lse), self.count + other.count)

    def weighed(self, alpha: float | Tensor | None) -> Tensor:
        """Weigh the log-sum-exp (N,) as if there were alpha negatives, one number or (N,): log(alpha/K) added to every
        score is EqCo's margin over tau. None leaves it as it is."""
        if alpha is None:
            return self.lse
        wanted = alpha.to(self.lse.dtype).log() if isinstance(alpha, Tensor) else math.log(alpha)
        if isinstance(self.count, int):  # stays on the host: moving it would break a recording of the step
            return self.lse + (wanted - math.log(max(self.count, 1)))
        return self.lse + (wanted - self.count.to(self.lse.dtype).clamp(min=1).log())


def negatives_of_scores(scores: Tensor, mask: Tensor | None = None) -> Negatives:
    """Sum up negatives given by their scores (N, K) over the temperature; mask (N, K) is true where one counts."""
    if mask is None:
        return Negatives(torch.logsumexp(scores, dim=1), scores.shape[1])
    return Negatives(torch.logsumexp(scores.masked_fill(~mask, NOTHING), dim=1), mask.sum(dim=1))


def scores(query: Tensor, others: Tensor, temperature: float) -> Tensor:
    """Compute q.n / tau, (N, K), of queries (N, D) and others, shared (K, D) or each query's own (N, K, D)."""
    if others.dim() == 2:
        return query @ others.T / temperature
    return torch.einsum("nd,nkd->nk", query, others) / temperature
