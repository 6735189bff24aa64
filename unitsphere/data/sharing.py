"""Decoded images that are shared by many runs on one data set, in place of being decoded for each of them again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from unitsphere.data.images import Images, evenly
from unitsphere.data.loader import Loader
from unitsphere.data.names import joined
from unitsphere.images.decode import BrokenImage

IRRELEVANT = {"workers", "processes"}  # to what is decoded
PROBES = 5  # images whose contents tell data of one name from others

_kept: dict[Any, Loader] | None = None  # None outside of keep_decoded


@contextmanager
def keep_decoded() -> Iterator[None]:
    """Within, images that `loader` made resident stay so, for whoever asks for the same ones again: until the
    outermost of such blocks ends."""
    global _kept
    before = _kept
    _kept = {} if before is None else before
    try:
        yield
    finally:
        _kept = before


def loader(images: Images, *, progress: Any = None, **settings: Any) -> Loader:
    """A Loader, or within `keep_decoded` the one that was made of the same images with the same settings."""
    if _kept is None:
        return Loader(images, progress=progress, **settings)
    how = {name: str(value) for name, value in settings.items() if name not in IRRELEVANT and value is not None}
    key = (fingerprint(images), images.max_pixels, *sorted(how.items()))
    if key not in _kept:
        made = Loader(images, progress=progress, **settings)
        if not made.resident:
            return made
        _kept[key] = made
    return _kept[key]


def fingerprint(images: Images) -> str:
    """Of the names, the labels, and the contents of a few."""
    found = hashlib.blake2b(images.name.encode(errors="surrogateescape"), digest_size=16)
    for part in joined(images.names):
        found.update(part)
    if images.labels is not None:
        found.update(np.ascontiguousarray(images.labels).tobytes())
    for index in evenly(len(images), PROBES).tolist():
        try:
            item = images.read(index)
        except (BrokenImage, OSError) as problem:
            item = str(problem).encode()
        found.update(item if isinstance(item, bytes) else np.ascontiguousarray(item).tobytes())
    return found.hexdigest()
