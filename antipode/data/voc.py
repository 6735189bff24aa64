"""PASCAL VOC 2007 classification, and other images in its form: each may show several of the classes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from antipode.data.images import Images, Splits, images_in_files
from antipode.data.lists import numbered_lines, require, require_files
from antipode.errors import UsageError

CLASSES = tuple(
    """
    aeroplane bicycle bird boat bottle bus car cat chair cow
    diningtable dog horse motorbike person pottedplant sheep sofa train tvmonitor
    """.split()
)
LAYOUT = (
    "The layout is PATH/VOCdevkit/VOC2007/JPEGImages/*.jpg and PATH/VOCdevkit/VOC2007/ImageSets/Main/CLASS_SPLIT.txt, "
    "SPLIT trainval and test."
)
OWN_LAYOUT = (
    "The layout is PATH/JPEGImages/*.jpg and PATH/ImageSets/Main/CLASS_SPLIT.txt, SPLIT trainval and test: an image's "
    "name without .jpg a line, and 1 (shown), -1 (not shown) or 0 (not to be judged by)."
)


def voc2007_splits(path: str) -> Splits:
    """train is VOC's trainval, val its test: all protocols report on test."""
    root = Path(path)
    for folder in (root / "VOCdevkit" / "VOC2007", root / "VOC2007", root):
        if (folder / "JPEGImages").is_dir():
            return _splits(folder, CLASSES, "voc2007", LAYOUT)
    raise UsageError(f"voc2007={path}: there is no {root / 'VOCdevkit' / 'VOC2007' / 'JPEGImages'}. {LAYOUT}")


def voc_splits(path: str) -> Splits:
    """The same with the classes that there are lists of."""
    lists, end = require(Path(path) / "ImageSets" / "Main", f"voc={path}", OWN_LAYOUT), "_trainval.txt"
    classes = sorted(file.name.removesuffix(end) for file in lists.glob(f"*{end}"))
    if not classes:
        raise UsageError(f"voc={path}: {lists} has no list CLASS{end}. {OWN_LAYOUT}")
    return _splits(Path(path), tuple(classes), f"voc={path}", OWN_LAYOUT)


def _splits(folder: Path, classes: tuple[str, ...], name: str, layout: str) -> Splits:
    parts = {"train": "trainval", "val": "test"}
    return {split: partial(_read, folder, part, classes, name, layout) for split, part in parts.items()}


def _read(folder: Path, split: str, classes: tuple[str, ...], data: str, layout: str) -> Images:
    """labels (N, classes) int8 as the files have them: 1 shown, -1 not shown, 0 shown but difficult, not to be judged
    by."""
    columns = []
    images: list[str] = []
    for name in classes:
        source = require(folder / "ImageSets" / "Main" / f"{name}_{split}.txt", data, layout)
        rows = list(numbered_lines(source))
        listed = [image for image, _ in rows]
        if images and listed != images:
            raise UsageError(f"{source} lists other images than {classes[0]}_{split}.txt. All must list the same.")
        images = listed
        columns.append([flag for _, flag in rows])
    labels = np.array(columns, np.int8).T
    if not np.isin(labels, (-1, 0, 1)).all():
        raise UsageError(f"{folder / 'ImageSets' / 'Main'}: the lists of {split} hold other marks than -1, 0 and 1.")
    names = [f"{image}.jpg" for image in images]
    require_files(folder / "JPEGImages", names, source)
    return images_in_files(folder / "JPEGImages", data, names, np.ascontiguousarray(labels), classes)
