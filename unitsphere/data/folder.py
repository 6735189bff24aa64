"""A folder of images: which there are, and what their folders say about them."""

from __future__ import annotations

import os
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from unitsphere.common.errors import UsageError
from unitsphere.data.images import Images, Splits, images_in_files
from unitsphere.data.index import Listing, remembered
from unitsphere.data.names import StoredNames
from unitsphere.data.shards import VAL
from unitsphere.data.walk import holds, sub_folders, walk
from unitsphere.images.decode import suffixes


def folder_splits(root: Path, name: str) -> Splits:
    """train/ and val/ where the folder has them, else the whole folder, undivided."""
    folders = set(sub_folders(root))
    val = next((folder for folder in VAL if folder in folders), None)
    if "train" in folders and val:
        # Both know the other's classes, so that a label means the same class in both.
        return {
            "train": lambda: scan(root / "train", name, known=_class_folders(list_images(root / val))),
            "val": lambda: scan(root / val, name, known=_class_folders(list_images(root / "train"))),
        }
    alone = folders == {"train"} and not holds(root, is_image, deep=False)
    return {"all": lambda: scan(root / "train" if alone else root, name)}


def scan(root: Path, name: str, known: Iterable[str] = ()) -> Images:
    """All images under `root`, sorted. Labelled by the first-level sub-folder when no image lies in `root`
    itself and at least two sub-folders hold images (or one, that is among the `known` classes)."""
    listing = list_images(root)
    if not len(listing.names):
        raise UsageError(
            f"No images in {root}. Files that end in {_examples()} (and others that Pillow reads) are taken."
        )
    own = set(_class_folders(listing))
    if not (len(own) >= 2 or (own and own <= set(known))):
        return images_in_files(root, name, listing.names, None, None)
    return _labelled_by_folder(root, name, listing, tuple(sorted(own | set(known))))


def scan_classes(root: Path, name: str, classes: Sequence[str]) -> Images:
    """The images of root/CLASS for each of `classes`: every one of these folders must be there."""
    present = set(sub_folders(root))
    missing = [folder for folder in classes if folder not in present]
    if missing:
        raise UsageError(
            f"{name}: {len(missing)} of {len(classes)} class folders are not in {root}: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. Each class is a folder of images."
        )
    listing = list_images(root, classes)
    for folder in classes:
        if folder not in listing.facts:
            raise UsageError(f"{name}: no images in the class folder {root / folder}.")
    return _labelled_by_folder(root, name, listing, tuple(classes))


def list_images(root: Path, only: Sequence[str] | None = None) -> Listing:
    """The images below `root` (or below these of its sub-folders), sorted. facts: first-level folder -> how many are
    in it, in the order of the listing; "" for those in `root` itself. Of a listing that is remembered, only the
    folders that have changed are listed anew."""
    folder = os.path.abspath(root)

    def make(before: Listing | None, same: list[bool]) -> Listing:
        watched: list[str] = []
        stamps = array("q")
        counts: Counter[str] = Counter()

        def watch(path: str, relative: str) -> None:
            watched.append(relative)
            stamps.append(os.stat(path).st_mtime_ns)

        def known(relative: str) -> list[str] | None:
            """The earlier paths below a folder, if nothing has changed in it or below it."""
            below = range(0) if before is None else _places_below(before.watched, relative)
            if before is None or not below or before.watched[below.start] != relative:
                return None
            if not all(same[below.start : below.stop]):
                return None
            watched.extend(before.watched[below.start : below.stop])
            stamps.extend(before.stamps[below.start : below.stop].tolist())
            images = _places_below(before.names, relative)
            return before.names[images.start : images.stop]

        def found() -> Iterator[str]:
            tops = [""] if only is None else sorted(top + os.sep for top in only)
            for top in tops:
                for name in walk(os.path.join(folder, top), is_image, watch, top, (), known):
                    counts[name.split(os.sep, 1)[0] if os.sep in name else ""] += 1
                    yield name

        listed = time.time_ns()
        names = StoredNames.of(found())
        return Listing(names, {}, dict(counts), StoredNames.of(watched), np.frombuffer(stamps, np.int64), listed)

    # Another Pillow may read other formats.
    return remembered(folder, {"only": only and sorted(only), "suffixes": sorted(suffixes())}, make)


def _places_below(paths: Sequence[str], relative: str) -> range:
    """Where the paths that begin with this folder stand among sorted ones."""
    return range(bisect_left(paths, relative), bisect_left(paths, f"{relative}\U0010ffff"))


def is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in suffixes()


def _class_folders(listing: Listing) -> tuple[str, ...]:
    """The sub-folders that hold images; none if images lie beside them."""
    return () if "" in listing.facts else tuple(listing.facts)


def _labelled_by_folder(root: Path, name: str, listing: Listing, classes: tuple[str, ...]) -> Images:
    """The images of a folder follow each other in the listing, so counts are enough to label them."""
    label_of = {folder: label for label, folder in enumerate(classes)}
    labels = np.repeat(np.array([label_of[folder] for folder in listing.facts], np.int64), list(listing.facts.values()))
    return images_in_files(root, name, listing.names, labels, classes)


def _examples() -> str:
    return ", ".join(suffix for suffix in (".jpg", ".png", ".webp", ".tif", ".npy") if suffix in suffixes())
