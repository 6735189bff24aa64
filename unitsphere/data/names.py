"""The names of very many images, without a Python string for each of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

TOGETHER = 4096  # names that are copied at once


class Names(Sequence[str]):
    """Names that are made when asked for: `name_of` gives the name of image i."""

    def __init__(self, count: int, name_of: Callable[[int], str]) -> None:
        self.length, self.name_of = count, name_of

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self.name_of(i) for i in range(*index.indices(self.length))]
        return self.name_of(range(self.length)[index])

    def __iter__(self) -> Iterator[str]:
        return map(self.name_of, range(self.length))

    def __eq__(self, other: object) -> bool:
        """As lists are equal."""
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


class StoredNames(Names):
    """Names in one piece of memory. text: uint8; name i is text[offsets[i]:offsets[i + 1]], offsets (N + 1,) int64."""

    def __init__(self, text: np.ndarray, offsets: np.ndarray) -> None:
        super().__init__(len(offsets) - 1, self._decode)
        self.text, self.offsets = text, offsets

    @classmethod
    def of(cls, names: Iterable[str]) -> StoredNames:
        """Takes the names one by one, so that a generator of millions needs no more than their text."""
        text, offsets = bytearray(), array("q", [0])
        for name in names:
            text += name.encode(errors="surrogateescape")  # a file's name may hold bytes that are no text
            offsets.append(len(text))
        return cls(np.frombuffer(text, np.uint8), np.frombuffer(offsets, np.int64))

    def _decode(self, index: int) -> str:
        return self.text[self.offsets[index] : self.offsets[index + 1]].tobytes().decode(errors="surrogateescape")


class PickedNames(Names):
    """names[indices[0]], names[indices[1]], ...; indices (n,) int64."""

    def __init__(self, names: Sequence[str], indices: np.ndarray) -> None:
        super().__init__(len(indices), lambda n: names[indices[n]])
        self.names, self.indices = names, indices


def picked(names: Sequence[str], indices: np.ndarray) -> Names:
    """Some of the names, and of picked ones some of the original."""
    if isinstance(names, PickedNames):
        return PickedNames(names.names, names.indices[indices])
    return PickedNames(names, indices)


def joined(names: Sequence[str]) -> Iterator[bytes]:
    """The bytes of all names with a line break between two, a part at a time. Stored names are copied without making
    a string of each."""
    for start in range(0, len(names), TOGETHER):
        stop = min(start + TOGETHER, len(names))
        if isinstance(names, StoredNames):
            part = _copied(names, np.arange(start, stop))
        elif isinstance(names, PickedNames) and isinstance(names.names, StoredNames):
            part = _copied(names.names, names.indices[start:stop])
        else:
            part = "".join(f"{name}\n" for name in names[start:stop]).encode(errors="surrogateescape")
        yield part if stop < len(names) else part[:-1]


def _copied(names: StoredNames, indices: np.ndarray) -> bytes:
    """The names of these indices, a line break behind each."""
    begins = names.offsets[indices]
    lengths = names.offsets[indices + 1] - begins + 1
    ends = np.cumsum(lengths)
    text = np.append(names.text[begins.min() : names.offsets[indices + 1].max()], np.uint8(0))
    part = text[np.arange(ends[-1]) + np.repeat(begins - begins.min() - (ends - lengths), lengths)]
    part[ends - 1] = ord("\n")
    return part.tobytes()
