"""A data set in one file that opens at once: a safetensors file whose largest tensor is all encoded images.

    8 bytes       length of the header
    header        JSON, padded with spaces to a fixed length, so that it can be filled in last
    encoded       uint8, the files one after another
    offsets       int64 (N + 1), image i is encoded[offsets[i]:offsets[i + 1]]
    labels        int64 (N), -1 without a label
    name_offsets  int64 (N + 1), name i is names[name_offsets[i]:name_offsets[i + 1]] in UTF-8
    names         uint8
    blocks        uint8, the BLAKE2b hash, of 16 bytes, of each MiB of encoded
    classes       uint8, a JSON list or null

The splits lie one after another; the header's metadata says where each begins and ends, and has the hashes of the
tensors but the first. Packs of format 1 have no hashes.
"""

from __future__ import annotations

import json
import os
from array import array
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
from unitsphere.data.packfile import DTYPES, FORMAT, HEADER_SPACE, BlockHashes, digest, is_pack, open_pack
from unitsphere.images.decode import BrokenImage
from unitsphere.images.encode import packable

__all__ = ["open_pack", "pack"]

CHUNK = 256  # images in memory at a time
Encode = Callable[[bytes | np.ndarray], bytes]


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
            before = 0
            for split, images in images_by_split.items():
                encode = partial(packable, size=size, quality=quality, max_pixels=images.max_pixels)
                for done in _write_images(file, images, before, contents, broken, encode):
                    if progress:
                        progress(before + done, total)
                before += len(images)
                contents.splits[split] = len(contents.labels)
            if not contents.labels:
                raise broken.error()
            _write_rest(file, contents, classes)
    except OSError as problem:
        raise UnitsphereError(f"The pack {path} could not be written: {problem}") from problem
    counts = {split: end - begin for split, (begin, end) in contents.ranges().items()}
    return Packed(path, counts, path.stat().st_size, broken.reasons())


@dataclass
class _Contents:
    """What the header and the small tensors say about the images written so far: 24 bytes and the name for each."""

    ends: array[int] = field(default_factory=lambda: array("q", [0]))
    names: bytearray = field(default_factory=bytearray)
    name_ends: array[int] = field(default_factory=lambda: array("q", [0]))
    labels: array[int] = field(default_factory=lambda: array("q"))
    splits: dict[str, int] = field(default_factory=dict)  # where each ends
    hashes: BlockHashes = field(default_factory=BlockHashes)

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
                contents.hashes.add(item)
                contents.ends.append(contents.ends[-1] + len(item))
                contents.names += images.names[index].encode(errors="surrogateescape")
                contents.name_ends.append(len(contents.names))
                contents.labels.append(-1 if images.labels is None else int(images.labels[index]))
            yield chunk.stop


def _write_rest(file: BinaryIO, contents: _Contents, classes: tuple[str, ...] | None) -> None:
    """The small tensors after the images, then the header before them."""
    gap = bytes(-contents.ends[-1] % 8)  # what follows are 8-byte numbers
    file.write(gap)
    contents.hashes.add(gap)
    numbers = DTYPES["I64"]
    tensors = {
        "offsets": np.asarray(contents.ends, numbers),
        "labels": np.asarray(contents.labels, numbers),
        "name_offsets": np.asarray(contents.name_ends, numbers),
        "names": np.frombuffer(contents.names, DTYPES["U8"]),
        "blocks": np.frombuffer(contents.hashes.finish(), DTYPES["U8"]),
        "classes": np.frombuffer(json.dumps(classes).encode(), DTYPES["U8"]),
    }
    splits = json.dumps(contents.ranges())
    hashes = {"splits": digest(splits.encode())} | {key: digest(tensor) for key, tensor in tensors.items()}
    place = contents.ends[-1] + len(gap)
    header: dict[str, Any] = {
        "__metadata__": {"format": FORMAT, "splits": splits, "hashes": json.dumps(hashes)},
        "encoded": {"dtype": "U8", "shape": [place], "data_offsets": [0, place]},
    }
    for key, tensor in tensors.items():
        dtype = next(name for name, kind in DTYPES.items() if kind == tensor.dtype)
        header[key] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.nbytes],
        }
        file.write(tensor.data)
        place += tensor.nbytes
    text = json.dumps(header).encode()
    length = HEADER_SPACE - 8
    if len(text) > length:
        raise UsageError("The names of the splits are too long for a pack.")
    file.seek(0)
    file.write(length.to_bytes(8, "little") + text.ljust(length))


def _common_classes(images_by_split: Mapping[str, Images]) -> tuple[str, ...] | None:
    found = {images.classes for images in images_by_split.values() if images.classes is not None}
    if len(found) > 1:
        raise UsageError("The splits have different classes: a pack has one list of classes for all.")
    return found.pop() if found else None
