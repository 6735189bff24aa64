"""From what the user calls the data to the images of one split."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from unitsphere.common.errors import UsageError, nearest
from unitsphere.common.outside import installed_names, load_named, names_code
from unitsphere.data.folder import folder_splits, is_image
from unitsphere.data.images import Images, Splits
from unitsphere.data.lists import LIST_SUFFIXES, read_list
from unitsphere.data.named import NAMED, named_splits
from unitsphere.data.packfile import is_pack, open_pack
from unitsphere.data.parquet import SUFFIX as PARQUET
from unitsphere.data.parquet import parquet_splits
from unitsphere.data.python_data import from_array, from_dataset, from_tensor
from unitsphere.data.shards import expand, find_shards
from unitsphere.data.subsets import hold_out, keep_classes, keep_fraction
from unitsphere.data.tars import SUFFIX as TAR
from unitsphere.data.tars import tar_splits
from unitsphere.data.walk import holds
from unitsphere.images.decode import MAX_PIXELS, suffixes

__all__ = ["Images", "open_images", "open_parts", "open_splits"]

SOURCES = "unitsphere.sources"  # entry points of other packages
Data = str | Path | np.ndarray | Tensor | Dataset[Any] | Images


def open_images(
    data: Data,
    split: str = "train",
    *,
    holdout: float = 0.1,
    seed: int = 0,
    classes: Sequence[str] | None = None,
    fraction: float = 1.0,
    max_pixels: int = MAX_PIXELS,
) -> Images:
    """Open the images of `split`, "train" or "val".

    data: "name", "name=path", a path (folder, list file, pack, Parquet or tar files), an (N, H, W[, C]) array, an
    (N, C, H, W) tensor, a torch Dataset, or Images.
    holdout: the share that becomes "val" where the data has no split of its own.
    classes: only these, relabelled in this order. fraction: a share of the split, stratified by class.
    max_pixels: an encoded image that would be decoded to more pixels counts as broken.
    """
    (images,) = open_parts(
        data, (split,), holdout=holdout, seed=seed, classes=classes, fraction=fraction, max_pixels=max_pixels
    )
    return images


def open_parts(
    data: Data,
    parts: Sequence[str] = ("train", "val"),
    *,
    holdout: float = 0.1,
    seed: int = 0,
    classes: Sequence[str] | None = None,
    fraction: float = 1.0,
    max_pixels: int = MAX_PIXELS,
) -> list[Images]:
    """Open several splits of the same data at once; otherwise as `open_images`."""
    for part in parts:
        if part not in ("train", "val"):
            raise UsageError(f"split is {part!r}: it must be 'train' or 'val'.")
    if not 0 <= holdout < 1:
        raise UsageError(f"holdout is {holdout:g}: it must be at least 0 and below 1.")
    splits = open_splits(data)
    undivided = next(iter(splits.values()))() if len(splits) == 1 else None
    if undivided is not None:
        refuse_few(undivided)
    opened = []
    for part in parts:
        if undivided is not None:
            images = hold_out(undivided, part, holdout, seed)
            if part == "train" and len(images) == 1:
                raise UsageError(
                    f"{images.name} has {len(undivided)} images, of which a held-out share of {holdout:g} leaves a "
                    f"single one to learn from ({images.names[0]}). Add images, or hold out fewer (--holdout)."
                )
        elif part in splits:
            images = splits[part]()
        else:
            raise UsageError(f"{data} has no split {part!r}; it has: {', '.join(splits)}.")
        if part == "train" and len(images.names) < 2:
            refuse_few(images)
        if classes is not None:
            images = keep_classes(images, classes)
        images = images if fraction == 1 else keep_fraction(images, fraction, seed)
        opened.append(replace(images, max_pixels=max_pixels))
    return opened


def refuse_few(images: Images) -> None:
    """Raise UsageError where there are not two images."""
    if not images.names:
        raise UsageError(f"{images.name} holds no images.")
    if len(images.names) == 1:
        raise UsageError(f"{images.name} holds a single image ({images.names[0]}), from which nothing can be learned.")


def open_splits(data: Data) -> Splits:
    """The splits that the data itself has: "train" and "val", or a single one, undivided."""
    if isinstance(data, Images):
        return {"all": partial(_same, data)}
    if isinstance(data, np.ndarray):
        return {"all": lambda: from_array(data)}
    if isinstance(data, Tensor):
        return {"all": lambda: from_tensor(data)}
    if isinstance(data, str | Path):
        return _splits_of_text(str(data))
    if hasattr(data, "__getitem__"):
        return {"all": lambda: from_dataset(data)}
    raise UsageError(f"{type(data).__name__} is no data: give a name, a path, an array, a tensor or a torch Dataset.")


def refuse_unnamed_source(data: Any, named_now: Any) -> None:
    """Refuse data that is code of a module, unless the user names it in this call."""
    if isinstance(data, str) and names_code(data.partition("=")[0]) and data != named_now and not os.path.exists(data):
        raise UsageError(
            f"data: {data} is code of a module, and a file names it. Nothing is imported unless you name it yourself: "
            f"--data {data} (data={data!r} in Python)."
        )


def _splits_of_text(text: str) -> Splits:
    name, equals, argument = text.partition("=")
    if name in NAMED:
        if equals and not argument:
            raise UsageError(f"Nothing follows the = in {text!r}.")
        return named_splits(name, argument or None)
    if not os.path.exists(text) and (names_code(name) or name in installed_names(SOURCES)):
        return _splits_of_outside(name, argument or None)
    path = Path(os.path.expanduser(text))
    if shards := _shard_splits(path, text):
        return shards
    if os.path.isdir(path):
        return folder_splits(path, text)
    if not os.path.exists(path):  # also a name that no file could have
        raise UsageError(
            f"There is no data {text!r}: neither a file or folder, nor a name.{nearest(name, NAMED)} "
            "A folder of images, a list file, a pack, Parquet or tar files, NAME or NAME=PATH can be given."
        )
    if is_pack(path):
        return {split: partial(_same, images) for split, images in open_pack(path).items()}
    if path.suffix.lower() in LIST_SUFFIXES:
        return {"all": lambda: read_list(path, text)}
    if path.suffix.lower() in suffixes():
        raise UsageError(f"{text} is a single image, from which nothing can be learned. Give its folder.")
    raise UsageError(
        f"{text} is neither a folder, nor a pack, nor a Parquet or tar file, nor a list of images "
        f"({', '.join(sorted(LIST_SUFFIXES))}: one path a line)."
    )


def _splits_of_outside(name: str, argument: str | None) -> Splits:
    """Of a source from another package: a function of the text behind the =, or of None, that gives what `open_images`
    takes, or such data by split ("train" and "val")."""
    found = load_named("data", name, SOURCES)(argument)
    if not isinstance(found, dict):
        return open_splits(found)
    if wrong := found.keys() - {"train", "val"} or (not found and {"none"}):
        raise UsageError(f"data: {name} gave the splits {', '.join(map(str, wrong))}; allowed: train, val.")
    return {split: partial(_whole, data) for split, data in found.items()}


def _whole(data: Data) -> Images:
    (open_all,) = open_splits(data).values()
    return open_all()


def _shard_splits(path: Path, text: str) -> Splits | None:
    """Of Parquet or tar files: of one, of a pattern for several, or of a folder that has such files and no images."""
    kinds = {PARQUET: parquet_splits, TAR: tar_splits}
    if not os.path.isdir(path):
        splits = kinds.get(path.suffix.lower())
        is_pattern = expand(os.fspath(path)) != [os.fspath(path)]
        return splits(os.fspath(path), text) if splits and (os.path.exists(path) or is_pattern) else None
    if holds(path, is_image, deep=True):
        return None
    return next((kinds[suffix](os.fspath(path), text) for suffix in kinds if find_shards(path, suffix)), None)


def _same(images: Images) -> Images:
    return images
