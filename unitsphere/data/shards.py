"""Data sets in a few large files, each with many images: which files there are, and of which split they are."""

from __future__ import annotations

import os
import re
from pathlib import Path

from unitsphere.common.errors import UsageError
from unitsphere.data.walk import walk

MANY = 100_000  # files that a pattern may stand for
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
TRAIN, VAL = ("train", "training"), ("val", "valid", "validation", "test")


def find_shards(path: Path, suffix: str) -> list[Path]:
    """The files of a folder and of those below it that end in `suffix`, of a pattern like part-{000..012}.tar, or the
    one file; sorted. None where a folder has none."""
    if os.path.isdir(path):
        return sorted(path / file for file in walk(os.fspath(path), lambda name: name.endswith(suffix)))
    files = [Path(file) for file in expand(os.fspath(path))]
    missing = [file for file in files if not os.path.exists(file)]
    if missing:
        others = f" (and {len(missing) - 1} more of {path})" if missing[1:] else ""
        raise UsageError(f"There is no file {missing[0]}{others}.")
    return files


def expand(pattern: str) -> list[str]:
    """a{08..10}.tar -> a08.tar, a09.tar, a10.tar; each pair of braces in turn."""
    match = RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    if len(last) > 18 or int(last) - int(first) >= MANY:
        raise UsageError(f"{pattern}: {match[0]} stands for more than {MANY:,} files. Give their folder.")
    if int(first) > int(last):
        raise UsageError(f"{pattern}: {match[0]} counts down. Write {{{last}..{first}}}.")
    rest = expand(pattern[match.end() :])
    if (int(last) - int(first) + 1) * len(rest) > MANY:
        raise UsageError(f"{pattern} stands for more than {MANY:,} files. Give their folder.")
    numbers = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return [pattern[: match.start()] + number + end for number in numbers for end in rest]


def split_shards(files: list[Path], root: Path) -> dict[str, list[Path]]:
    """ "train" and "val" where the files' names (or folders below `root`) hold both words; else all, undivided. Of
    several that mean val, the first in `VAL` that is there; "test" may have no labels."""
    words = {file: set(re.split(r"[^a-z]+", os.path.relpath(file, root).lower())) for file in files}
    train = [file for file in files if words[file] & set(TRAIN)]
    for word in VAL:
        val = [file for file in files if word in words[file] and file not in train]
        if train and val:
            return {"train": train, "val": val}
    return {"all": train or files}
