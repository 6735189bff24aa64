"""Data sets that go by a name. Imports no torch, so that `unitsphere data` can list them at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unitsphere.common.errors import UsageError
from unitsphere.data import imagenet, imagenet100, inaturalist, places, voc
from unitsphere.data.images import Images, Splits
from unitsphere.data.index import cache_folder
from unitsphere.data.parquet import parquet_splits
from unitsphere.data.tars import tar_splits

STL10_FOLDER = "stl10_binary"


@dataclass(frozen=True)
class Named:
    """A data set by name. `splits` takes what follows the `=`, or None where nothing needs to. fixed: whether the name
    alone says which images these are, wherever they lie."""

    description: str
    needs_path: bool
    splits: Callable[[Any], Splits]
    layout: str = ""
    fixed: bool = True


def _shapes(argument: str | None) -> Splits:
    from unitsphere.data.shapes import shapes_splits

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


def _stl10(name: str, parts: dict[str, str], path: str | None) -> Splits:
    """parts: split -> how its files are called."""

    def read(split: str) -> Images:
        folder = _stl10_folder(path)
        pixels, labels, classes = _read_stl10(folder, parts[split])
        return Images(
            name=name,
            names=[f"{split}/{index}" for index in range(len(pixels))],
            labels=labels,
            classes=classes,
            read=lambda index: pixels[index].transpose(2, 1, 0),  # stored column by column, plane by plane
        )

    return {split: partial(read, split) for split in parts}


def _stl10_folder(path: str | None) -> Path:
    """Where the files lie; fetched where no path is given."""
    if path is None:
        folder = _data_folder() / "stl10" / STL10_FOLDER
        if not (folder / "unlabeled_X.bin").exists():
            _torchvision("stl10", None)
        return folder
    folder = Path(path) if Path(path).name == STL10_FOLDER else Path(path) / STL10_FOLDER
    if not folder.is_dir():
        raise UsageError(f"stl10={path}: there is no {folder}, as unpacked from {STL10_FOLDER}.tar.gz.")
    return folder


def _read_stl10(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray | None, tuple[str, ...] | None]:
    """pixels (N, 3, 96, 96), mapped (those without labels are 2.7 GB, and every process on the machine shares them);
    labels and classes, where there are some."""
    try:
        pixels = np.memmap(folder / f"{part}_X.bin", np.uint8, mode="r").view(np.ndarray).reshape(-1, 3, 96, 96)
        if part == "unlabeled":
            return pixels, None, None
        labels = np.fromfile(folder / f"{part}_y.bin", np.uint8).astype(np.int64) - 1
        classes = tuple((folder / "class_names.txt").read_text().split())
    except (OSError, ValueError) as problem:
        raise UsageError(f"stl10: {problem}. Unpack {STL10_FOLDER}.tar.gz again into {folder.parent}.") from problem
    if len(labels) != len(pixels):
        raise UsageError(
            f"stl10: {folder} has {len(pixels)} images of {part} and {len(labels)} labels. Unpack it again."
        )
    return pixels, labels, classes


def _torchvision(name: str, path: str | None, **which: Any) -> Any:
    """torchvision's data set of that name, with its own check of the files; fetched where no path is given."""
    from torchvision import datasets

    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100, "stl10": datasets.STL10}[name]
    root = Path(path) if path else _data_folder() / name
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


def _data_folder() -> Path:
    return Path(os.environ.get("UNITSPHERE_DATA") or cache_folder())


NAMED: dict[str, Named] = {
    "shapes": Named(
        "drawn here: 12 forms in random colour, texture, place, scale, turn and clutter; shapes=COUNTxSIZE",
        needs_path=False,
        splits=_shapes,
        fixed=False,
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
    "imagenet": Named(
        "ImageNet-1K, 1,000 classes",
        needs_path=True,
        splits=partial(imagenet.imagenet_splits, "imagenet", None),
        layout=imagenet.LAYOUT,
    ),
    "imagenet100": Named(
        "100 classes of ImageNet-1K (JCL's list)",
        needs_path=True,
        splits=partial(imagenet.imagenet_splits, "imagenet100", imagenet100.CLASSES),
        layout=imagenet.LAYOUT,
    ),
    "inaturalist2018": Named(
        "iNaturalist 2018, 8,142 species",
        needs_path=True,
        splits=inaturalist.inaturalist_splits,
        layout=inaturalist.LAYOUT,
    ),
    "places205": Named(
        "Places205, scenes of 205 kinds", needs_path=True, splits=places.places205_splits, layout=places.LAYOUT_205
    ),
    "places365": Named(
        "Places365, scenes of 365 kinds", needs_path=True, splits=places.places365_splits, layout=places.LAYOUT_365
    ),
    "voc2007": Named(
        "PASCAL VOC 2007, 20 classes, of which an image may show several; train is trainval, val is test",
        needs_path=True,
        splits=voc.voc2007_splits,
        layout=voc.LAYOUT,
    ),
    "voc": Named(
        "images in the form of PASCAL VOC, with classes of your own",
        needs_path=True,
        splits=voc.voc_splits,
        layout=voc.OWN_LAYOUT,
        fixed=False,
    ),
    "parquet": Named(
        "Parquet files as Hugging Face's library writes them (needs pyarrow)",
        needs_path=True,
        splits=lambda path: parquet_splits(path, f"parquet={path}"),
        layout="PATH is a file or a folder; the columns are image (bytes, or {bytes, path}) and, it may be, label.",
        fixed=False,
    ),
    "tar": Named(
        "tar files as WebDataset reads them",
        needs_path=True,
        splits=lambda path: tar_splits(path, f"tar={path}"),
        layout="PATH is a file, a folder or a pattern like part-{000..012}.tar; in them KEY.jpg (png, webp, ...) and, "
        "it may be, KEY.cls, KEY.json or KEY.txt with its class.",
        fixed=False,
    ),
}


def without_path(data: str) -> str:
    """NAME=PATH without the path, where the name says which images these are: where they lie is the machine's own."""
    name = data.partition("=")[0]
    return name if name in NAMED and NAMED[name].fixed else data


def same_data(one: str, other: str) -> bool:
    return os.path.abspath(without_path(one)) == os.path.abspath(without_path(other))


def named_splits(name: str, argument: str | None) -> Splits:
    """The splits of NAMED[name]; argument: what the user wrote after the `=`, if anything."""
    named = NAMED[name]
    if not named.needs_path:
        return named.splits(argument)
    if not argument:
        raise UsageError(f"{name} needs its folder: {name}=PATH. {named.layout}")
    return named.splits(os.path.expanduser(argument))
