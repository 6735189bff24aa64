"""The two ways unitsphere says no."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["UnitsphereError", "UsageError"]


class UnitsphereError(Exception):
    """Something failed on the way. The command prints the message and exits with status 1. of_all: of several
    processes all fail alike, so that one says it for all."""

    exit_status = 1
    of_all = False


class UsageError(UnitsphereError):
    """A mistake in what was asked: configuration, arguments, data that is not there. Exit status 2."""

    exit_status = 2
    of_all = True


def nearest(word: str, allowed: Iterable[str]) -> str:
    """' Did you mean x?' where one of the allowed words is near, else nothing."""
    close = difflib.get_close_matches(word, list(allowed), n=1)
    return f" Did you mean {close[0]}?" if close else ""


def check_word(field: str, word: str, allowed: Iterable[str]) -> None:
    allowed = list(allowed)
    if word not in allowed:
        raise UsageError(f"{field}: {word!r} is not known.{nearest(word, allowed)} Allowed: {', '.join(allowed)}.")
