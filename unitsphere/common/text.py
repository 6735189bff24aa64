"""Names from data as text that a terminal can show."""

from __future__ import annotations


def printable(name: str) -> str:
    """The name as text: a file's name may hold bytes that are none."""
    return name.encode(errors="backslashreplace").decode()
