"""Reading a pack, which may be damaged or somebody else's: nothing in it is taken on trust."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.data.files import open_regular
from unitsphere.data.images import Images
from unitsphere.data.names import StoredNames

NEWEST = 2
FORMATS = {f"unitsphere-pack-{number}": number for number in (1, NEWEST)}
FORMAT = f"unitsphere-pack-{NEWEST}"
OLD_NAME = "antipode-pack-1"  # format 1 under the name that the package had until November 2026
HEADER_SPACE = 4096  # with the 8 bytes before it: the first tensor begins on a page
DTYPES: dict[str, np.dtype[Any]] = {"U8": np.dtype("<u1"), "I64": np.dtype("<i8")}
BLOCK, HASH = 2**20, 16  # bytes of encoded images that have one hash, and bytes of the hash
CHECKED = ("offsets", "labels", "classes")  # when a pack is opened; the rest when it is asked for
MALFORMED = (AttributeError, ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError)


def digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=HASH).hexdigest()


class BlockHashes:
    """The hash of each block of what is added, one piece after another."""

    def __init__(self) -> None:
        self.done = bytearray()
        self.hash, self.filled = hashlib.blake2b(digest_size=HASH), 0

    def add(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            part, rest = rest[: BLOCK - self.filled], rest[BLOCK - self.filled :]
            self.hash.update(part)
            self.filled += len(part)
            if self.filled == BLOCK:
                self.finish()

    def finish(self) -> bytearray:
        """End the last block, which may be shorter. Return all hashes."""
        if self.filled:
            self.done += self.hash.digest()
            self.hash, self.filled = hashlib.blake2b(digest_size=HASH), 0
        return self.done


def is_pack(path: str | os.PathLike[str]) -> bool:
    """By content: the name may be any."""
    try:
        written = _read_header(Path(path))["__metadata__"]["format"]
        return written == OLD_NAME or written.startswith("unitsphere-pack-")
    except (OSError, *MALFORMED):
        return False


def open_pack(path: str | os.PathLike[str]) -> dict[str, Images]:
    """The splits of a pack. Only what is said of the images is read and checked; the images are mapped."""
    file = _PackFile(Path(path))
    file.check_hashes(CHECKED)
    if file.hashes is None:
        _tell_unchecked(file.path)

    def split(begin: int, end: int) -> Images:
        labels = np.array(file.labels[begin:end])
        labelled = bool((labels >= 0).any())

        def read(index: int) -> bytes:
            # The copy is numpy's, which lets other threads run while the disk answers.
            return file.encoded[file.offsets[begin + index] : file.offsets[begin + index + 1]].copy().tobytes()

        return Images(
            name=os.fspath(path),
            names=StoredNames(file.names.text, file.names.offsets[begin : end + 1]),
            labels=labels if labelled else None,
            classes=file.classes if labelled else None,
            read=read,
        )

    return {name: split(*file.splits[name]) for name in file.splits}


@dataclass(frozen=True)
class CheckedPack:
    """A whole pack: its splits with the number of their images, and its bytes."""

    path: Path
    images: dict[str, int]
    size: int


def check_pack(path: str | os.PathLike[str]) -> CheckedPack:
    """Compare every byte of a pack with the hashes that were written. Raise UnitsphereError where one differs, with
    the names of the images that lie there."""
    file = _PackFile(Path(path))
    if file.hashes is None:
        raise UsageError(f"{path} is a pack of format 1, without checksums. `unitsphere pack` writes packs with them.")
    file.check_hashes((*CHECKED, "name_offsets", "names", "blocks"))
    expected = file.tensor("blocks").reshape(-1, HASH)
    starts = range(0, len(file.encoded), BLOCK)
    wrong = [
        start
        for start, right in zip(starts, expected, strict=True)
        if digest(file.encoded[start : start + BLOCK]) != right.tobytes().hex()
    ]
    if wrong:
        lies = np.concatenate([_images_within(file.offsets, start, start + BLOCK) for start in wrong])
        names = [file.names[index] for index in np.unique(lies)[:5]]
        raise file.damaged(
            f"{len(wrong)} of {len(starts)} blocks differ from what was written. {len(np.unique(lies))} images lie in "
            f"them, such as {', '.join(names)}"
        )
    return CheckedPack(file.path, {name: end - begin for name, (begin, end) in file.splits.items()}, file.size)


class _PackFile:
    """The tensors of a pack, mapped. Raises UsageError for what is no pack, UnitsphereError for a damaged one."""

    def __init__(self, path: Path) -> None:
        if not is_pack(path):
            raise UsageError(f"{path} is no pack, or an incomplete one. `unitsphere pack` writes packs.")
        self.path, self.header = path, _read_header(path)
        about = self.header["__metadata__"]
        if about["format"] not in (*FORMATS, OLD_NAME):
            raise UsageError(
                f"{path} is a pack of format {about['format'].rpartition('-')[2]}; this version reads formats up to "
                f"{NEWEST}. Update unitsphere."
            )
        self.whole = np.memmap(path, np.uint8, mode="r")
        self.size = len(self.whole)
        try:
            self.hashes = dict(json.loads(about["hashes"])) if FORMATS.get(about["format"], 1) > 1 else None
            self.encoded, self.offsets, self.labels = map(self.tensor, ("encoded", "offsets", "labels"))
            self.names = StoredNames(self.tensor("names"), self.tensor("name_offsets"))
            named = json.loads(self.tensor("classes").tobytes())
            self.classes = None if named is None else tuple(named)
            self.splits = {name: (begin, end) for name, (begin, end) in json.loads(about["splits"]).items()}
            self._check()
        except MALFORMED as problem:
            raise self.damaged(f"{problem}" or type(problem).__name__) from problem

    def tensor(self, key: str) -> np.ndarray:
        begin, end = (HEADER_SPACE + place for place in self.header[key]["data_offsets"])
        if not HEADER_SPACE <= begin <= end <= self.size:
            raise ValueError(f"{key} lies outside of the file")
        return self.whole[begin:end].view(DTYPES[self.header[key]["dtype"]]).view(np.ndarray)

    def damaged(self, why: str) -> UnitsphereError:
        return UnitsphereError(f"{self.path} is a damaged pack: {why}. Write it again, or restore it from a copy.")

    def check_hashes(self, keys: tuple[str, ...]) -> None:
        """Raise UnitsphereError where one of these tensors, or a split's place, is not what was written."""
        if self.hashes is None:
            return
        try:
            found = {key: digest(self.tensor(key)) for key in keys}
        except MALFORMED as problem:
            raise self.damaged(f"{problem}") from problem
        found["splits"] = digest(self.header["__metadata__"]["splits"].encode())
        for key, written in found.items():
            if self.hashes.get(key) != written:
                raise self.damaged(f"the {key} differ from what was written")

    def _check(self) -> None:
        """Raise ValueError where the tensors do not fit each other."""
        count = len(self.labels)
        for what, offsets, data in (
            ("images", self.offsets, self.encoded),
            ("names", self.names.offsets, self.names.text),
        ):
            rising = len(offsets) == count + 1 and offsets[0] == 0 and bool((offsets[1:] >= offsets[:-1]).all())
            if not rising or offsets[-1] > len(data):
                raise ValueError(f"the places of the {what} do not fit the file")
        if self.classes is not None and not all(isinstance(name, str) for name in self.classes):
            raise ValueError("the classes are no names")
        highest = np.iinfo(np.int64).max if self.classes is None else len(self.classes)
        if count and not (self.labels.min() >= -1 and self.labels.max() < highest):
            raise ValueError("a label is that of no class")
        for name, (begin, end) in self.splits.items():
            if not (isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end <= count):
                raise ValueError(f"the split {name!r} lies outside of the images")
        if not self.splits:
            raise ValueError("it has no split")


@cache
def _tell_unchecked(path: Path) -> None:
    """Say once that a pack has no checksums."""
    from unitsphere.common.terminal import warn

    if os.environ.get("RANK", "0") == "0":
        warn(f"{path} has no checksums: a flipped bit would not be noticed. `unitsphere pack` writes packs with them.")


def _images_within(offsets: np.ndarray, begin: int, end: int) -> np.ndarray:
    first = int(np.searchsorted(offsets, begin, "right")) - 1
    return np.arange(first, min(int(np.searchsorted(offsets, end, "left")), len(offsets) - 1))


def _read_header(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length != HEADER_SPACE - 8:
            raise ValueError("not a pack")
        header = json.loads(file.read(length))
        size = os.fstat(file.fileno()).st_size
    if size != HEADER_SPACE + header["classes"]["data_offsets"][1]:
        raise ValueError("cut off")
    return header
