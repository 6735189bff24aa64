"""What a query is compared with, which of it counts, and what the comparison says of the health of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unitsphere.common.distributed import rank
from unitsphere.common.randomness import lots
from unitsphere.methods.learners.learner import Inputs
from unitsphere.objectives.contrastive import NOTHING, contrastive_loss, gradient_bound, negatives_of_scores, scores
from unitsphere.objectives.mixing import Synthetic, highest_score, proxy_accuracy

# Health is measured on so many queries of the batch: enough for a mean, and nearly free beside a large queue.
HEALTH_QUERIES = 64


@dataclass(frozen=True)
class Comparison:
    """What a query is compared with. query: (n, D); keys: (n, M, D); negatives: (K, D), shared; allowed: (n, K) is
    true where a negative counts for a query, None where all do; rows: (n,), the queries' numbers in the whole batch;
    lot: decides what is mixed for them, None where nothing is."""

    query: Tensor
    keys: Tensor
    negatives: Tensor
    allowed: Tensor | None
    rows: Tensor
    lot: Tensor | None = None

    def first(self, count: int) -> Comparison:
        """Of the first queries alone, without gradient."""
        allowed = None if self.allowed is None else self.allowed[:count]
        query, keys = self.query[:count].detach(), self.keys[:count].detach()
        return Comparison(query, keys, self.negatives.detach(), allowed, self.rows[:count], self.lot)


def rows_of(query: Tensor, inputs: Inputs) -> Tensor:
    """(n,): the numbers of these queries in the whole batch, of which they are this rank's part, or a part of that."""
    return inputs.get("place", rank()) * len(query) + torch.arange(len(query), device=query.device)


def drawn(lot: Tensor, rows: Tensor, count: int, candidates: int, allowed: Tensor | None, shared: bool) -> Tensor:
    """(n, candidates): true at `count` of each row's allowed candidates, drawn for each row, or shared once for all:
    then a row that may not have one of them has one fewer."""
    if shared:
        chosen = _lowest(lots(lot, torch.zeros_like(rows[:1]), candidates), count)
        return chosen.expand(len(rows), -1) if allowed is None else chosen & allowed
    tickets = lots(lot, rows, candidates)
    if allowed is None:
        return _lowest(tickets, count)
    return _lowest(tickets.masked_fill(~allowed, 2**62), count) & allowed


def _lowest(tickets: Tensor, count: int) -> Tensor:
    """True at the `count` lowest tickets of each row."""
    return tickets <= tickets.kthvalue(count, dim=1, keepdim=True).values


@torch.no_grad()
def signs_of_health(
    few: Comparison,
    loss: Callable[[Comparison], Tensor],
    mixed: Synthetic | None = None,
    *,
    temperature: float,
    alpha: float | None,
    alpha_on: str = "all",
) -> dict[str, Tensor]:
    """Label-free signs of health on a few queries; scores in float32, as in the loss. loss: the mean over queries.

    log_k: log(1 + K), with EqCo log(1 + alpha): the loss of an encoder that cannot tell keys from negatives, of which
    what is mixed is part.
    mutual_information_bound: log(1 + alpha) - L (EqCo Fig. 1), a bound only for one key and real negatives that
    do not depend on the query: so it is taken from these also where the loss has more. gradient_norm and its
    deviation over queries: |dL/dq| of the loss on real negatives (EqCo Fig. 2), beside the bound of its Theorem 2.
    While negatives are mixed: the highest scores of the real ones and of both kinds of synthetic ones, and the
    accuracy among all (MoCHi 4.3).
    """
    with torch.autocast(few.query.device.type, enabled=False):
        positive = (few.query * few.keys[:, 0]).sum(dim=1) / temperature
        met = scores(few.query, few.negatives.to(few.query.dtype), temperature)
        against = negatives_of_scores(met, few.allowed).weighed(alpha)
        if few.allowed is None:
            count, mean = torch.full_like(positive, met.shape[1]), met.mean()
        else:
            count = few.allowed.sum(dim=1).to(met.dtype).clamp(min=1)
            mean = (met * few.allowed).sum() / count.sum()
            met = met.masked_fill(~few.allowed, NOTHING)
        weight = count if alpha is None else torch.full_like(count, alpha)
        plain_loss = contrastive_loss(positive, torch.zeros_like(positive), against, 0.0)
        with torch.enable_grad():
            query = few.query.requires_grad_()
            (gradient,) = torch.autograd.grad(len(query) * loss(replace(few, query=query)), query)
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
        kinds = {"pair": mixed.pairs[: len(positive)], "with_query": mixed.with_query[: len(positive)]}
        kinds = {kind: found for kind, found in kinds.items() if found.shape[1]}
        signs |= {f"highest_{kind}": highest_score(found) for kind, found in kinds.items()}
        signs["highest_negative"] = highest_score(met)
        if alpha is None or alpha_on == "real":
            more = sum(((found > NOTHING).sum(dim=1) for found in kinds.values()), torch.zeros_like(weight))
            signs["log_k"] = torch.log1p(weight + more).mean()
        signs["accuracy_among_synthetic"] = proxy_accuracy(positive, met, *kinds.values())
    return signs
