"""Images that a list names: a list file of the user's, or one that came with a data set."""

from __future__ import annotations

import io
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from unitsphere.common.errors import UsageError
from unitsphere.data.files import open_regular
from unitsphere.data.folder import is_image
from unitsphere.data.images import Images, evenly, images_in_files
from unitsphere.data.names import StoredNames

NUMBER = re.compile(r"-?\d{1,18}")
LIST_SUFFIXES = {".txt", ".csv", ".tsv", ".lst"}
LONGEST_LINE = 2**16
LOOKED_FOR = 2000  # listed files that are looked for when a data set is opened


def read_list(path: Path, name: str) -> Images:
    """A list file: one path a line, relative to the file, with a label after a tab or comma or without;
    empty lines and lines that begin with # are left out. Some of the files are looked for, spread over the list."""
    line_of, labels = array("q"), array("q")
    label_of: dict[str, int] = {}

    def listed() -> Iterator[str]:
        for number, line in enumerate(text_lines(path), start=1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            image, word = _split_line(line)
            if word:
                labels.append(label_of.setdefault(word, len(label_of)))
            line_of.append(number)
            if len(labels) not in (0, len(line_of)):
                raise UsageError(f"{path}, line {number}: either every line has a label or none has.")
            yield image

    names = StoredNames.of(listed())
    if not len(names):
        raise UsageError(f"{path} lists no images. Give one path a line, and a label after a tab if there is one.")
    for place in evenly(len(names), LOOKED_FOR).tolist():
        if not _is_there(path.parent / names[place]):
            where = f"{path}, line {line_of[place]}"
            raise UsageError(f"{where}: no file {names[place]!r} (paths are relative to {path.parent}).")
    if not labels:
        return images_in_files(path.parent, name, names, None, None)
    numbers = all(word.isdecimal() and len(word) < 20 for word in label_of)
    classes = tuple(sorted(label_of, key=int if numbers else str))
    place_of = np.empty(len(classes), np.int64)
    place_of[[label_of[word] for word in classes]] = np.arange(len(classes))
    return images_in_files(path.parent, name, names, place_of[np.frombuffer(labels, np.int64)], classes)


def _is_there(path: Path) -> bool:
    """Whether it can be counted as an image, if only as a broken one."""
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):  # a name that is too long, or has a zero byte
        return False


def numbered_lines(path: Path) -> Iterator[tuple[str, int]]:
    """The lines "WORD NUMBER" of a file that came with a data set; what else there is on a line is left out."""
    with open_regular(path) as raw, io.TextIOWrapper(raw, encoding="utf-8", errors="surrogateescape") as file:
        for number, line in enumerate(file, start=1):
            words = line.split()
            if not words:
                continue
            if len(words) < 2 or not NUMBER.fullmatch(words[1]):
                raise UsageError(f"{path}, line {number}: a name and a number are expected, not {line.strip()!r}.")
            yield words[0], int(words[1])


def read_text(path: Path) -> str:
    return "".join(text_lines(path))


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a list, one in memory at a time. Raises UsageError where it is no text."""
    try:
        with open_regular(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
            while line := text.readline(LONGEST_LINE):
                if len(line) == LONGEST_LINE:
                    raise UsageError(f"{path} is no list of images: a line is longer than {LONGEST_LINE:,} characters.")
                yield line
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no list of images: it is not UTF-8 text.") from None
    except OSError as problem:
        raise UsageError(f"{path} cannot be read as a list of images: {problem}.") from None


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
    missing = [names[place] for place in places if not _is_there(root / names[place])]
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
