"""Going through folders: hidden entries are left out, links are followed, but not round in circles."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

from unitsphere.common.errors import UsageError

#: The real folders in which the links stand that were followed on the way.
Trail = tuple[str, ...]


def walk(
    folder: str,
    wanted: Callable[[str], bool],
    watch: Callable[[str, str], None] = lambda path, relative: None,
    prefix: str = "",
    trail: Trail = (),
    known: Callable[[str], Iterable[str] | None] = lambda relative: None,
) -> Iterator[str]:
    """The paths of all files whose names are wanted, relative to the first folder (with `prefix` before them) and
    sorted, one folder in memory at a time. watch: told of each folder, its path and its relative one. known: gives
    the paths below a relative folder where these need not be looked for."""
    if (names := known(prefix)) is not None:
        yield from names
        return
    watch(folder, prefix)
    found: list[tuple[str, os.DirEntry[str] | None]] = []
    for entry in entries(folder):
        if is_folder(entry):
            found.append((entry.name + os.sep, entry))  # with the separator they sort as the whole paths below them do
        elif wanted(entry.name):
            found.append((entry.name, None))
    for name, below in sorted(found, key=lambda item: item[0]):
        if below is None:
            yield prefix + name
        elif (further := follow(below, trail)) is not None:
            yield from walk(below.path, wanted, watch, prefix + name, further, known)


def holds(folder: str | os.PathLike[str], wanted: Callable[[str], bool], *, deep: bool, trail: Trail = ()) -> bool:
    """Whether a file is wanted in the folder itself, or (deep) anywhere below it. Stops at the first."""
    deeper = []
    for entry in entries(folder):
        if not is_folder(entry):
            if wanted(entry.name):
                return True
        elif deep and (further := follow(entry, trail)) is not None:
            deeper.append((entry.path, further))
    return any(holds(path, wanted, deep=True, trail=further) for path, further in deeper)


def sub_folders(folder: str | os.PathLike[str]) -> list[str]:
    return sorted(entry.name for entry in entries(folder) if is_folder(entry))


def entries(folder: str | os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
    """scandir knows folders from files without a stat of each."""
    try:
        with os.scandir(folder) as found:
            yield from [entry for entry in found if not entry.name.startswith(".")]
    except OSError as problem:
        raise UsageError(f"The folder {folder} cannot be listed: {problem.strerror}.") from problem


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links that lead to each other
        return False


def follow(entry: os.DirEntry[str], trail: Trail) -> Trail | None:
    """The trail below this folder; None where it is a link to a folder that one is in already."""
    if not entry.is_symlink():
        return trail
    target = os.path.realpath(entry.path)
    trail = (*trail, os.path.realpath(os.path.dirname(entry.path)))
    return None if any(os.path.commonpath([target, place]) == target for place in trail) else trail
