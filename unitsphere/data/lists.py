"""Images that a list names: a list file of the user's, or one that came with a data set."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from unitsphere.common.errors import UsageError
from unitsphere.data.folder import is_image
from unitsphere.data.images import Images, evenly, images_in_files

LIST_SUFFIXES = {".txt", ".csv", ".tsv", ".lst"}
LOOKED_FOR = 2000  # listed files that are looked for when a data set is opened


def read_list(path: Path, name: str) -> Images:
    """A list file: one path a line, relative to the file, with a label after a tab or comma or without;
    empty lines and lines that begin with # are left out."""
    names: list[str] = []
    words: list[str] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        image, word = _split_line(line)
        if not (path.parent / image).is_file():
            raise UsageError(f"{path}, line {number}: no file {image!r} (paths are relative to {path.parent}).")
        names.append(image)
        words += [word] if word else []
        if len(words) not in (0, len(names)):
            raise UsageError(f"{path}, line {number}: either every line has a label or none has.")
    if not names:
        raise UsageError(f"{path} lists no images. Give one path a line, and a label after a tab if there is one.")
    if not words:
        return images_in_files(path.parent, name, names, None, None)
    numbers = all(word.isdecimal() for word in words)
    classes = tuple(sorted(set(words), key=int if numbers else str))
    label_of = {word: label for label, word in enumerate(classes)}
    return images_in_files(path.parent, name, names, [label_of[word] for word in words], classes)


def numbered_lines(path: Path) -> Iterator[tuple[str, int]]:
    """The lines "WORD NUMBER" of a file that came with a data set; what else there is on a line is left out."""
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        for number, line in enumerate(file, start=1):
            words = line.split()
            if not words:
                continue
            if len(words) < 2 or not words[1].lstrip("-").isdecimal():
                raise UsageError(f"{path}, line {number}: a name and a number are expected, not {line.strip()!r}.")
            yield words[0], int(words[1])


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no list of images: it is not UTF-8 text.") from None


def require(path: Path, data: str, layout: str) -> Path:
    """The file or folder, which must be there. data: what the user gave."""
    if not path.exists():
        raise UsageError(f"{data}: there is no {path}. {layout}")
    return path


def require_files(root: Path, names: Sequence[str], source: Path) -> None:
    """Looks for the listed files, or for some of them, spread over a long list; those that turn out later not to be
    there count as broken images. source: the file that lists them."""
    if not len(names):
        raise UsageError(f"{source} lists no images.")
    places = evenly(len(names), LOOKED_FOR)
    missing = [names[place] for place in places if not os.path.isfile(root / names[place])]
    if missing:
        raise UsageError(
            f"{source} lists images that are not there: {len(missing)} of {len(places)} looked for, such as "
            f"{root / missing[0]}. Unpack the archives again, or mend the list."
        )


def _split_line(line: str) -> tuple[str, str]:
    if "\t" in line:
        image, _, word = line.rpartition("\t")
    elif "," in line and not is_image(line):  # a comma inside a file name is no separator
        image, _, word = line.rpartition(",")
    else:
        image, word = line, ""
    return image.strip(), word.strip()
