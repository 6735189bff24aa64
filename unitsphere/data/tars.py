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
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np

from unitsphere.common.errors import UsageError
from unitsphere.data.files import check_size, open_regular, read_regular
from unitsphere.data.images import Images, Splits
from unitsphere.data.index import Listing, remembered
from unitsphere.data.labels import class_labels
from unitsphere.data.names import StoredNames
from unitsphere.data.shards import find_shards, split_shards
from unitsphere.images.decode import BrokenImage, suffixes

SUFFIX = ".tar"
LABEL_SUFFIXES = {"cls", "json", "txt"}
LONGEST_LABEL = 2**20  # bytes; a longer text is a caption
CLASS_NAMES = "classnames.txt"  # beside the shards: a name a line


def tar_splits(path: str, name: str) -> Splits:
    files = find_shards(Path(path), SUFFIX)
    if not files:
        raise UsageError(f"{name}: no *{SUFFIX} files in {path}.")
    root = Path(path) if Path(path).is_dir() else Path(os.path.commonpath([file.parent for file in files]))
    splits = split_shards(files, root)
    listed = cache(lambda split: _listing(root, splits[split]))
    return {split: partial(_open, root, name, split, splits, listed) for split in splits}


def _listing(root: Path, shards: list[Path]) -> Listing:
    files = [os.path.relpath(shard, root) for shard in shards]
    folder = os.path.abspath(root)
    about = {"shards": files, "suffixes": sorted(suffixes())}
    return remembered(folder, about, partial(_list, folder, files))


def _open(root: Path, name: str, split: str, splits: dict[str, list[Path]], listed: Callable[[str], Listing]) -> Images:
    folder, listing = os.path.abspath(root), listed(split)
    files = [os.path.relpath(shard, root) for shard in splits[split]]
    shard, start, size, label = (listing.columns[key] for key in ("shard", "start", "size", "label"))
    if not len(shard):
        raise UsageError(f"{name}: no images in {len(files)} *{SUFFIX} files, such as {splits[split][0]}.")
    reasons = {int(place): reason for place, reason in listing.facts.get("broken", {}).items()}

    def read(index: int) -> bytes:
        if size[index] < 0:
            raise BrokenImage(reasons.get(index, "a sparse file, which is not read"))
        check_size(int(size[index]))
        with open_regular(os.path.join(folder, files[shard[index]])) as file:
            file.seek(int(start[index]))
            return file.read(int(size[index]))

    labels, classes = class_labels(label, lambda: [listed(other).columns["label"] for other in splits], _names(root))
    return Images(name, listing.names, labels, classes, read)


def _list(folder: str, files: list[str], before: Listing | None, same: list[bool]) -> Listing:
    """A shard that cannot be read, or not to its end, is one broken image more: of size -1, with its reason."""
    columns = {"shard": array("i"), "start": array("q"), "size": array("q"), "label": array("q")}
    stamps = array("q")
    broken: dict[str, str] = {}
    good = 0

    def found() -> Iterator[str]:
        nonlocal good
        for number, file in enumerate(files):
            path = os.path.join(folder, file)
            try:
                stamps.append(os.stat(path).st_mtime_ns)
                for image, label in _samples(path):
                    where = (image.offset_data, -1 if image.issparse() else image.size)
                    for key, value in zip(columns, (number, *where, label), strict=True):
                        columns[key].append(value)
                    good += 1
                    yield f"{file}/{image.name}"
            except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError) as problem:
                del stamps[number:]
                stamps.append(0)
                broken[str(len(columns["shard"]))] = (
                    f"no tar file that can be read in any order: {problem}. Unpack compressed ones (gunzip)."
                )
                for key, value in zip(columns, (number, 0, -1, -1), strict=True):
                    columns[key].append(value)
                yield file

    listed = time.time_ns()
    names = StoredNames.of(found())
    if broken and not good:
        place, reason = next(iter(broken.items()))
        raise UsageError(f"{os.path.join(folder, names[int(place)])} is {reason}")
    arrays = {key: np.frombuffer(column, np.dtype(column.typecode)) for key, column in columns.items()}
    facts = {"broken": broken} if broken else {}
    return Listing(names, arrays, facts, StoredNames.of(files), np.frombuffer(stamps, np.int64), listed)


def _samples(path: str) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """The first image of each sample, and its label, -1 where it has none."""
    key, image, label = "", None, -1
    with open_regular(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
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


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo, suffix: str, path: str) -> int:
    file = tar.extractfile(member) if member.size <= LONGEST_LABEL and not member.issparse() else None
    text = file.read() if file else b""
    try:
        given = json.loads(text) if suffix == "json" else {"label": text}
        label = int(given["label"]) if isinstance(given, dict) and "label" in given else -1
        if label >= 2**63:
            raise ValueError("beyond int64")
        return max(label, -1)
    except (ValueError, TypeError, OverflowError, RecursionError):
        if suffix == "txt":
            return -1
        raise UsageError(f"{path}: {member.name} holds no class number but {text[:40]!r}.") from None


def _names(root: Path) -> tuple[str, ...]:
    """The classes' names, from the file beside the shards; none without it."""
    try:
        return tuple(read_regular(root / CLASS_NAMES).decode("utf-8-sig").splitlines())
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{root / CLASS_NAMES} cannot be read as a name a line: {problem}.") from None
