"""One split of a data set, as everything after it sees it: names, labels, and a way to read image i."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from unitsphere.common.errors import UsageError
from unitsphere.data.files import read_regular
from unitsphere.data.names import picked
from unitsphere.images.decode import MAX_PIXELS

__all__ = ["Images"]


def evenly(count: int, limit: int) -> np.ndarray:
    """Up to `limit` indices, evenly spaced over `count` images, first and last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(np.int64))


@dataclass(frozen=True)
class Images:
    """N images, still encoded or as arrays, that can be read in any order and from several threads.

    name: what the user called the data.
    names: one per image, unique within the data set as far as its source is: a relative path or "train/17".
    labels: (N,) int64, -1 for an image without one, or None where there are none; classes[label] is the label's name.
    Where an image may show several classes, (N, C) int8: 1 it does, -1 it does not, 0 it is not to be judged by.
    read: image i as encoded bytes, or as an (H, W) or (H, W, C) array.
    max_pixels: an encoded image that would be decoded to more counts as broken.
    """

    name: str
    names: Sequence[str]
    labels: np.ndarray | None
    classes: tuple[str, ...] | None
    read: Callable[[int], bytes | np.ndarray]
    max_pixels: int = MAX_PIXELS

    def __len__(self) -> int:
        return len(self.names)

    @property
    def multi_label(self) -> bool:
        return self.labels is not None and self.labels.ndim == 2

    def subset(self, indices: Sequence[int] | np.ndarray) -> Images:
        """The images of `indices`, in that order."""
        kept = np.asarray(indices, np.int64)
        read = self.read
        return replace(
            self,
            names=picked(self.names, kept),
            labels=None if self.labels is None else self.labels[kept],
            read=lambda n: read(int(kept[n])),
        )


def refuse_multi_label(images: Images, what: str) -> None:
    """Raises UsageError where an image may have several labels. what: "A pack", the start of a sentence."""
    if images.multi_label:
        raise UsageError(
            f"{what} takes one label an image; the images of {images.name} may have several of its "
            f"{len(images.classes or ())} classes each."
        )


def images_in_files(
    root: Path,
    name: str,
    names: Sequence[str],
    labels: Sequence[int] | np.ndarray | None,
    classes: tuple[str, ...] | None,
) -> Images:
    """Images in files of their own; names: their paths, relative to `root`."""
    folder = os.path.abspath(root)  # reading goes on if the process changes its folder

    def read(index: int) -> bytes:
        return read_regular(os.path.join(folder, names[index]))

    if labels is not None and not isinstance(labels, np.ndarray):
        labels = np.array(labels, np.int64)
    return Images(name, names, labels, classes, read)


#: The splits of a data set by name, opened when asked for: "train" and "val", or one that is not yet divided.
Splits = dict[str, Callable[[], Images]]
