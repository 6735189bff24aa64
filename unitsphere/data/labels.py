"""Whole numbers as labels: class numbers, or the IDs of a data base."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

GAPS = 100  # numbers without an image that are no trouble, and as many again as there are with one


def class_labels(
    numbers: np.ndarray, all_numbers: Callable[[], Iterable[np.ndarray]], names: Sequence[str]
) -> tuple[np.ndarray | None, tuple[str, ...] | None]:
    """Return labels (N,) int64 and the names of the classes; None and None where no image has a label.

    Class numbers stay as they are. IDs, which leave most numbers out, are replaced by their places among those that
    occur in any split: a data set with IDs of 10^9 has as many classes as it has IDs.

    numbers: (N,) int64 of one split, negative for an image without a label. all_numbers: gives those of every split,
    and is called only where these have gaps, since that may mean to read the other splits.
    names: names[number] is the name of that class; may be empty.
    """
    occurring = _occurring(numbers)
    if not len(occurring):
        return None, None
    highest = int(occurring[-1])
    if highest < len(names):
        return numbers, tuple(names)
    if highest + 1 > len(occurring):
        occurring = np.unique(np.concatenate([_occurring(split) for split in all_numbers()]))
    if occurring[-1] + 1 <= 2 * len(occurring) + GAPS:
        return numbers, tuple(map(str, range(highest + 1)))
    labels = np.where(numbers >= 0, np.searchsorted(occurring, numbers), -1)
    return labels, tuple(map(str, occurring.tolist()))


def _occurring(numbers: np.ndarray) -> np.ndarray:
    """Sorted, without repetition, and without those that stand for no label."""
    found = np.unique(numbers)
    return found[found >= 0]
