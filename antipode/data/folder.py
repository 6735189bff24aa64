"""Images in files: a folder, or a list of paths."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from antipode.data.decode import suffixes
from antipode.data.images import Images, Splits
from antipode.errors import UsageError

LIST_SUFFIXES = {".txt", ".csv", ".tsv", ".lst"}
VAL_FOLDERS = ("val", "valid", "validation", "test")


def folder_splits(root: Path, name: str) -> Splits:
    """train/ and val/ where the folder has them, else the whole folder, undivided."""
    folders = set(_sub_folders(root))
    val = next((folder for folder in VAL_FOLDERS if folder in folders), None)
    if "train" in folders and val:
        # Both know the other's classes, so that a label means the same class in both.
        train_classes, val_classes = class_folders(root / "train"), class_folders(root / val)
        return {
            "train": lambda: scan(root / "train", name, known=val_classes),
            "val": lambda: scan(root / val, name, known=train_classes),
        }
    alone = folders == {"train"} and not _holds_image(root, deep=False)
    return {"all": lambda: scan(root / "train" if alone else root, name)}


def scan(root: Path, name: str, known: Iterable[str] = ()) -> Images:
    """All images under `root`, sorted. Labelled by the first-level sub-folder when no image lies in `root`
    itself and at least two sub-folders hold images (or one, that is among the `known` classes)."""
    names = sorted(_walk(os.fspath(root)))
    if not names:
        raise UsageError(
            f"No images in {root}. Files that end in {_examples()} (and others that Pillow reads) are taken."
        )
    own = set() if any(os.sep not in path for path in names) else {path.split(os.sep, 1)[0] for path in names}
    if not (len(own) >= 2 or (own and own <= set(known))):
        return _files(root, name, names, None, None)
    classes = tuple(sorted(own | set(known)))
    label_of = {folder: label for label, folder in enumerate(classes)}
    return _files(root, name, names, [label_of[path.split(os.sep, 1)[0]] for path in names], classes)


def scan_classes(root: Path, name: str, classes: Sequence[str]) -> Images:
    """The images of root/CLASS for each of `classes`: every one of these folders must be there."""
    missing = [folder for folder in classes if not (root / folder).is_dir()]
    if missing:
        raise UsageError(
            f"{name}: {len(missing)} of {len(classes)} class folders are not in {root}: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. Each class is a folder of images."
        )
    names: list[str] = []
    labels: list[int] = []
    for label, folder in enumerate(classes):
        found = sorted(_walk(os.fspath(root / folder), folder + os.sep))
        if not found:
            raise UsageError(f"{name}: no images in the class folder {root / folder}.")
        names += found
        labels += [label] * len(found)
    return _files(root, name, names, labels, tuple(classes))


def class_folders(root: Path) -> tuple[str, ...]:
    """The sub-folders that hold images, sorted; none if images lie in `root` itself. Looks at few files."""
    if _holds_image(root, deep=False):
        return ()
    return tuple(folder for folder in _sub_folders(root) if _holds_image(root / folder, deep=True))


def read_list(path: Path, name: str) -> Images:
    """A list file: one path a line, relative to the file, with a label after a tab or comma or without;
    empty lines and lines that begin with # are left out."""
    names: list[str] = []
    words: list[str] = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        image, word = _split_line(line)
        if not (path.parent / image).is_file():
            raise UsageError(f"{path}, line {number}: no file {image!r} (paths are relative to {path.parent}).")
        names.append(image)
        words += [word] if word else []
        if len(words) not in (0, len(names)):
            raise UsageError(f"{path}, line {number}: either every line has a label or none has.")
    if not names:
        raise UsageError(f"{path} lists no images. Give one path a line, and a label after a tab if there is one.")
    if not words:
        return _files(path.parent, name, names, None, None)
    numbers = all(word.isdecimal() for word in words)
    classes = tuple(sorted(set(words), key=int if numbers else str))
    label_of = {word: label for label, word in enumerate(classes)}
    return _files(path.parent, name, names, [label_of[word] for word in words], classes)


def _split_line(line: str) -> tuple[str, str]:
    if "\t" in line:
        image, _, word = line.rpartition("\t")
    elif "," in line and not _is_image(line):  # a comma inside a file name is no separator
        image, _, word = line.rpartition(",")
    else:
        image, word = line, ""
    return image.strip(), word.strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no list of images: it is not UTF-8 text.") from None


def _files(
    root: Path, name: str, names: list[str], labels: list[int] | None, classes: tuple[str, ...] | None
) -> Images:
    folder = os.path.abspath(root)  # reading goes on if the process changes its folder

    def read(index: int) -> bytes:
        with open(os.path.join(folder, names[index]), "rb") as file:
            return file.read()

    return Images(name, names, None if labels is None else np.array(labels, np.int64), classes, read)


def _walk(folder: str, prefix: str = "") -> Iterator[str]:
    """The paths of all images, relative to the first folder. Links are followed, but not round in circles.
    scandir knows folders from files without a stat of each."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                if not (entry.is_symlink() and _leads_back(entry.path, folder)):
                    yield from _walk(entry.path, prefix + entry.name + os.sep)
            elif _is_image(entry.name):
                yield prefix + entry.name


def _leads_back(link: str, folder: str) -> bool:
    target, here = os.path.realpath(link), os.path.realpath(folder)
    return os.path.commonpath([target, here]) == target


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in suffixes()


def _holds_image(folder: Path, deep: bool) -> bool:
    if deep:
        return next(_walk(os.fspath(folder)), None) is not None
    with os.scandir(folder) as entries:
        return any(_is_image(e.name) and not e.name.startswith(".") and not e.is_dir() for e in entries)


def _sub_folders(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _examples() -> str:
    return ", ".join(suffix for suffix in (".jpg", ".png", ".webp", ".tif", ".npy") if suffix in suffixes())
