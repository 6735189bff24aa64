"""MoCHi: synthetic negatives, mixed for each query from its hardest ones.

For a query q with negatives n_1..n_K, and n_i, n_j drawn among the N of them with the highest q.n,

    h  = l2(a n_i + (1 - a) n_j)    a in (0, 1)         s of them    (Eq. 3)
    h' = l2(b q   + (1 - b) n_j)    b in (0, 0.5)       s' of them   (section 4.2)

The loss needs only their scores, and those follow from scores: with c = q.n already known,

    q.h  = (a c_i + (1 - a) c_j)     / sqrt(a^2 |n_i|^2 + (1 - a)^2 |n_j|^2 + 2 a (1 - a) n_i.n_j)
    q.h' = (b q.sg(q) + (1 - b) c_j) / sqrt(b^2 |q|^2   + (1 - b)^2 |n_j|^2 + 2 b (1 - b) c_j)

so no synthetic vector is formed, and only n_i.n_j is new. The roots are constants, and so is sg(q): the gradient is
that of a negative which is a constant. No negative need have length 1 (JCL's mean keys have not).

All shapes are known beforehand and nothing is read back by the host: a step that mixes can be recorded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from unitsphere.common.devices import TRITON
from unitsphere.common.errors import UsageError
from unitsphere.common.randomness import lots, uniform
from unitsphere.objectives.contrastive import NOTHING

__all__ = ["Mixing", "synthesise"]

GATHERED = 2**26  # bytes that the gathered parents may take at a time
LEAST_CHANCE = 1e-12  # of a negative in a softmax draw: what float64 can still tell from nothing beside the others
TIE = 1e-5  # of a score: two that are nearer are equal
SHORTEST = 1e-12  # square of a mixture's length below which it is rounding


@dataclass(frozen=True)
class Mixing:
    """MoCHi (N, s, s') and, after `with_query`, what the paper leaves open or reports as a variant (Appendix B.2).

    hardest: N, how many of a query's negatives may be mixed; at most those at hand are; None: all ("all queue").
    pairs: s, mixtures of two negatives. with_query: s', mixtures of the query and a negative.
    detach: a mixture with the query is a constant for the gradient. distinct: the parents of a pair differ.
    rank_by: whose scores say which negatives are the hardest. mix_in: what is mixed with a negative for h'.
    weigh: the score of h' is multiplied by b. draw_temperature: parents are drawn by a softmax of the scores that rank
    them over this temperature (the paper's tau'); None: evenly.
    until: the two kinds are added in turn, a pair first, until this share of the N highest scores is synthetic;
    `pairs` and `with_query`, which must then be equal, are the most there can be.
    """

    hardest: int | None = 1024
    pairs: int = 1024
    with_query: int = 128
    detach: bool = True
    distinct: bool = True
    rank_by: Literal["query", "key"] = "query"
    mix_in: Literal["query", "key"] = "query"
    weigh: bool = False
    draw_temperature: float | None = None
    until: float | None = None

    def __post_init__(self) -> None:
        if self.hardest is not None and self.hardest < 1:
            raise UsageError(f"hardest: {self.hardest} given; give 1 or more, or None for all negatives.")
        for name in ("pairs", "with_query"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}: {getattr(self, name)} given; give 0 or more.")
        if self.hardest == 1 and self.pairs and self.distinct:
            raise UsageError("pairs: two different parents need hardest of 2 or more; give that, or pairs 0.")
        if self.draw_temperature is not None and self.draw_temperature <= 0:
            raise UsageError(f"draw_temperature: {self.draw_temperature} given; give a number above 0.")
        if self.until is not None and not 0 < self.until <= 1:
            raise UsageError(f"until: {self.until} given; give a share above 0 and at most 1.")
        if self.until is not None and self.pairs != self.with_query:
            raise UsageError(
                f"until: takes the two kinds in turn, so give as many pairs ({self.pairs}) as with_query "
                f"({self.with_query})."
            )


class Parents(NamedTuple):
    """What is mixed for each query. first, second: (n, s), places of n_i and n_j among the negatives; a: (n, s), the
    share of the first; partner: (n, s'), places of the negatives of h'; b: (n, s'), the share of the query;
    at_hand: (n, 1), how many negatives there were to draw from. With too few of them the places mean nothing."""

    first: Tensor
    second: Tensor
    a: Tensor
    partner: Tensor
    b: Tensor
    at_hand: Tensor


class Synthetic(NamedTuple):
    """The scores of the synthetic negatives over the temperature, NOTHING where a query has no such negative:
    pairs (n, s) of h, with_query (n, s') of h'."""

    pairs: Tensor
    with_query: Tensor
    parents: Parents

    @property
    def scores(self) -> Tensor:
        """(n, s + s')"""
        return torch.cat([self.pairs, self.with_query], dim=1)


def synthesise(
    query: Tensor,
    negatives: Tensor,
    mixing: Mixing,
    *,
    temperature: float,
    draw_seed: Tensor,
    rows: Tensor,
    key: Tensor | None = None,
    mask: Tensor | None = None,
) -> Synthetic:
    """Score negatives that are mixed for each query (n, D) from its own `negatives` (K, D).

    draw_seed: int64 scalar, and rows: (n,) int64, the queries' numbers in the whole batch: they decide all draws.
    key: (n, D), needed where `mixing` ranks by the key or mixes it in. mask: (n, K), true where a negative counts for a
    query: no other is mixed. Only the query takes a gradient. float32 (float64 for float64 queries) whatever the
    autocast type.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    with torch.autocast(query.device.type, enabled=False):
        query, negatives = query.to(dtype), negatives.detach().to(dtype)
        scores = query @ negatives.T
        by_query = by_key = (query.detach(), scores.detach())
        if "key" in (mixing.rank_by, mixing.mix_in):
            assert key is not None, "rank_by and mix_in 'key' need the keys"
            key = key.detach().to(dtype)
            by_key = (key, key @ negatives.T)
        ranking = (by_query if mixing.rank_by == "query" else by_key)[1]
        if mixing.mix_in == "key":
            other, other_scores = by_key
        else:
            other, other_scores = by_query if mixing.detach else (query, scores)

        parents = draw_parents(ranking, mixing, draw_seed=draw_seed, rows=rows, mask=mask)
        pairs, with_query = _mixed_scores(query, scores, negatives, parents, other, other_scores)
        if mixing.weigh:
            with_query = parents.b * with_query
        pairs = (pairs / temperature).where(parents.at_hand > mixing.distinct, NOTHING)
        with_query = (with_query / temperature).where(parents.at_hand > 0, NOTHING)
        if mixing.until is not None:
            real = by_query[1] / temperature
            real = real if mask is None else real.masked_fill(~mask, NOTHING)
            some_pairs, some_with_query = _until(mixing.until, mixing.hardest, pairs, with_query, real)
            pairs, with_query = pairs.where(some_pairs, NOTHING), with_query.where(some_with_query, NOTHING)
    return Synthetic(pairs, with_query, parents)


def hardest(ranking: Tensor, count: int | None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Find the N negatives that score highest: their places (n, N), and how many of them the mask allows (n, 1).

    ranking: (n, K), the scores. N is `count`, or K where there are no more (and for None). The allowed negatives come
    first. They are in the order of the negatives, not in the one in which a device happens to find them: so a draw
    among them is the same on every device.
    """
    n, size = ranking.shape
    if mask is not None:
        ranking = ranking.masked_fill(~mask, NOTHING)
    if count is None or count >= size:
        places = torch.arange(size, device=ranking.device).expand(n, size)
        if mask is None:
            return places, torch.full((n, 1), size, device=ranking.device)
        there = mask
    else:
        top, places = ranking.topk(count, dim=1, sorted=False)
        there = top > NOTHING
    in_order = torch.where(there, places, places + size).sort(dim=1).values
    return in_order % size, there.sum(dim=1, keepdim=True)


@torch.no_grad()
def draw_parents(
    ranking: Tensor, mixing: Mixing, *, draw_seed: Tensor, rows: Tensor, mask: Tensor | None = None
) -> Parents:
    """Draw what is mixed for each query from the scores (n, K) that rank its negatives."""
    places, at_hand = hardest(ranking, mixing.hardest, mask)
    s, with_query = mixing.pairs, mixing.with_query
    tickets = lots(draw_seed, rows, 3 * s + 2 * with_query)
    for_first, for_second, for_a, for_partner, for_b = tickets.split([s, s, s, with_query, with_query], dim=1)
    a, b = uniform(for_a, ranking.dtype), uniform(for_b, ranking.dtype) / 2
    pick = partial(_evenly, at_hand)
    if mixing.draw_temperature is not None:
        pick = partial(_by_softmax, _chances(ranking.gather(1, places) / mixing.draw_temperature, at_hand))
    last = (at_hand - 1).clamp(min=0)  # of a query with too few to draw from: keeps its places in range
    first = pick(for_first).minimum(last)
    second = pick(for_second, first if mixing.distinct else None).minimum(last)
    partner = pick(for_partner).minimum(last)
    first, second, partner = (places.gather(1, drawn) for drawn in (first, second, partner))
    return Parents(first, second, a, partner, b, at_hand)


def _mixed_scores(
    query: Tensor, scores: Tensor, negatives: Tensor, parents: Parents, other: Tensor, other_scores: Tensor
) -> tuple[Tensor, Tensor]:
    """q.h (n, s) and q.h' (n, s') from the scores (n, K), not over the temperature, of the queries (n, D).

    other (n, D) is what h' mixes with a negative, and other_scores (n, K) its scores: where these take a gradient, so
    does the length of h'.
    """
    first, second, a, partner, b, _ = parents
    # One gather of all: the backward pass of each makes a dense (n, K) gradient.
    columns = torch.cat([first, second, partner], dim=1)
    of_first, of_second, of_partner = scores.gather(1, columns).split([a.shape[1], a.shape[1], b.shape[1]], dim=1)
    squares = torch.linalg.vector_norm(negatives, dim=1).square()
    size = torch.linalg.vector_norm(query.detach(), dim=1, keepdim=True)
    length = _length(a, squares[first], squares[second], _dots(negatives, first, second))
    pairs = _over_length(a * of_first + (1 - a) * of_second, length, size)
    length = _length(b, other.square().sum(1, keepdim=True), squares[partner], other_scores.gather(1, partner))
    return pairs, _over_length(b * (query * other).sum(1, keepdim=True) + (1 - b) * of_partner, length, size)


def _over_length(inner: Tensor, length: Tensor, size: Tensor) -> Tensor:
    """q.h of a mixture m from q.m, |m| and |q| (n, 1). |m| is never below |q.m| / |q|, but of nearly opposite parents
    its rounding may be: then that is the length, so that |q.h| is at most |q|."""
    least = inner.detach().abs() / size
    return inner / torch.where(length < least, least, length)


def _length(share: Tensor, square: Tensor, other_square: Tensor, inner: Tensor) -> Tensor:
    """|w x + (1 - w) y| from |x|^2, |y|^2 and x.y."""
    rest = 1 - share
    return (share.square() * square + rest.square() * other_square + 2 * share * rest * inner).clamp(SHORTEST).sqrt()


def _dots(vectors: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """x_i.x_j of the vectors (K, D), which take no gradient, at places first and second (n, s).

    By a kernel on CUDA. Elsewhere the rows are gathered a part at a time: the products of all of a query's N hardest
    would be one matrix product, but N^2 of them for the s that are wanted.
    """
    if TRITON and vectors.is_cuda and vectors.dtype == torch.float32:
        from unitsphere.objectives.fused_pairs import dots_of_pairs  # needs Triton

        return dots_of_pairs(vectors, first, second)
    size = max(1, GATHERED // (2 * vectors.shape[1] * vectors.element_size()))
    i, j = first.flatten(), second.flatten()
    parts = [
        vectors.index_select(0, i[at : at + size]).mul_(vectors.index_select(0, j[at : at + size])).sum(dim=1)
        for at in range(0, max(1, len(i)), size)
    ]
    return torch.cat(parts).view_as(first)


def _evenly(at_hand: Tensor, tickets: Tensor, without: Tensor | None = None) -> Tensor:
    """Numbers below at_hand (n, 1), one a ticket (n, s), each as likely; none of them its `without` (n, s)."""
    if without is None:
        return tickets % at_hand.clamp(min=1)
    drawn = tickets % (at_hand - 1).clamp(min=1)
    return drawn + (drawn >= without)


def _chances(logits: Tensor, at_hand: Tensor) -> Tensor:
    """Cumulative chances (n, N) of the softmax of the first at_hand (n, 1) of each row."""
    there = torch.arange(logits.shape[1], device=logits.device) < at_hand
    chances = logits.double().masked_fill(~there, NOTHING).softmax(dim=1).clamp(min=LEAST_CHANCE)
    return (chances * there).cumsum(dim=1)


def _by_softmax(cumulative: Tensor, tickets: Tensor, without: Tensor | None = None) -> Tensor:
    """Numbers drawn with the cumulative chances (n, N), one a ticket (n, s); none of them its `without` (n, s)."""
    total = cumulative[:, -1:]
    drawn = uniform(tickets, torch.float64)
    if without is None:
        return torch.searchsorted(cumulative, drawn * total, right=True)
    end = cumulative.gather(1, without)
    start = torch.nn.functional.pad(cumulative, (1, 0)).gather(1, without)
    drawn = drawn * (total - (end - start))
    beyond = torch.maximum(drawn + (end - start), end)  # rounding must not lead back to the first
    return torch.searchsorted(cumulative, torch.where(drawn < start, drawn, beyond), right=True)


def _until(share: float, count: int | None, pairs: Tensor, with_query: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the mixtures, taken in turn, come before `share` of the `count` highest scores is synthetic.

    Of the N highest of all scores M are synthetic as soon as M of these are above the (N - M + 1)-th highest real one:
    then at most N - M real ones stand before them. So it is enough to count those above that bar.
    """
    count = min(count or real.shape[1], real.shape[1])
    least = max(1, math.ceil(share * count - 1e-9))
    bar = real.topk(count - least + 1, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    bar = bar + TIE * bar.abs()  # a pair of a negative with itself is that negative, up to rounding
    above = (torch.stack([pairs, with_query], dim=2).flatten(1) > bar).int()
    wanted = (above.cumsum(dim=1) - above < least).unflatten(1, (-1, 2))
    return wanted[..., 0], wanted[..., 1]
