"""Files that are whole or not there."""

from __future__ import annotations

import os
import platform
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

from unitsphere.common.errors import UsageError

LEFTOVER = ".*.tmp"  # of a process that was killed while writing
OWNED = re.compile(r"\..*\.([0-9a-f]{8})-(\d+)-[0-9a-f]{8}\.tmp", re.DOTALL)  # machine, process
A_DAY = 24 * 3600.0  # nothing is written for longer
cleared: set[tuple[int, Path]] = set()  # folders, by processes: forks know what their parent has cleared


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that is flushed to the disk and takes its name if the block succeeds, and
    vanishes if it fails. Its permissions follow the umask, whatever the block makes of them."""
    if (os.getpid(), path.parent) not in cleared:
        cleared.add((os.getpid(), path.parent))
        clear_leftovers(path.parent)
    # The process's number alone would not do: two containers that share a folder may have the same.
    temporary = path.with_name(f".{path.name}.{this_machine()}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        allowed = temporary.stat().st_mode
        yield temporary
        temporary.chmod(allowed)  # safetensors would let nobody else read it
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        with suppress(FileNotFoundError, NotADirectoryError):
            temporary.unlink()


def clear_leftovers(folder: Path, alone: bool = False) -> None:
    """Remove the temporary files of processes that are gone.

    Of a process on another machine that cannot be known; its files are removed after a day. alone: nobody else writes
    in this folder, so they are removed at once.
    """
    with suppress(OSError):
        for leftover in folder.glob(LEFTOVER):
            with suppress(OSError):
                owner = OWNED.fullmatch(leftover.name)
                if owner is not None and owner[1] == this_machine():
                    gone = not is_alive(int(owner[2]))
                else:
                    gone = alone or time.time() - leftover.stat().st_mtime > A_DAY
                if gone and leftover.is_file():
                    leftover.unlink()


@cache
def this_machine() -> str:
    """Eight digits for the machine and, of several containers on it, the one whose process numbers these are."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    return blake2b(f"{platform.node()} {numbers}".encode(), digest_size=4).hexdigest()


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it is somebody else's, or this system cannot tell
        return True
    return True


def refuse_unwritable(field: str, path: Path, folder: Path) -> None:
    """Tell before hours of work, not after, that `path` cannot be written in `folder`, which may have to be made."""
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"{field}: {path} cannot be written: {place} is no folder that may be written to.")


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text)


def set_damaged_aside(path: Path) -> Path:
    """Keep a damaged file under another name, so that a whole one can take its own. Returns where it is now."""
    numbers = iter(range(1, 10**6))
    aside = path.with_name(f"{path.name}.damaged")
    while aside.exists():
        aside = path.with_name(f"{path.name}.damaged-{next(numbers)}")
    return path.rename(aside)
