"""WebDataset's form: tar files in which the parts of a sample follow each other and differ in their suffix.

    000017.jpg  000017.cls      an image and its class, a number as text; or
    000017.png  000017.json     {"label": 3, ...}; or
    000017.webp 000017.txt      a number (any other text is a caption, which is no label)

The files are gone through once, for where each image begins; then any image is one read.
"""

from __future__ import annotations

import json
import os
import tarfile
import time
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from unitsphere.common.errors import UsageError
from unitsphere.data.images import Images, Splits
from unitsphere.data.index import Listing, remembered
from unitsphere.data.names import StoredNames
from unitsphere.data.shards import find_shards, split_shards
from unitsphere.images.decode import suffixes

SUFFIX = ".tar"
LABEL_SUFFIXES = {"cls", "json", "txt"}
CLASS_NAMES = "classnames.txt"  # beside the shards: a name a line


def tar_splits(path: str, name: str) -> Splits:
    files = find_shards(Path(path), SUFFIX)
    if not files:
        raise UsageError(f"{name}: no *{SUFFIX} files in {path}.")
    root = Path(path) if Path(path).is_dir() else Path(os.path.commonpath([file.parent for file in files]))
    return {split: partial(_open, root, name, shards) for split, shards in split_shards(files, root).items()}


def _open(root: Path, name: str, shards: list[Path]) -> Images:
    folder = os.path.abspath(root)
    files = [os.path.relpath(shard, root) for shard in shards]
    about = {"shards": files, "suffixes": sorted(suffixes())}
    listing = remembered(folder, about, partial(_list, folder, files))
    shard, start, size, label = (listing.columns[key] for key in ("shard", "start", "size", "label"))
    if not len(shard):
        raise UsageError(f"{name}: no images in {len(files)} *{SUFFIX} files, such as {shards[0]}.")

    def read(index: int) -> bytes:
        with open(os.path.join(folder, files[shard[index]]), "rb") as file:
            file.seek(int(start[index]))
            return file.read(int(size[index]))

    labelled = bool((label >= 0).any())
    return Images(
        name,
        listing.names,
        label if labelled else None,
        _classes(root, int(label.max()) + 1) if labelled else None,
        read,
    )


def _list(folder: str, files: list[str]) -> Listing:
    columns = {"shard": array("i"), "start": array("q"), "size": array("q"), "label": array("q")}
    stamps = array("q")

    def found() -> Iterator[str]:
        for number, file in enumerate(files):
            stamps.append(os.stat(os.path.join(folder, file)).st_mtime_ns)
            for image, label in _samples(os.path.join(folder, file)):
                for key, value in zip(columns, (number, image.offset_data, image.size, label), strict=True):
                    columns[key].append(value)
                yield f"{file}/{image.name}"

    listed = time.time_ns()
    names = StoredNames.of(found())
    arrays = {key: np.frombuffer(column, np.dtype(column.typecode)) for key, column in columns.items()}
    return Listing(names, arrays, {}, StoredNames.of(files), np.frombuffer(stamps, np.int64), listed)


def _samples(path: str) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """The first image of each sample, and its label, -1 where it has none."""
    key, image, label = "", None, -1
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # or it would keep them all
                if not member.isfile() or os.path.basename(member.name).startswith("."):
                    continue
                folder, _, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                if key != (key := f"{folder}/{stem}"):
                    if image:
                        yield image, label
                    image, label = None, -1
                if image is None and f".{suffix.rpartition('.')[2].lower()}" in suffixes():
                    image = member
                elif suffix in LABEL_SUFFIXES and label < 0:
                    label = _label(tar, member, suffix, path)
            if image:
                yield image, label
    except tarfile.TarError as problem:
        raise UsageError(
            f"{path} is no tar file that can be read in any order: {problem}. Unpack compressed ones (gunzip)."
        ) from problem


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo, suffix: str, path: str) -> int:
    file = tar.extractfile(member)
    text = file.read() if file else b""
    try:
        if suffix != "json":
            return int(text)
        given = json.loads(text)
        return int(given["label"]) if isinstance(given, dict) and "label" in given else -1
    except (ValueError, TypeError):
        if suffix == "txt":
            return -1
        raise UsageError(f"{path}: {member.name} holds no class number but {text[:40]!r}.") from None


def _classes(root: Path, count: int) -> tuple[str, ...]:
    named = root / CLASS_NAMES
    names = named.read_text(encoding="utf-8").splitlines() if named.exists() else []
    return tuple(names) if len(names) >= count else tuple(map(str, range(count)))
