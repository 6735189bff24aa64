"""A data set in one file that opens at once: a safetensors file whose largest tensor is all encoded images.

    8 bytes       length of the header
    header        JSON, padded with spaces to a fixed length, so that it can be filled in last
    encoded       uint8, the files one after another
    offsets       int64 (N + 1), image i is encoded[offsets[i]:offsets[i + 1]]
    labels        int64 (N), -1 without a label
    name_offsets  int64 (N + 1), name i is names[name_offsets[i]:name_offsets[i + 1]] in UTF-8
    names         uint8
    classes       uint8, a JSON list or null

The splits lie one after another; the header's metadata says where each begins and ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.common.files import replacing
from unitsphere.common.machine import worker_count
from unitsphere.data.broken import BrokenImages
from unitsphere.data.images import Images, refuse_multi_label
from unitsphere.data.names import StoredNames
from unitsphere.images.decode import BrokenImage
from unitsphere.images.encode import packable

__all__ = ["open_pack", "pack"]

FORMAT = "unitsphere-pack-1"
FORMATS = (FORMAT, "antipode-pack-1")  # the same under the name that the package had until November 2026
HEADER_SPACE = 4096  # with the 8 bytes before it: the first tensor begins on a page
CHUNK = 256  # images in memory at a time
Encode = Callable[[bytes | np.ndarray], bytes]
DTYPES: dict[str, np.dtype[Any]] = {"U8": np.dtype("<u1"), "I64": np.dtype("<i8")}


@dataclass(frozen=True)
class Packed:
    """What was written: images per split, bytes in all, and name -> reason for the images left out."""

    path: Path
    images: dict[str, int]
    size: int
    broken: dict[str, str]


def pack(
    images_by_split: Mapping[str, Images],
    path: str | os.PathLike[str],
    *,
    size: int | None = None,
    quality: int = 90,
    max_broken: float = 0.01,
    progress: Callable[[int, int], None] | None = None,
) -> Packed:
    """Writes the splits into one file, and only when it is whole does it get its name.

    Images stay encoded as they are; arrays become PNG (or .npy where PNG cannot hold them).
    size: images with a longer shorter side are shrunk to it, as JPEG of that quality if they were JPEG, else PNG.
    max_broken: the share of broken images, which are left out, beyond which it is an error.
    progress: called with (images done, all images).
    """
    path = Path(path)
    for images in images_by_split.values():
        refuse_multi_label(images, "A pack")
    classes = _common_classes(images_by_split)
    if not path.parent.is_dir():
        raise UsageError(f"The pack cannot be written: there is no folder {path.parent}.")
    if path.exists() and not is_pack(path):
        raise UsageError(f"The pack cannot be written: {path} is something else. Remove it, or give another name.")
    total = sum(len(images) for images in images_by_split.values())
    contents, broken = _Contents(), BrokenImages(os.fspath(path), total, max_broken)
    try:
        with replacing(path) as temporary, open(temporary, "wb") as file:
            file.write(bytes(HEADER_SPACE))
            encode = partial(packable, size=size, quality=quality)
            before = 0
            for split, images in images_by_split.items():
                for done in _write_images(file, images, before, contents, broken, encode):
                    if progress:
                        progress(before + done, total)
                before += len(images)
                contents.splits[split] = len(contents.names)
            if not contents.names:
                raise broken.error()
            _write_rest(file, contents, classes)
    except OSError as problem:
        raise UnitsphereError(f"The pack {path} could not be written: {problem}") from problem
    counts = {split: end - begin for split, (begin, end) in contents.ranges().items()}
    return Packed(path, counts, path.stat().st_size, broken.reasons())


def is_pack(path: str | os.PathLike[str]) -> bool:
    """By content: the name may be any."""
    try:
        return _read_header(Path(path))["__metadata__"]["format"] in FORMATS
    except (OSError, ValueError, KeyError, TypeError):
        return False


def open_pack(path: str | os.PathLike[str]) -> dict[str, Images]:
    """The splits of a pack. Nothing is read but the header; everything else is mapped."""
    path = Path(path)
    if not is_pack(path):
        raise UsageError(f"{path} is no pack, or an incomplete one. `unitsphere pack` writes packs.")
    header = _read_header(path)
    whole = np.memmap(path, np.uint8, mode="r")

    def tensor(key: str) -> np.ndarray:
        begin, end = (HEADER_SPACE + place for place in header[key]["data_offsets"])
        return whole[begin:end].view(DTYPES[header[key]["dtype"]]).view(np.ndarray)

    encoded, offsets, labels = tensor("encoded"), tensor("offsets"), tensor("labels")
    names = StoredNames(tensor("names"), tensor("name_offsets"))
    classes = json.loads(tensor("classes").tobytes())

    def split(begin: int, end: int) -> Images:
        def read(index: int) -> bytes:
            # The copy is numpy's, which lets other threads run while the disk answers.
            return encoded[offsets[begin + index] : offsets[begin + index + 1]].copy().tobytes()

        labelled = bool((labels[begin:end] >= 0).any())
        return Images(
            name=os.fspath(path),
            names=StoredNames(names.text, names.offsets[begin : end + 1]),
            labels=np.array(labels[begin:end]) if labelled else None,
            classes=tuple(classes) if labelled and classes is not None else None,
            read=read,
        )

    ranges = json.loads(header["__metadata__"]["splits"])
    return {name: split(*ranges[name]) for name in ranges}


@dataclass
class _Contents:
    """What the header and the small tensors say about the images written so far."""

    ends: list[int] = field(default_factory=lambda: [0])
    names: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    splits: dict[str, int] = field(default_factory=dict)  # where each ends

    def ranges(self) -> dict[str, tuple[int, int]]:
        return dict(zip(self.splits, pairwise([0, *self.splits.values()]), strict=True))


def _write_images(
    file: BinaryIO, images: Images, before: int, contents: _Contents, broken: BrokenImages, encode: Encode
) -> Iterator[int]:
    """Writes the images of a split, a chunk at a time; yields the number done. before: images of earlier splits."""

    def attempt(index: int) -> bytes | str:
        try:
            return encode(images.read(index))
        except (BrokenImage, OSError) as problem:
            return str(problem)

    with ThreadPoolExecutor(worker_count()) as pool:
        for start in range(0, len(images), CHUNK):
            chunk = range(start, min(start + CHUNK, len(images)))
            for index, item in zip(chunk, pool.map(attempt, chunk), strict=True):
                if isinstance(item, str):
                    broken.note(before + index, images.names[index], item)
                    continue
                file.write(item)
                contents.ends.append(contents.ends[-1] + len(item))
                contents.names.append(images.names[index])
                contents.labels.append(-1 if images.labels is None else int(images.labels[index]))
            yield chunk.stop


def _write_rest(file: BinaryIO, contents: _Contents, classes: tuple[str, ...] | None) -> None:
    """The small tensors after the images, then the header before them."""
    gap = -contents.ends[-1] % 8  # what follows are 8-byte numbers
    file.write(bytes(gap))
    texts = [name.encode(errors="surrogateescape") for name in contents.names]
    tensors = {
        "offsets": np.array(contents.ends, DTYPES["I64"]),
        "labels": np.array(contents.labels, DTYPES["I64"]),
        "name_offsets": np.cumsum([0, *map(len, texts)], dtype=DTYPES["I64"]),
        "names": np.frombuffer(b"".join(texts), DTYPES["U8"]),
        "classes": np.frombuffer(json.dumps(classes).encode(), DTYPES["U8"]),
    }
    place = contents.ends[-1] + gap
    header: dict[str, Any] = {
        "__metadata__": {"format": FORMAT, "splits": json.dumps(contents.ranges())},
        "encoded": {"dtype": "U8", "shape": [place], "data_offsets": [0, place]},
    }
    for key, tensor in tensors.items():
        dtype = next(name for name, kind in DTYPES.items() if kind == tensor.dtype)
        header[key] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.nbytes],
        }
        file.write(tensor.tobytes())
        place += tensor.nbytes
    text = json.dumps(header).encode()
    length = HEADER_SPACE - 8
    if len(text) > length:
        raise UsageError("The names of the splits are too long for a pack.")
    file.seek(0)
    file.write(length.to_bytes(8, "little") + text.ljust(length))


def _read_header(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length != HEADER_SPACE - 8:
            raise ValueError("not a pack")
        header = json.loads(file.read(length))
    end = HEADER_SPACE + header["classes"]["data_offsets"][1]
    if path.stat().st_size != end:
        raise ValueError("cut off")
    return header


def _common_classes(images_by_split: Mapping[str, Images]) -> tuple[str, ...] | None:
    found = {images.classes for images in images_by_split.values() if images.classes is not None}
    if len(found) > 1:
        raise UsageError("The splits have different classes: a pack has one list of classes for all.")
    return found.pop() if found else None
