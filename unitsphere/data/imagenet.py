"""ImageNet (ILSVRC 2012): training images in a folder per class, validation images likewise or all in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from unitsphere.common.errors import UsageError
from unitsphere.data.folder import list_images, scan_classes
from unitsphere.data.images import Images, Splits, images_in_files
from unitsphere.data.lists import read_text
from unitsphere.data.walk import sub_folders

LAYOUT = (
    "The layout is PATH/train/WNID/*.JPEG and PATH/val/WNID/*.JPEG, or PATH/val/*.JPEG and one of "
    "PATH/LOC_val_solution.csv, PATH/val.txt, PATH/ILSVRC2012_devkit_t12/."
)
KAGGLE = Path("ILSVRC", "Data", "CLS-LOC")  # where train/ and val/ lie in Kaggle's archive
DEVKIT = Path("ILSVRC2012_devkit_t12", "data")


def imagenet_splits(name: str, classes: tuple[str, ...] | None, path: str) -> Splits:
    """classes: WNIDs, of which only the images are taken; None for all folders of train/."""
    given = Path(path)
    root = given / KAGGLE if (given / KAGGLE).is_dir() else given
    for split in ("train", "val"):
        if not (root / split).is_dir():
            raise UsageError(f"{name}={path}: there is no folder {root / split}. {LAYOUT}")
    folders = tuple(sub_folders(root / "train"))
    if not folders:
        raise UsageError(f"{name}={path}: no class folders in {root / 'train'}. {LAYOUT}")
    chosen = classes or folders
    if sub_folders(root / "val"):
        return {split: partial(scan_classes, root / split, name, chosen) for split in ("train", "val")}
    return {
        "train": partial(scan_classes, root / "train", name, chosen),
        "val": lambda: flat_val(root / "val", given, name, folders, chosen),
    }


def flat_val(folder: Path, given: Path, name: str, folders: tuple[str, ...], chosen: tuple[str, ...]) -> Images:
    """The images of a folder without class folders that are of the chosen classes. given: where the truth lies;
    folders: all of train/, sorted."""
    names = list_images(folder).names
    truth = _truth(given, names, folders)
    label_of = {wnid: label for label, wnid in enumerate(chosen)}
    labels = np.array([label_of.get(truth[image.partition(".")[0]], -1) for image in names], np.int64)
    return images_in_files(folder, name, names, labels, chosen).subset(np.flatnonzero(labels >= 0))


def _truth(given: Path, names: Sequence[str], folders: tuple[str, ...]) -> dict[str, str]:
    """Image without its suffix -> WNID, for all images."""
    if (source := given / "LOC_val_solution.csv").exists():
        truth = _from_kaggle(source)
    elif (source := given / "val.txt").exists():
        truth = _from_list(source, folders)
    elif (source := given / DEVKIT / "ILSVRC2012_validation_ground_truth.txt").exists():
        truth = _from_devkit(source, names)
    else:
        raise UsageError(f"{given / 'val'} has no class folders, and nothing says its classes. {LAYOUT}")
    unknown = [image for image in names if image.partition(".")[0] not in truth]
    if unknown:
        raise UsageError(f"{source} does not say the class of {len(unknown)} images, such as {unknown[0]}.")
    return truth


def _from_kaggle(source: Path) -> dict[str, str]:
    """ImageId,PredictionString: a WNID and its box, several times."""
    rows = (line.split(",") for line in read_text(source).splitlines()[1:] if line.strip())
    return {row[0]: row[1].split()[0] for row in rows}


def _from_list(source: Path, folders: tuple[str, ...]) -> dict[str, str]:
    """An image and its WNID a line, or the WNID's place among all, sorted."""
    rows = [line.split() for line in read_text(source).splitlines() if line.strip()]
    for row in rows:
        if len(row) != 2:
            raise UsageError(f"{source}: {' '.join(row)!r} is not an image and its class.")
    truth = {image.partition(".")[0]: word for image, word in rows}
    if not (truth and all(word.isdecimal() for word in truth.values())):
        return truth
    count = max(map(int, truth.values())) + 1
    if count != len(folders):
        raise UsageError(
            f"{source} numbers {count} classes, but train/ has {len(folders)} folders, so it is not known which are "
            "meant. Write WNIDs in the place of the numbers."
        )
    return {image: folders[int(word)] for image, word in truth.items()}


def _from_devkit(source: Path, names: Sequence[str]) -> dict[str, str]:
    """A number a line, in the order of the images; meta.mat says which WNID it is."""
    try:
        from scipy.io import loadmat  # type: ignore[import-untyped]
    except ImportError:
        raise UsageError(
            f"{source} needs scipy (pip install scipy), which reads meta.mat. Or sort the images into class folders."
        ) from None
    meta = source.with_name("meta.mat")
    if not meta.exists():
        raise UsageError(f"There is no {meta}, which says what the numbers in {source.name} mean.")
    wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in loadmat(meta, squeeze_me=True)["synsets"]}
    numbers = read_text(source).split()
    if len(numbers) != len(names):
        raise UsageError(f"{source} has {len(numbers)} lines, but there are {len(names)} validation images.")
    return {image.partition(".")[0]: wnids[int(number)] for image, number in zip(names, numbers, strict=True)}
