"""Nearest neighbours by cosine, and the weighted k-NN classifier on frozen features.

A query's neighbours vote for their class with weight exp(s / T), s the cosine similarity. Neither the
queries nor the bank need fit on the device: one block of scores is held at a time, whatever their number.

Ties. Two classes with equal votes: the lower class wins. Two bank images equally near at the k-th place:
either may be taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from antipode.errors import UsageError
from antipode.evaluation.inputs import class_numbers, require_finite

QUERIES_AT_ONCE = 2048
BANK_AT_ONCE = 16384


def knn(
    bank: Tensor,
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
    if temperature <= 0:
        raise UsageError(f"temperature: {temperature} was given; it must be above 0 (0.07 and 0.1 are usual).")
    require_finite(bank, "the training images")
    require_finite(queries, "the test images")
    scores, indices = neighbours(bank, queries, ks[-1], chunk=chunk, device=device)
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
    bank: Tensor,
    queries: Tensor,
    k: int,
    *,
    exclude: Tensor | None = None,
    chunk: tuple[int, int] = (QUERIES_AT_ONCE, BANK_AT_ONCE),
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """The k nearest of the bank (B, F) for each query (Q, F): cosines and bank indices, each (Q, k) on the
    CPU, the nearest first.

    exclude: (Q,) the bank's image that a query must not find: itself, where it is in the bank.
    chunk: how many queries, and how much of the bank, are compared at once on `device` (default: the bank's).
    """
    largest = len(bank) - (exclude is not None)
    if not 1 <= k <= largest:
        raise UsageError(f"k: {k} was given; with {len(bank)} images to search, 1 to {largest} is allowed.")
    device = torch.device(device or bank.device)
    found = []
    for first in range(0, len(queries), chunk[0]):
        rows = normalize(queries[first : first + chunk[0]].to(device).float(), dim=1)
        best = rows.new_empty(len(rows), 0)
        where = torch.empty(len(rows), 0, dtype=torch.int64, device=device)
        for start in range(0, len(bank), chunk[1]):
            scores = rows @ normalize(bank[start : start + chunk[1]].to(device).float(), dim=1).T
            if exclude is not None:
                column_of = (exclude[first : first + chunk[0], None] - start).to(device)
                columns = torch.arange(scores.shape[1], device=device)
                scores.masked_fill_(columns == column_of, -torch.inf)
            nearest, column = scores.topk(min(k, scores.shape[1]))
            merged, indices = torch.cat([best, nearest], 1), torch.cat([where, column + start], 1)
            best, order = merged.topk(min(k, merged.shape[1]))
            where = indices.gather(1, order)
        found.append((best.cpu(), where.cpu()))
    return torch.cat([scores for scores, _ in found]), torch.cat([indices for _, indices in found])
