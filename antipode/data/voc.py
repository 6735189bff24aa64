"""PASCAL VOC 2007 classification: an image may show several of 20 classes."""

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


def voc2007_splits(path: str) -> Splits:
    """train is VOC's trainval, val its test: all protocols report on test."""
    root = Path(path)
    for folder in (root / "VOCdevkit" / "VOC2007", root / "VOC2007", root):
        if (folder / "JPEGImages").is_dir():
            return {"train": partial(_read, folder, "trainval"), "val": partial(_read, folder, "test")}
    raise UsageError(f"voc2007={path}: there is no {root / 'VOCdevkit' / 'VOC2007' / 'JPEGImages'}. {LAYOUT}")


def _read(folder: Path, split: str) -> Images:
    """labels (N, 20) int8 as the files have them: 1 shown, -1 not shown, 0 shown but difficult, not to be judged by."""
    columns = []
    images: list[str] = []
    for name in CLASSES:
        source = require(folder / "ImageSets" / "Main" / f"{name}_{split}.txt", "voc2007", LAYOUT)
        rows = list(numbered_lines(source))
        listed = [image for image, _ in rows]
        if images and listed != images:
            raise UsageError(f"{source} lists other images than {CLASSES[0]}_{split}.txt. Unpack VOC 2007 again.")
        images = listed
        columns.append([flag for _, flag in rows])
    labels = np.array(columns, np.int8).T
    if not np.isin(labels, (-1, 0, 1)).all():
        raise UsageError(f"{folder / 'ImageSets' / 'Main'}: the lists of {split} hold other marks than -1, 0 and 1.")
    names = [f"{image}.jpg" for image in images]
    require_files(folder / "JPEGImages", names, source)
    return images_in_files(folder / "JPEGImages", "voc2007", names, np.ascontiguousarray(labels), CLASSES)
