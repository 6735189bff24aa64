"""Data sets that go by a name. Imports no torch, so that `antipode data` can list them at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from antipode.data import imagenet100
from antipode.data.folder import class_folders, scan_classes
from antipode.data.images import Images, Splits
from antipode.errors import UsageError


@dataclass(frozen=True)
class Named:
    """A data set by name. `splits` takes what follows the `=`, or None."""

    description: str
    needs_path: bool
    splits: Callable[[str | None], Splits]


def _shapes(argument: str | None) -> Splits:
    from antipode.data.shapes import shapes_splits

    return shapes_splits(argument)


def _cifar(name: str, path: str | None) -> Splits:
    def read(split: str) -> Images:
        data = _torchvision(name, path, train=split == "train")
        return Images(
            name=name,
            names=[f"{split}/{index}" for index in range(len(data))],
            labels=np.array(data.targets, np.int64),
            classes=tuple(data.classes),
            read=lambda index: data.data[index],
        )

    return {"train": partial(read, "train"), "val": partial(read, "val")}


def _stl10(name: str, files: dict[str, str], path: str | None) -> Splits:
    """files: split -> torchvision's name of it."""

    def read(split: str) -> Images:
        data = _torchvision("stl10", path, split=files[split])
        labelled = files[split] != "unlabeled"
        return Images(
            name=name,
            names=[f"{split}/{index}" for index in range(len(data))],
            labels=np.array(data.labels, np.int64) if labelled else None,
            classes=tuple(data.classes) if labelled else None,
            read=lambda index: data.data[index].transpose(1, 2, 0),
        )

    return {split: partial(read, split) for split in files}


def _torchvision(name: str, path: str | None, **which: Any) -> Any:
    """torchvision's data set of that name, with its own check of the files; fetched where no path is given."""
    from torchvision import datasets

    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100, "stl10": datasets.STL10}[name]
    root = Path(path) if path else _cache() / name
    if path and root.name == kind.base_folder:
        root = root.parent
    layout = f"{root / kind.base_folder}, as unpacked from {kind.filename}"
    if path and not (root / kind.base_folder).is_dir():
        raise UsageError(f"{name}={path}: there is no {layout}.")
    try:
        root.mkdir(parents=True, exist_ok=True)
        return kind(root, download=path is None, **which)
    except (OSError, RuntimeError) as problem:
        if path:
            raise UsageError(
                f"{name}={path}: {problem} The files are those of {layout}; unpack {kind.url} again."
            ) from problem
        raise UsageError(
            f"{name} could not be fetched into {root}: {problem}. Fetch and unpack {kind.url} yourself and give "
            f"--data {name}=FOLDER, the folder that holds {kind.base_folder}/."
        ) from problem


def _cache() -> Path:
    return Path(os.environ.get("ANTIPODE_DATA") or Path.home() / ".cache" / "antipode")


def _imagenet(name: str, classes: tuple[str, ...] | None, path: str | None) -> Splits:
    assert path is not None  # named_splits has seen to it
    root = Path(path)
    for split in ("train", "val"):
        if not (root / split).is_dir():
            raise UsageError(f"{name}={path}: there is no folder {root / split}. {IMAGENET_LAYOUT}")
    chosen = classes or class_folders(root / "train")
    if not chosen:
        raise UsageError(f"{name}={path}: no class folders in {root / 'train'}. {IMAGENET_LAYOUT}")
    return {split: partial(scan_classes, root / split, name, chosen) for split in ("train", "val")}


IMAGENET_LAYOUT = "The layout is PATH/train/WNID/*.JPEG and PATH/val/WNID/*.JPEG."

NAMED: dict[str, Named] = {
    "shapes": Named(
        "drawn here: 12 forms in random colour, texture, place, scale, turn and clutter; shapes=COUNTxSIZE",
        needs_path=False,
        splits=_shapes,
    ),
    "cifar10": Named(
        "CIFAR-10, 60,000 images of 32 x 32, 10 classes", needs_path=False, splits=partial(_cifar, "cifar10")
    ),
    "cifar100": Named(
        "CIFAR-100, 60,000 images of 32 x 32, 100 classes",
        needs_path=False,
        splits=partial(_cifar, "cifar100"),
    ),
    "stl10": Named(
        "STL-10, labelled: 5,000 training and 8,000 test images of 96 x 96, 10 classes",
        needs_path=False,
        splits=partial(_stl10, "stl10", {"train": "train", "val": "test"}),
    ),
    "stl10-unlabelled": Named(
        "STL-10, the 100,000 images without labels",
        needs_path=False,
        splits=partial(_stl10, "stl10-unlabelled", {"all": "unlabeled"}),
    ),
    "imagenet": Named(f"ImageNet-1K. {IMAGENET_LAYOUT}", needs_path=True, splits=partial(_imagenet, "imagenet", None)),
    "imagenet100": Named(
        f"100 classes of ImageNet-1K (JCL's list). {IMAGENET_LAYOUT}",
        needs_path=True,
        splits=partial(_imagenet, "imagenet100", imagenet100.CLASSES),
    ),
}


def named_splits(name: str, argument: str | None) -> Splits:
    """The splits of NAMED[name]; argument: what the user wrote after the `=`, if anything."""
    if NAMED[name].needs_path and not argument:
        raise UsageError(f"{name} needs its folder: {name}=PATH. {NAMED[name].description}")
    return NAMED[name].splits(argument)
