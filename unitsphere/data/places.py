"""Places205 and Places365: images in folders, the classes and the split in lists."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from unitsphere.common.errors import UsageError
from unitsphere.data.images import Images, Splits, images_in_files
from unitsphere.data.lists import numbered_lines, require, require_files
from unitsphere.data.names import StoredNames

LAYOUT_205 = (
    "The layout is PATH/trainvalsplit_places205/{train,val}_places205.csv, and the images under PATH/images256 or "
    "PATH/data/vision/torralba/deeplearning/images256."
)
LAYOUT_365 = (
    "The layout is PATH/places365_train_standard.txt, PATH/places365_val.txt and PATH/categories_places365.txt, and "
    "the images under PATH/data_256 and PATH/val_256 (or data_large and val_large; data_256_standard is data_256)."
)
FOLDERS_365 = {
    "train": ("data_256", "data_256_standard", "data_large", "data_large_standard"),
    "val": ("val_256", "val_large"),
}


def places205_splits(path: str) -> Splits:
    root = Path(path)

    def read(split: str) -> Images:
        source = require(root / "trainvalsplit_places205" / f"{split}_places205.csv", f"places205={path}", LAYOUT_205)
        folders = ("images256", os.path.join("data", "vision", "torralba", "deeplearning", "images256"))
        folder = _first_folder(root, folders, f"places205={path}", LAYOUT_205)
        return _listed(folder, "places205", source, _classes_by_folder)

    return {split: partial(read, split) for split in ("train", "val")}


def places365_splits(path: str) -> Splits:
    root = Path(path)
    lists = {"train": "places365_train_standard.txt", "val": "places365_val.txt"}

    def read(split: str) -> Images:
        source = require(root / lists[split], f"places365={path}", LAYOUT_365)
        categories = require(root / "categories_places365.txt", f"places365={path}", LAYOUT_365)
        folder = _first_folder(root, FOLDERS_365[split], f"places365={path}", LAYOUT_365)
        return _listed(folder, "places365", source, lambda names, labels: _classes_in(categories))

    return {split: partial(read, split) for split in lists}


def _listed(
    folder: Path, name: str, source: Path, classes_of: Callable[[StoredNames, np.ndarray], dict[int, str]]
) -> Images:
    """The images of a list of "path number" lines."""
    numbers = array("q")

    def paths() -> Iterator[str]:
        for image, number in numbered_lines(source):
            numbers.append(number)
            yield image.lstrip("/")

    names = StoredNames.of(paths())
    labels = np.frombuffer(numbers, np.int64)
    require_files(folder, names, source)
    classes = classes_of(names, labels)
    strange = np.setdiff1d(labels, list(classes))
    if len(strange):
        raise UsageError(f"{source}: classes {strange[:5].tolist()} are not among those that have a name.")
    missing = np.setdiff1d(np.arange(max(classes) + 1), list(classes))
    if len(missing) or min(classes) < 0:
        what = f"class {missing[0]} has no image" if len(missing) else f"there is a class {min(classes)}"
        raise UsageError(f"{source}: the classes should be numbered from 0 without a gap, but {what}.")
    return images_in_files(folder, name, names, labels, tuple(classes[number] for number in sorted(classes)))


def _classes_by_folder(names: StoredNames, labels: np.ndarray) -> dict[int, str]:
    """Number -> the folder of the first image with it."""
    numbers, first = np.unique(labels, return_index=True)
    return {int(number): os.path.dirname(names[at]) for number, at in zip(numbers, first, strict=True)}


def _classes_in(categories: Path) -> dict[int, str]:
    return {number: category.lstrip("/") for category, number in numbered_lines(categories)}


def _first_folder(root: Path, folders: tuple[str, ...], data: str, layout: str) -> Path:
    for folder in folders:
        if (root / folder).is_dir():
            return root / folder
    raise UsageError(f"{data}: there is no {root / folders[0]}. {layout}")
