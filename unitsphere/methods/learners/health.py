"""What a comparison says about the health of a run, without labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unitsphere.methods.learners.negatives import Comparison
from unitsphere.objectives.contrastive import NOTHING, contrastive_loss, info_nce, negatives_of_scores, scores
from unitsphere.objectives.mixing import Synthetic

# Health is measured on so many queries of the batch: enough for a mean, and nearly free beside a large queue.
HEALTH_QUERIES = 64


@torch.no_grad()
def signs_of_health(
    comparison: Comparison,
    mixed: Synthetic | None = None,
    *,
    temperature: float,
    alpha: float | None = None,
    alpha_on: str = "all",
    **more: Any,
) -> dict[str, Tensor]:
    """Measure signs of health on the first queries of a comparison; scores in float32, as in the loss.

    mixed: the synthetic negatives of the queries, if any. The other arguments are those that `info_nce` has in the
    loss. Returns scalars by name:

    log_k: log(1 + K), with EqCo log(1 + alpha): the loss of an encoder that cannot tell keys from negatives. Synthetic
    negatives count too.
    mutual_information_bound: log(1 + alpha) - L (EqCo Fig. 1). It is a bound only for one key and real negatives that
    do not depend on the query: so it is taken from these also where the loss has more.
    gradient_norm and its deviation over queries: |dL/dq| of the loss on real negatives (EqCo Fig. 2), beside the bound
    of EqCo's Theorem 2. With mixed negatives also `signs_of_mixing`.
    """
    query, keys = comparison.query[:HEALTH_QUERIES].detach(), comparison.keys[:HEALTH_QUERIES].detach()
    negatives = comparison.negatives.detach()
    mask = None if comparison.mask is None else comparison.mask[:HEALTH_QUERIES]
    with torch.autocast(query.device.type, enabled=False):
        positive = (query * keys[:, 0]).sum(dim=1) / temperature
        met = scores(query, negatives.to(query.dtype), temperature)
        against = negatives_of_scores(met, mask).weighed(alpha)
        if mask is None:
            count, mean = torch.full_like(positive, met.shape[1]), met.mean()
        else:
            count = mask.sum(dim=1).to(met.dtype).clamp(min=1)
            mean = (met * mask).sum() / count.sum()
            met = met.masked_fill(~mask, NOTHING)
        weight = count if alpha is None else torch.full_like(count, alpha)
        plain_loss = contrastive_loss(positive, torch.zeros_like(positive), against, 0.0)
        how = {"temperature": temperature, "alpha": alpha, "alpha_on": alpha_on, **more}
        with torch.enable_grad():
            loss = info_nce(query.requires_grad_(), keys, negatives, mask=mask, **how)
            (gradient,) = torch.autograd.grad(len(query) * loss, query)
        norms = gradient.norm(dim=1)
    signs = {
        "positive_similarity": temperature * positive.mean(),
        "negative_similarity": temperature * mean,
        "contrastive_accuracy": proxy_accuracy(positive, met),
        "log_k": torch.log1p(weight).mean(),
        "mutual_information_bound": (torch.log1p(weight) - plain_loss).mean(),
        "gradient_norm": norms.mean(),
        "gradient_norm_deviation": norms.std(correction=0),
        "gradient_norm_bound": gradient_bound(positive, against, temperature).mean(),
    }
    if mixed is not None:
        signs |= signs_of_mixing(positive, met, mixed, None if alpha is not None and alpha_on == "all" else weight)
    return signs


def signs_of_mixing(positive: Tensor, met: Tensor, mixed: Synthetic, weight: Tensor | None) -> dict[str, Tensor]:
    """Measure how hard real and synthetic negatives are (MoCHi 4.3).

    positive: (n,), the scores of the keys; met: (n, K), of the real negatives; weight: (n,), what those count for in
    the loss, where synthetic negatives count beside them; None where they share in it.
    """
    kinds = {"pair": mixed.pairs[: len(positive)], "with_query": mixed.with_query[: len(positive)]}
    kinds = {kind: found for kind, found in kinds.items() if found.shape[1]}
    signs = {f"highest_{kind}": highest_score(found) for kind, found in kinds.items()}
    signs["highest_negative"] = highest_score(met)
    if weight is not None:
        count = sum(((found > NOTHING).sum(dim=1) for found in kinds.values()), torch.zeros_like(weight))
        signs["log_k"] = torch.log1p(weight + count).mean()
    signs["accuracy_among_synthetic"] = proxy_accuracy(positive, met, *kinds.values())
    return signs


def gradient_bound(positive: Tensor, against: Tensor, temperature: float) -> Tensor:
    """Bound |dL/dq| of each query with one unit key (EqCo, Theorem 2): (2/tau) (1 - e^s0 / (e^s0 + alpha E e^s)).

    positive: (N,), the key's score over the temperature; against: (N,), the log-sum-exp of the negatives as in the
    loss. Returns (N,).
    """
    return (2 / temperature) * torch.sigmoid(against - positive)


def proxy_accuracy(positive: Tensor, *negatives: Tensor) -> Tensor:
    """Share of queries whose key scores above all their negatives (MoCHi, Fig. 2b).

    positive: (n,), the keys' scores; negatives: (n, any) each, of the real ones alone or also of the synthetic ones.
    """
    return torch.stack([(positive[:, None] > scores).all(dim=1) for scores in negatives]).all(dim=0).float().mean()


def highest_score(scores: Tensor) -> Tensor:
    """Mean over queries of their highest score (n, any) among negatives of one kind (MoCHi, section 4.3).

    Queries without a negative of the kind are left out; NaN where no query has one.
    """
    if not scores.shape[1]:
        return scores.new_full((), torch.nan)
    highest = scores.amax(dim=1)
    return highest.where(highest > NOTHING, torch.nan).nanmean()
