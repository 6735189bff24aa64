"""PASCAL VOC 2007 classification, and other images in its form: each may show several of the classes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from unitsphere.common.errors import UsageError
from unitsphere.data.files import read_regular
from unitsphere.data.images import Images, Splits, images_in_files
from unitsphere.data.lists import numbered_lines, read_text, require, require_files

CLASSES = tuple(
    """
    aeroplane bicycle bird boat bottle bus car cat chair cow
    diningtable dog horse motorbike person pottedplant sheep sofa train tvmonitor
    """.split()
)
SPLITS = ("trainval", "train", "val", "test")
LARGEST = 2**24  # bytes of one image's annotations
VOC2007 = {"train": "trainval", "val": "test"}
LAYOUT = (
    "The layout is PATH/VOCdevkit/VOC2007/JPEGImages/*.jpg and PATH/VOCdevkit/VOC2007/ImageSets/Main/CLASS_SPLIT.txt, "
    "SPLIT trainval and test."
)
OWN_LAYOUT = (
    "The layout is PATH/JPEGImages/*.jpg and PATH/ImageSets/Main/CLASS_SPLIT.txt, SPLIT trainval and test, or train "
    "and val: an image's name without .jpg a line, and 1 (shown), -1 (not shown) or 0 (not to be judged by). Without "
    "such lists PATH/ImageSets/Main/SPLIT.txt, a name a line, and PATH/Annotations/NAME.xml, classes as object/name."
)


def voc2007_splits(path: str) -> Splits:
    """train is VOC's trainval, val its test: all protocols report on test."""
    root = Path(path)
    for folder in (root / "VOCdevkit" / "VOC2007", root / "VOC2007", root):
        if (folder / "JPEGImages").is_dir():
            return _splits(folder, CLASSES, VOC2007, "voc2007", LAYOUT)
    raise UsageError(f"voc2007={path}: there is no {root / 'VOCdevkit' / 'VOC2007' / 'JPEGImages'}. {LAYOUT}")


def voc_splits(path: str) -> Splits:
    """The same with the classes that there are lists of, else with those that the annotations name."""
    folder, data = Path(path), f"voc={path}"
    lists = require(folder / "ImageSets" / "Main", data, OWN_LAYOUT)
    stems = {file.stem for file in lists.glob("*.txt")}
    listed = {stem.rpartition("_")[::2] for stem in stems if stem.endswith(tuple(f"_{split}" for split in SPLITS))}
    if listed:
        parts = _parts({split for _, split in listed})
        classes = sorted(kind for kind, split in listed if split == parts["train"])
        return _splits(folder, tuple(classes), parts, data, OWN_LAYOUT)
    if not stems & set(SPLITS):
        raise UsageError(f"{data}: {lists} has neither lists CLASS_trainval.txt nor trainval.txt. {OWN_LAYOUT}")
    return _annotated_splits(folder, _parts(stems), data)


def _parts(present: set[str]) -> dict[str, str]:
    """Which lists teach and which judge, of those that are there: no image does both."""
    if "test" not in present and {"train", "val"} <= present:
        return {"train": "train", "val": "val"}
    teaches = "train" if "train" in present and "trainval" not in present else "trainval"
    return {"train": teaches, "val": "test"}


def _splits(folder: Path, classes: tuple[str, ...], parts: Mapping[str, str], name: str, layout: str) -> Splits:
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


def _annotated_splits(folder: Path, parts: Mapping[str, str], data: str) -> Splits:
    """Both are read at once: their classes are numbered together, so that a label means the same in either."""
    shown = {split: _read_annotations(folder, part, data) for split, part in parts.items()}
    classes = tuple(sorted({kind for images in shown.values() for marks in images.values() for kind in marks}))
    if not classes:
        raise UsageError(f"{data}: the annotations in {folder / 'Annotations'} name no object. {OWN_LAYOUT}")
    return {split: partial(_marked, folder, images, classes, data) for split, images in shown.items()}


def _read_annotations(folder: Path, part: str, data: str) -> dict[str, dict[str, int]]:
    """Image -> class -> 1, or 0 where all of its objects are difficult."""
    source = require(folder / "ImageSets" / "Main" / f"{part}.txt", data, OWN_LAYOUT)
    images = [line.strip() for line in read_text(source).splitlines() if line.strip()]
    require_files(folder / "JPEGImages", [f"{image}.jpg" for image in images], source)
    return {image: _read_objects(folder / "Annotations" / f"{image}.xml", source) for image in images}


def _read_objects(file: Path, source: Path) -> dict[str, int]:
    try:
        root = ElementTree.fromstring(read_regular(file, LARGEST))
    except FileNotFoundError:
        raise UsageError(f"{source} lists {file.stem}, but there is no {file}. {OWN_LAYOUT}") from None
    except (OSError, ElementTree.ParseError) as problem:
        raise UsageError(f"{file} cannot be read: {problem}. Mend it, or take {file.stem} off {source}.") from None
    marks: dict[str, int] = {}
    for thing in root.iterfind("object"):
        kind = (thing.findtext("name") or "").strip()
        if not kind:
            raise UsageError(f"{file} has an object without a name. Mend it, or take {file.stem} off {source}.")
        clear = (thing.findtext("difficult") or "").strip() != "1"
        marks[kind] = max(marks.get(kind, 0), int(clear))
    return marks


def _marked(folder: Path, images: Mapping[str, Mapping[str, int]], classes: tuple[str, ...], data: str) -> Images:
    labels = np.array([[marks.get(kind, -1) for kind in classes] for marks in images.values()], np.int8)
    names = [f"{image}.jpg" for image in images]
    return images_in_files(folder / "JPEGImages", data, names, labels, classes)
