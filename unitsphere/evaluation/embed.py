"""`unitsphere embed`: features of a user's own images, with neighbours and near-duplicates."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from unitsphere.common.devices import memory_errors, pick_device, pick_precision
from unitsphere.common.errors import UsageError
from unitsphere.common.terminal import bars
from unitsphere.data.source import Data, Images, open_images, open_splits
from unitsphere.data.subsets import keep_classes
from unitsphere.evaluation.backbone import JudgedBackbone, as_trained
from unitsphere.evaluation.embedding import check_path, check_picture, near_duplicates, neighbour_sheet, save_features
from unitsphere.evaluation.evaluate import MEMORY_ADVICE, check_classes, data_name
from unitsphere.evaluation.options import Options
from unitsphere.evaluation.settings import checked
from unitsphere.features.inputs import usable_rows
from unitsphere.images.decode import MAX_PIXELS
from unitsphere.runs.loading import Spec, load

__all__ = ["Embedded", "embed"]


@dataclass(frozen=True)
class Embedded:
    """features (N, F) of the images with these names; broken: the names of those that have none, and why."""

    features: Tensor
    names: Sequence[str]
    duplicates: list[tuple[int, int, float]]
    broken: dict[str, str]


def embed(
    what: Spec | nn.Module,
    *,
    data: Data,
    split: str = "all",
    out: str | os.PathLike[str] | None = None,
    neighbours: str | os.PathLike[str] | None = None,
    duplicates: float | None = None,
    features: str = "backbone",
    batch_size: int | None = None,
    device: str = "auto",
    holdout: float | None = None,
    classes: Sequence[str] | None = None,
    max_broken: float | None = None,
    max_pixels: int = MAX_PIXELS,
    verbose: bool = True,
    **architecture: Any,
) -> Embedded:
    """Compute the features of every image of `data`, or of one split of it, divided as `evaluate` divides it.

    Images that cannot be read are left out and named.

    out: also as a .npz or .parquet file. neighbours: a contact sheet of images and their nearest, as a picture
    file. duplicates: also pairs with at least this cosine. features, batch_size, device, holdout, classes, max_broken,
    max_pixels: see `Options`. verbose: show progress on a screen. architecture: for what is no run.
    """
    if out is not None:
        check_path(out)
    if neighbours is not None:
        check_picture(neighbours)
    if duplicates is not None and not 0 < duplicates <= 1:
        raise UsageError(f"duplicates: given {duplicates}; a cosine above 0 and up to 1 is allowed, e.g. 0.98.")
    options: Options = checked(
        Options,
        {
            "features": features, "batch_size": batch_size, "device": device, "holdout": holdout, "classes": classes,
            "max_broken": max_broken, "max_pixels": max_pixels,
        },
    )  # fmt: skip
    loaded = load(what, features=features, **architecture)
    trained = as_trained(loaded, data_name(data), options)
    if split == "all":
        images = whole(data) if options.classes is None else keep_classes(whole(data), options.classes)
    else:
        images = open_images(data, split, holdout=trained.holdout, classes=trained.classes)
    images = replace(images, max_pixels=max_pixels)
    with bars(verbose) as progress, memory_errors(MEMORY_ADVICE):
        place = pick_device(device)
        precision = pick_precision("auto", place)
        backbone = JudgedBackbone(loaded, place, precision, batch_size, progress, trained.max_broken)
        opened = backbone.open(images)
        found = backbone.features(opened, "features")
    rows = usable_rows(found)
    kept = images.subset(rows.numpy())
    usable = found if len(rows) == len(found) else found[rows]  # no copy of what may fill the memory
    meta = {"backbone": loaded.name, "epoch": loaded.epoch, "features": features, "data": str(images.name)}
    if out is not None:
        save_features(out, usable, kept.names, kept.labels, kept.classes, meta)
    if neighbours is not None:
        try:
            Path(neighbours).parent.mkdir(parents=True, exist_ok=True)
            neighbour_sheet(opened.loader, found, images.names).save(neighbours)
        except (OSError, ValueError) as error:
            raise UsageError(f"neighbours: {neighbours} cannot be written: {error}") from error
    pairs = near_duplicates(usable, duplicates) if duplicates is not None else []
    return Embedded(usable, kept.names, pairs, left_out(images, rows, opened.loader.broken))


def left_out(images: Images, rows: Tensor, broken: dict[str, str]) -> dict[str, str]:
    """Why each image but those of `rows` has no features, by name."""
    missing = np.setdiff1d(np.arange(len(images)), rows.numpy())
    names = [images.names[index] for index in missing.tolist()]
    return {name: broken.get(name, "the backbone gives no finite features for it") for name in names}


def whole(data: Data) -> Images:
    """All splits of the data, one after another."""
    splits = {split: open() for split, open in open_splits(data).items()}
    parts = list(splits.values())
    if len(parts) == 1:
        return parts[0]
    starts = list(accumulate(map(len, parts), initial=0))

    def read(index: int) -> bytes | np.ndarray:
        part = bisect_right(starts, index) - 1
        return parts[part].read(index - starts[part])

    labelled = all(part.labels is not None for part in parts)
    labels = np.concatenate([part.labels for part in parts if part.labels is not None]) if labelled else None
    names = [
        name if name.startswith(f"{split}/") else f"{split}/{name}"  # one name in two splits is two images
        for split, part in splits.items()
        for name in part.names
    ]
    check_classes(*parts)
    classes = max((part.classes or () for part in parts), key=len) if labelled else None
    return Images(parts[0].name, names, labels, classes or None, read)
