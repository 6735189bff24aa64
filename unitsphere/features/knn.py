"""Nearest neighbours by cosine, and the weighted k-NN classifier on frozen features.

A query's neighbours vote for their class with weight exp(s / T), s the cosine similarity. Neither the
queries nor the bank need fit on the device: one block of scores is held at a time, whatever their number. The bank
may be in half precision, or an array in a file that is read in parts.

Ties. Two classes with equal votes: the lower class wins. Two bank images equally near at the k-th place:
either may be taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from unitsphere.common.errors import UsageError
from unitsphere.features.inputs import class_numbers, require_finite

__all__ = ["knn", "neighbours"]

QUERIES_AT_ONCE = 2048
BANK_AT_ONCE = 16384
BLOCKS_HELD = 32  # blocks of queries that are on the device at once: the bank passes by once for all of them


def check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise UsageError(f"temperature: {temperature} was given; it must be above 0 (0.07 and 0.1 are usual).")


def knn(
    bank: Tensor | np.ndarray,
    bank_labels: Tensor | np.ndarray | None,
    queries: Tensor,
    query_labels: Tensor | np.ndarray | None,
    *,
    k: Sequence[int] = (20, 200),
    temperature: float = 0.1,
    chunk: tuple[int, int] = (QUERIES_AT_ONCE, BANK_AT_ONCE),
    device: torch.device | str | None = None,
) -> dict[int, float]:
    """Accuracy in percent for each k, all from one search with the largest.

    bank (B, F) with bank_labels (B,), queries (Q, F) with query_labels (Q,). The classes are those of the
    bank: a query of a class that the bank lacks is counted, and counted wrong.
    """
    bank_labels = class_numbers(bank_labels, "the training images")
    query_labels = class_numbers(query_labels, "the test images")
    ks = sorted(set(k))
    if not ks or ks[0] < 1:
        raise UsageError(f"k: {tuple(k)} was given; one or more whole numbers from 1 to {len(bank)} are allowed.")
    check_temperature(temperature)
    scores, indices = neighbours(bank, queries, ks[-1], chunk=chunk, device=device)
    if not scores.isfinite().all():  # NaN is the nearest of all, so it shows
        require_finite(_sums(bank, chunk[1]), "the training images")
        require_finite(_sums(queries, chunk[1]), "the test images")
    correct = dict.fromkeys(ks, 0)
    classes = int(bank_labels.max()) + 1
    for part in torch.arange(len(queries)).split(chunk[0]):
        weights = ((scores[part] - scores[part, :1]) / temperature).exp()  # the nearest has weight 1
        candidates, truth = bank_labels[indices[part]], query_labels[part]
        votes = weights.new_zeros(len(part), classes)
        for nearer, farther in zip([0, *ks], ks, strict=False):
            votes.scatter_add_(1, candidates[:, nearer:farther], weights[:, nearer:farther])
            correct[farther] += int((votes.argmax(1) == truth).sum())
    return {each: 100 * correct[each] / len(queries) for each in ks}


@torch.no_grad()
def neighbours(
    bank: Tensor | np.ndarray,
    queries: Tensor,
    k: int,
    *,
    exclude: Tensor | None = None,
    chunk: tuple[int, int] = (QUERIES_AT_ONCE, BANK_AT_ONCE),
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """The k nearest of the bank (B, F) for each query (Q, F): cosines and bank indices, each (Q, k) on the
    CPU, the nearest first.

    bank: of any precision; an array that is too large for the memory may be a np.memmap.
    exclude: (Q,) the bank's image that a query must not find: itself, where it is in the bank.
    chunk: how many queries, and how much of the bank, are compared at once on `device` (default: the bank's).
    """
    largest = len(bank) - (exclude is not None)
    if not 1 <= k <= largest:
        raise UsageError(f"k: {k} was given; with {len(bank)} images to search, 1 to {largest} is allowed.")
    device = torch.device(device or (bank.device if isinstance(bank, Tensor) else "cpu"))
    found: list[Nearest] = []
    parts = [slice(first, first + chunk[0]) for first in range(0, len(queries), chunk[0])]
    for first in range(0, len(parts), BLOCKS_HELD):
        held = parts[first : first + BLOCKS_HELD]
        blocks = [_unit(queries[part], device) for part in held]
        nearest = [_nobody(block) for block in blocks]
        for start in range(0, len(bank), chunk[1]):
            keys = _unit(bank[start : start + chunk[1]], device)
            for n, (part, block) in enumerate(zip(held, blocks, strict=True)):
                scores = block @ keys.T
                if exclude is not None:
                    column_of = (exclude[part, None] - start).to(device)
                    scores.masked_fill_(torch.arange(len(keys), device=device) == column_of, -torch.inf)
                nearest[n] = _nearer(nearest[n], scores, start, k)
        found += [(scores.cpu(), indices.cpu()) for scores, indices in nearest]
    return torch.cat([scores for scores, _ in found]), torch.cat([indices for _, indices in found])


Nearest = tuple[Tensor, Tensor]  # the best scores so far of a block of queries, and whose they are


def _nobody(block: Tensor) -> Nearest:
    return block.new_empty(len(block), 0), torch.empty(len(block), 0, dtype=torch.int64, device=block.device)


def _nearer(nearest: Nearest, scores: Tensor, start: int, k: int) -> Nearest:
    """The best k of those known and of new scores, whose first column is the bank's image `start`."""
    new, column = scores.topk(min(k, scores.shape[1]))
    merged, indices = torch.cat([nearest[0], new], 1), torch.cat([nearest[1], column + start], 1)
    best, order = merged.topk(min(k, merged.shape[1]))
    return best, indices.gather(1, order)


def _unit(rows: Tensor | np.ndarray, device: torch.device) -> Tensor:
    return normalize(_tensor(rows).to(device).float(), dim=1)


def _tensor(rows: Tensor | np.ndarray) -> Tensor:
    """Of an array a copy: a file's pages may not be written, and need not stay."""
    return rows if isinstance(rows, Tensor) else torch.from_numpy(np.array(rows))


def _sums(rows: Tensor | np.ndarray, at_once: int) -> Tensor:
    """(N, 1) float32, finite where the row is."""
    starts = range(0, len(rows), at_once)
    return torch.cat([_tensor(rows[start : start + at_once]).float().sum(1, keepdim=True) for start in starts])
