"""Files that are whole or not there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unitsphere.common.errors import UsageError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that is flushed to the disk and takes its name if the block succeeds, and
    vanishes if it fails."""
    # Not the process's number: two containers that share a folder may have the same.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)


def refuse_unwritable(field: str, path: Path, folder: Path) -> None:
    """Tell before hours of work, not after, that `path` cannot be written in `folder`, which may have to be made."""
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"{field}: {path} cannot be written: {place} is no folder that may be written to.")


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text)
