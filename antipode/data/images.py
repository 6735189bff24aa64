"""One split of a data set, as everything after it sees it: names, labels, and a way to read image i."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Images:
    """N images, still encoded or as arrays, that can be read in any order and from several threads.

    name: what the user called the data.
    names: one per image, unique within the data set as far as its source is: a relative path or "train/17".
    labels: (N,) int64, or None where there are none; classes[label] is the label's name.
    read: image i as encoded bytes, or as an (H, W) or (H, W, C) array.
    """

    name: str
    names: Sequence[str]
    labels: np.ndarray | None
    classes: tuple[str, ...] | None
    read: Callable[[int], bytes | np.ndarray]

    def __len__(self) -> int:
        return len(self.names)

    def subset(self, indices: Sequence[int] | np.ndarray) -> Images:
        """The images of `indices`, in that order."""
        kept = [int(index) for index in indices]
        read = self.read
        return replace(
            self,
            names=[self.names[index] for index in kept],
            labels=None if self.labels is None else self.labels[kept],
            read=lambda n: read(kept[n]),
        )


def printable(name: str) -> str:
    """The name as text: a file's name may hold bytes that are none."""
    return name.encode(errors="backslashreplace").decode()


#: The splits of a data set by name, opened when asked for: "train" and "val", or one that is not yet divided.
Splits = dict[str, Callable[[], Images]]
