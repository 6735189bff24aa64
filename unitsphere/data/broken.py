"""Broken images are counted and named, and too many of them are an error."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.common.text import printable

FEW = 3


class BrokenImages:
    """The broken ones among `total` images, of which at most `share` may be, and a few in any case: a share of little
    is none. A share of 0 allows none. For use from several threads."""

    def __init__(self, data: str, total: int, share: float) -> None:
        if not 0 <= share <= 1:
            raise UsageError(f"max_broken: given {share}; a share from 0 to 1 is allowed, e.g. 0.01.")
        self.data, self.total = data, total
        # 0.29 * 100 is 28.999...
        self.allowed = max(FEW, math.ceil(share * total - 1e-9)) if share > 0 else 0
        self._found: dict[int, tuple[str, str]] = {}
        self._lock = threading.Lock()

    def __contains__(self, index: int) -> bool:
        return index in self._found

    def note(self, index: int, name: str, reason: str) -> None:
        """Image `index` is broken. Raises UnitsphereError if that makes too many."""
        with self._lock:
            self._found[index] = (name, reason)
        if len(self._found) > self.allowed:
            raise self.error()

    def reasons(self) -> dict[str, str]:
        """Name -> reason, in the order of the images."""
        with self._lock:
            return dict(self._found[index] for index in sorted(self._found))

    def error(self) -> UnitsphereError:
        count = len(self._found)
        first = "\n".join(f"  {printable(f'{name}: {reason}')}" for name, reason in list(self.reasons().items())[:5])
        if count == self.total:
            return UnitsphereError(f"{self.data}: no image of {count} could be read:\n{first}\nMend or replace them.")
        return UnitsphereError(
            f"{self.data}: {count} broken {'image' if count == 1 else 'images'} found, where at most {self.allowed} of "
            f"{self.total} may be:\n{first}\n"
            "Mend or remove them, or allow a larger share with --max-broken (max_broken)."
        )


def describe(broken: Mapping[str, str]) -> list[str]:
    """Lines that name the broken images, name -> reason, and why; none where there are none."""
    if not broken:
        return []
    few = [f"  {printable(f'{name}: {reason}')}" for name, reason in list(broken.items())[:10]]
    more = [f"  and {len(broken) - 10} more"] if len(broken) > 10 else []
    number = "1 image" if len(broken) == 1 else f"{len(broken)} images"
    return [f"{number} could not be read:", *few, *more]
