"""Images that are already in Python: an array, a tensor, a torch Dataset."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from unitsphere.common.errors import UsageError
from unitsphere.data.images import Images
from unitsphere.data.labels import class_labels
from unitsphere.data.names import Names
from unitsphere.images.decode import BrokenImage, decode, picture_array, plain_mode


def from_array(array: np.ndarray) -> Images:
    """(N, H, W) or (N, H, W, C), channels last."""
    if array.ndim not in (3, 4):
        raise UsageError(f"An array of shape {array.shape} is no set of images: give (N, H, W) or (N, H, W, C).")
    return _unlabelled("array", len(array), lambda index: array[index])


def from_tensor(tensor: Tensor) -> Images:
    """(N, H, W) or (N, C, H, W), channels first."""
    if tensor.ndim not in (3, 4):
        raise UsageError(
            f"A tensor of shape {tuple(tensor.shape)} is no set of images: give (N, C, H, W), or (N, H, W)."
        )
    return _unlabelled("tensor", len(tensor), lambda index: as_array(tensor[index]))


def from_dataset(dataset: Dataset[Any]) -> Images:
    """Items are an image or (image, label, ...); an image is a PIL image, an (H, W[, C]) array or a (C, H, W)
    tensor, uint8 or float in [0, 1]. Items are read from several threads at once."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(f"{name} cannot be read in any order: give a Dataset with __len__ and __getitem__.")
    count = len(dataset)
    if count == 0:
        raise UsageError(f"{name} is empty.")
    try:
        first = _item(dataset, 0)
        array = as_array(_image_of(first))
        decode(array, channels=array.shape[2] if array.ndim == 3 else 1)
    except BrokenImage as problem:
        raise UsageError(
            f"The first item of {name} cannot be used: {problem}. Items must be an image or (image, label), the "
            "image a PIL image, an (H, W, C) array or a (C, H, W) tensor, uint8 or float in [0, 1]."
        ) from problem
    labels, classes = _labels(dataset, first), None
    if labels is not None:
        numbers = labels
        labels, classes = class_labels(numbers, lambda: [numbers], _class_names(dataset))
    return Images(
        name=name,
        names=Names(count, str),
        labels=labels,
        classes=classes,
        read=lambda index: as_array(_image_of(_item(dataset, index))),
    )


def _item(dataset: Dataset[Any], index: int) -> Any:
    """What the data set gives. What it raises is said of the image, which is then counted as broken."""
    try:
        return dataset[index]
    except Exception as problem:
        raise BrokenImage(f"{type(problem).__name__}: {problem}") from problem


def as_array(image: object) -> np.ndarray:
    """A PIL image, tensor or array as an (H, W) or (H, W, C) array."""
    if isinstance(image, Tensor):
        return (image.movedim(0, 2) if image.ndim == 3 else image).cpu().numpy()
    if isinstance(image, Image.Image):
        return picture_array(plain_mode(image))
    if isinstance(image, np.ndarray):
        return image
    raise BrokenImage(f"{type(image).__name__} is no image")


def _unlabelled(name: str, count: int, read: Any) -> Images:
    return Images(name, Names(count, str), None, None, read)


def _image_of(item: Any) -> Any:
    return item[0] if isinstance(item, tuple | list) else item


def _labels(dataset: Any, first: Any) -> np.ndarray | None:
    """(N,) int64, or None unless the items carry a whole number. Reads all items where nothing else knows them."""
    if not isinstance(first, tuple | list) or len(first) < 2 or not _is_label(first[1]):
        return None
    known = _known_targets(dataset)
    if known is None:
        known = [_label_of(dataset, index) for index in range(len(dataset))]
    labels = np.array([int(label) for label in known], np.int64)
    return labels if (labels >= 0).any() else None


def _label_of(dataset: Any, index: int) -> Any:
    """-1 for an item that cannot be read: told as broken when its image is due."""
    try:
        return _item(dataset, index)[1]
    except BrokenImage:
        return -1


def _known_targets(dataset: Any) -> Any:
    """The labels without reading the images: torchvision's `targets`, through any Subset."""
    if isinstance(dataset, Subset):
        inner = _known_targets(dataset.dataset)
        return None if inner is None else [inner[index] for index in dataset.indices]
    targets = getattr(dataset, "targets", None)
    # A target_transform would make them differ from what the items carry.
    if targets is None or len(targets) != len(dataset) or getattr(dataset, "target_transform", None) is not None:
        return None
    return targets if all(_is_label(target) for target in targets) else None


def _is_label(label: object) -> bool:
    if isinstance(label, Tensor):
        return label.ndim == 0 and not label.is_floating_point()
    return isinstance(label, int | np.integer)


def _class_names(dataset: Any) -> tuple[str, ...]:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    named = getattr(dataset, "classes", None)
    return tuple(map(str, named)) if isinstance(named, list | tuple) else ()
