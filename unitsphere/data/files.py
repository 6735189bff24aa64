"""Other people's files, opened so that none of them can stop a job or take all memory."""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

MAX_BYTES = 2**30  # of one encoded image
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to read its bytes. Raise OSError at once where it is anything else, such as a FIFO."""
    try:
        # A FIFO that nobody writes to would wait here for ever without O_NONBLOCK.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as problem:
        if kind := kind_of(path):
            raise OSError(f"{kind}, not a file") from problem
        raise
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(number, "rb")
    os.close(number)
    raise OSError(f"{KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file")


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """What the path leads to, where that is there and is no regular file."""
    try:
        return KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    except OSError:
        return None


def read_regular(path: str | os.PathLike[str], limit: int = MAX_BYTES) -> bytes:
    """Return a file's bytes. Raise OSError where it is no regular file or has more than `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        check_size(size, limit)
        return file.read(size)


def check_size(size: int, limit: int = MAX_BYTES) -> None:
    """Raise OSError where an encoded image has more than `limit` bytes, as a sparse file easily does."""
    if size > limit:
        raise OSError(f"{size:,} bytes; encoded images of up to {limit:,} bytes are read")
