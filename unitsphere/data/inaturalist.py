"""iNaturalist 2018: images in folders, their classes and the split in annotation files of COCO's form."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from unitsphere.common.errors import UsageError
from unitsphere.data.files import read_regular
from unitsphere.data.images import Images, Splits, images_in_files
from unitsphere.data.lists import require, require_files
from unitsphere.data.names import StoredNames

LARGEST = 2**32  # bytes of a file of annotations
LAYOUT = (
    "The layout is PATH/train_val2018/SUPERCATEGORY/CLASS/*.jpg, PATH/train2018.json and PATH/val2018.json; names of "
    "the classes from PATH/categories.json where there is one."
)


def inaturalist_splits(path: str) -> Splits:
    root = Path(path)
    return {split: partial(_read, root, f"{split}2018.json") for split in ("train", "val")}


def _read(root: Path, file: str) -> Images:
    name = f"inaturalist2018={root}"
    source = require(root / file, name, LAYOUT)
    annotations = _json(source)
    named = root / "categories.json"  # the true names, published after the competition
    try:
        categories = _json(named) if named.exists() else annotations["categories"]
        classes = {category["id"]: str(category["name"]) for category in categories}
        label_of = {number: label for label, number in enumerate(sorted(classes))}
        class_of = {entry["image_id"]: entry["category_id"] for entry in annotations["annotations"]}
        names = StoredNames.of(image["file_name"] for image in annotations["images"])
        labels = [label_of[class_of[image["id"]]] for image in annotations["images"]]
    except (KeyError, TypeError, AttributeError) as problem:
        raise UsageError(
            f"{source} is no annotation file of iNaturalist 2018, with images, annotations and categories: "
            f"{type(problem).__name__} {problem}."
        ) from problem
    require_files(root, names, source)
    return images_in_files(root, "inaturalist2018", names, labels, tuple(classes[number] for number in sorted(classes)))


def _json(path: Path) -> Any:
    try:
        return json.loads(read_regular(path, LARGEST))
    except (OSError, ValueError, RecursionError) as problem:
        raise UsageError(f"{path} is not JSON: {problem}. It may be cut off; unpack it again.") from problem
