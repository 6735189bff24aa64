"""Where negatives come from: the queue or the batch, all of them or a draw, with or without the query's own class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from unitsphere.common.randomness import lots
from unitsphere.modules.queue import KeyQueue

__all__ = ["Comparison", "NegativeSource"]


class Comparison(NamedTuple):
    """What a query is compared with.

    query: (n, D); keys: (n, M, D); negatives: (K, D), shared; mask: (n, K) is true where a negative counts for a query,
    None where all do; rows: (n,), the queries' numbers in the whole batch; mixing_seed: decides what is mixed for them,
    None where nothing is.
    """

    query: Tensor
    keys: Tensor
    negatives: Tensor
    mask: Tensor | None
    rows: Tensor
    mixing_seed: Tensor | None = None


@dataclass(frozen=True)
class NegativeSource:
    """Settings of the negatives, and how they are chosen.

    count: how many of the negatives at hand a query meets; None: all. They are drawn for each query, or with
    shared_draw once a step for all; then a query whose own key is among them takes one other. both_views: negatives of
    the batch are of both views (2N - 2), and not of the key's alone (N - 1).
    oracle: negatives of the query's own class, which only labels can tell, do not count. normalise_mean: the mean of an
    image's keys is normalised again before it serves as a negative.
    """

    count: int | None = None
    shared_draw: bool = False
    both_views: bool = False
    oracle: bool = False
    normalise_mean: bool = False

    def mean_key(self, keys: Tensor) -> Tensor:
        """Take what stands for an image among the negatives: of keys (N, M, D) their mean (N, D)."""
        if keys.shape[1] == 1:
            return keys[:, 0]
        mean = keys.mean(dim=1)
        return F.normalize(mean, dim=1) if self.normalise_mean else mean

    def __call__(
        self,
        rows: Tensor,
        queue: KeyQueue | None,
        batch: Sequence[Tensor],
        *,
        labels: tuple[Tensor, Tensor] | None = None,
        draw_seed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Choose the negatives of n queries.

        rows: (n,), the queries' numbers in the whole batch. queue: None where negatives are of the batch. batch: the
        keys (N, D) of all ranks, first those of the other view, then those of the query's own. labels: with the oracle,
        of this rank's images and of the whole batch. draw_seed: int64 scalar, where `count` is given.
        Returns vectors (K, D) and a mask (n, K), true where one counts; None where all do.
        """
        if queue is not None:
            vectors, mask, at_hand = queue.keys, None, len(queue.keys)
        else:  # of the batch, never the image's own key
            vectors = torch.cat(list(batch)) if self.both_views else batch[0]
            images = len(batch[0])
            mask = torch.arange(len(vectors), device=rows.device) % images != rows[:, None]
            at_hand = len(vectors) - len(vectors) // images
        if labels is not None:
            own, of_batch = labels
            own = own.repeat_interleave(len(rows) // len(own))  # of repeated queries too
            theirs = queue.labels if queue is not None else of_batch.repeat(len(vectors) // len(of_batch))
            other_class = theirs != own[:, None]
            mask = other_class if mask is None else mask & other_class
        if self.count is None or self.count >= at_hand:
            return vectors, mask
        assert draw_seed is not None
        # Each query takes the lowest of its tickets, or with one draw for all, of the same tickets. So each has as many
        # negatives, as in SiMo's released code.
        tickets = lots(draw_seed, torch.zeros_like(rows) if self.shared_draw else rows, len(vectors))
        if mask is None:
            return vectors, lowest(tickets, self.count)
        return vectors, lowest(tickets.masked_fill(~mask, 2**62), self.count) & mask


def lowest(tickets: Tensor, count: int) -> Tensor:
    """Mark the `count` lowest tickets of each row."""
    return tickets <= tickets.kthvalue(count, dim=1, keepdim=True).values
