"""Parts of a set of images: the held-out share, chosen classes, a fraction. All seeded, none depends on order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from unitsphere.common.errors import UsageError, nearest
from unitsphere.common.randomness import stream
from unitsphere.data.images import Images
from unitsphere.data.index import remembered_array


def hold_out(images: Images, split: str, share: float, seed: int) -> Images:
    """The "train" or "val" part of undivided images: disjoint and together all.

    Each name has a rank of its own, so images that come or go later move almost no other from part to part.
    """
    count = round(share * len(images))
    if share > 0 and len(images) >= 2:
        count = min(max(count, 1), len(images) - 1)
    if split == "val" and count == 0:
        raise UsageError(
            f"{images.name} has no validation images: it is not divided into train/ and val/, and the held-out "
            f"share is {share:g} of {len(images)} images. Give holdout > 0, or a folder with train/ and val/."
        )
    if count == 0:
        return images
    chosen = np.zeros(len(images), bool)
    chosen[order_by_name(images, "holdout", seed)[:count]] = True
    return images.subset(np.flatnonzero(chosen if split == "val" else ~chosen))


def keep_classes(images: Images, classes: Sequence[str]) -> Images:
    """Only the images of these classes, labelled by their place in `classes`; where an image may show several, all
    images, with the marks of these classes."""
    if images.labels is None or images.classes is None:
        raise UsageError(f"{images.name} has no labels, so classes cannot be chosen. Leave `classes` out.")
    wanted = tuple(dict.fromkeys(classes))
    label_of = {name: label for label, name in enumerate(images.classes)}
    for name in wanted:
        if name not in label_of:
            raise UsageError(f"{images.name} has no class {name!r}.{nearest(name, label_of)}")
    if images.multi_label:  # one that shows none of them is an example of what they are not
        return replace(images, labels=images.labels[:, [label_of[name] for name in wanted]], classes=wanted)
    relabel = np.full(len(images.classes), -1, np.int64)
    relabel[[label_of[name] for name in wanted]] = np.arange(len(wanted))
    labels = np.where(images.labels >= 0, relabel[images.labels], -1)
    kept = np.flatnonzero(labels >= 0)
    if not len(kept):
        raise UsageError(f"{images.name} has no image of the classes {', '.join(wanted)}.")
    return replace(images.subset(kept), labels=labels[kept], classes=wanted)


def keep_fraction(images: Images, fraction: float, seed: int) -> Images:
    """A share of the images, of each class alike where they have one label each, and at least one of each."""
    if not 0 < fraction <= 1:
        raise UsageError(f"fraction is {fraction:g}: it must be above 0 and at most 1.")
    if fraction == 1:
        return images
    labels = np.zeros(len(images), np.int64) if images.labels is None or images.multi_label else images.labels
    order = order_by_name(images, "fraction", seed)
    grouped = order[np.argsort(labels[order], kind="stable")]  # class by class, each in the order that was drawn
    _, firsts, counts = np.unique(labels[grouped], return_index=True, return_counts=True)
    shares = np.maximum(1, np.rint(fraction * counts)).astype(np.int64)
    rank = np.arange(len(grouped)) - np.repeat(firsts, counts)
    return images.subset(np.sort(grouped[rank < np.repeat(shares, counts)]))


def order_by_name(images: Images, purpose: str, seed: int) -> np.ndarray:
    """Indices (N,) in an order drawn by the seed, in which a name has a rank of its own, whatever the other names.
    That of many names is remembered."""

    def make() -> np.ndarray:
        ranks = np.fromiter((stream(seed, f"{purpose}/{name}") for name in images.names), np.int64, len(images))
        return np.argsort(ranks, kind="stable")

    return remembered_array(f"{purpose}/{seed}", images.names, make)
