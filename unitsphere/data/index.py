"""Listings of very many images, remembered from one process to the next.

To list a million files takes minutes on a network disk. Their names, with what else was found, are therefore kept in a
file of the user's cache folder. They are taken from there as long as no folder (or shard) on which they rest has been
modified, which one `stat` of each can tell.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from unitsphere.common.files import replacing
from unitsphere.data.names import StoredNames, joined

FORMAT = "unitsphere-index-1"
MANY = 20_000  # fewer images are listed before anyone notices
DAMAGED = (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError)
SETTLED = 2 * 10**9  # ns; a folder modified this shortly before it was listed may change again within one tick


@dataclass(frozen=True)
class Listing:
    """N images as they were found below some folder.

    names: of the images. columns: what else is known of each, by name, (N,) each. facts: of all, as JSON holds them.
    watched: the folders or files on which this rests, relative to the root, and stamps, (W,) int64, when each was
    last modified, looked up before it was read. listed: when listing began. Times are in ns since 1970.
    """

    names: StoredNames
    columns: dict[str, np.ndarray]
    facts: dict[str, Any]
    watched: StoredNames
    stamps: np.ndarray
    listed: int


def remembered(root: str, about: dict[str, Any], make: Callable[[Listing | None, list[bool]], Listing]) -> Listing:
    """What `make` gives, or gave when it was last asked for and nothing has changed since.

    root: the absolute folder. about: everything else on which the listing depends, as JSON holds it. make: is given an
    earlier listing, or None, and whether each of the folders or files that it rests on is as it was.
    """
    key = json.dumps({"root": root, **about}, sort_keys=True)
    path = index_folder() / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.safetensors"
    listing = _load(path, key)
    same = _unchanged(listing, root) if listing is not None else []
    if listing is not None and all(same):
        return listing
    listing = make(listing, same)
    if len(listing.names) >= MANY:
        with suppress(OSError):  # a cache that cannot be written only costs time
            _save(listing, path, key)
    return listing


def remembered_array(what: str, names: Sequence[str], make: Callable[[], np.ndarray]) -> np.ndarray:
    """What make() gives, (N,) int64, or gave for the same names: those of many images are kept."""
    if len(names) < MANY:
        return make()
    found = hashlib.blake2b(what.encode(), digest_size=16)
    for part in joined(names):
        found.update(part)
    path = index_folder() / f"{found.hexdigest()}.array.safetensors"
    try:
        with safe_open(path, "np") as file:
            array = file.get_tensor("array")
            if (file.metadata() or {}).get("digest") == _digest({"array": array}, what):
                return array
    except DAMAGED:
        pass
    array = make()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            save_file({"array": array}, temporary, {"digest": _digest({"array": array}, what)})
    return array


def cache_folder() -> Path:
    """Where unitsphere keeps what it can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "unitsphere")


def index_folder() -> Path:
    return cache_folder() / "indexes"


def indexes_of(root: Path) -> dict[Path, int]:
    """The remembered listings of this folder and of those below it: file -> images."""
    found = {}
    top = os.path.abspath(root)
    for path in sorted(index_folder().glob("*.safetensors")):
        with suppress(*DAMAGED), safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") == FORMAT:
                at = json.loads(metadata["about"])["root"]
                if os.path.commonpath([top, at]) == top:
                    found[path] = file.get_slice("names.offsets").get_shape()[0] - 1
    return found


def _unchanged(listing: Listing, root: str) -> list[bool]:
    """Whether each folder or file that is watched has not been modified since."""
    same = []
    for name, stamp in zip(listing.watched, listing.stamps.tolist(), strict=True):
        try:
            now = os.stat(os.path.join(root, name)).st_mtime_ns
        except OSError:
            now = None
        same.append(now == stamp and abs(listing.listed - stamp) >= SETTLED)
    return same


def _save(listing: Listing, path: Path, key: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        "names.text": listing.names.text,
        "names.offsets": listing.names.offsets,
        "watched.text": listing.watched.text,
        "watched.offsets": listing.watched.offsets,
        "stamps": listing.stamps,
        **{f"column.{name}": column for name, column in listing.columns.items()},
    }
    facts = {"format": FORMAT, "about": key, "facts": json.dumps(listing.facts), "listed": str(listing.listed)}
    facts["digest"] = _digest(tensors, facts["facts"])
    with replacing(path) as temporary:
        save_file(tensors, temporary, facts)


def _load(path: Path, key: str) -> Listing | None:
    """None where there is none, or something else, or a damaged one: it is made again."""
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT or metadata.get("about") != key:
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("digest") != _digest(tensors, metadata["facts"]):
            return None
        return Listing(
            names=StoredNames(tensors["names.text"], tensors["names.offsets"]),
            columns={name.removeprefix("column."): tensors[name] for name in tensors if name.startswith("column.")},
            facts=json.loads(metadata["facts"]),
            watched=StoredNames(tensors["watched.text"], tensors["watched.offsets"]),
            stamps=tensors["stamps"],
            listed=int(metadata["listed"]),
        )
    except DAMAGED:
        return None


def _digest(tensors: dict[str, np.ndarray], facts: str) -> str:
    found = hashlib.blake2b(facts.encode(), digest_size=16)
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(np.ascontiguousarray(tensors[name]).data)
    return found.hexdigest()
