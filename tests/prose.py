"""How the project's Markdown is written: at most 120 columns, and in some pages short sentences.

    python tests/prose.py        wraps all pages anew: paragraphs and items of lists, nothing else

Left as they are: tables, code, headings, quotes, HTML, and words that are longer than a line, such as addresses.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).parents[1]
COLUMNS = 120
ITEM = re.compile(r"^(\s*)([-*+]|\d+\.)\s+(\[[ x]\] )?")
APART = re.compile(r"^\s*(\||#|>|<|---)")  # lines that are not prose
STARTS = re.compile(r" (?=[|#<>]|---|```|(?:[-*+]|\d+\.) )")


def pages() -> list[Path]:
    """Return every Markdown file of the project."""
    folders = [PROJECT / name for name in ("docs", "benchmarks", "examples", "tests", "unitsphere", ".github")]
    return sorted([*PROJECT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))])


def blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield ("prose" or "other", lines): paragraphs and items of lists, and everything between them."""
    fenced, prose = False, []
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        item = ITEM.match(line)
        code = not prose and not item and line.startswith("    ")
        apart = fence or fenced or code or not line.strip() or APART.match(line)
        if prose and (apart or item):
            yield "prose", prose
            prose = []
        if apart:
            yield "other", [line]
        else:
            prose.append(line)
        fenced = fenced != fence
    if prose:
        yield "prose", prose


def wrapped(text: str) -> str:
    """Return a page with its paragraphs and items of lists wrapped."""
    lines: list[str] = []
    for kind, block in blocks(text):
        item = ITEM.match(block[0])
        if kind == "other":
            lines += block
            continue
        indent = re.match(r"\s*", block[0])[0]  # type: ignore[index]
        following = " " * (len(item[1]) + len(item[2]) + 1) if item else indent
        # A word that would begin an item or a table if a line began with it stays with the word before it.
        words = re.sub(STARTS, "\0", " ".join(line.strip() for line in block))
        wrap = textwrap.TextWrapper(COLUMNS, initial_indent=indent, subsequent_indent=following,
                                    break_long_words=False, break_on_hyphens=False)  # fmt: skip
        lines += [line.replace("\0", " ") for line in wrap.wrap(words)]
    return "\n".join(lines) + "\n"


def too_long(text: str) -> list[str]:
    """Return the lines of prose that are longer than they may be, and could be broken."""
    lines = [line for kind, block in blocks(text) if kind == "prose" for line in block]
    return [line for line in lines if len(line) > COLUMNS and " " in line.strip()[:COLUMNS]]


def sentences(text: str) -> list[str]:
    """Return the sentences of a page's prose, without marks, code and the targets of links."""
    found = []
    for kind, block in blocks(text):
        if kind != "prose":
            continue
        words = ITEM.sub("", " ".join(line.strip() for line in block))
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", words)
        words = re.sub(r"`[^`]*`", "CODE", words).replace("*", "")
        found += [part for part in re.split(r"(?<=[.!?:;])\)?\s+(?=[A-Z(\"'])", words) if part.strip()]
    return found


def count_words(sentence: str) -> int:
    return len(re.findall(r"[\w][\w'.,/%-]*", sentence))


if __name__ == "__main__":
    for page in pages():
        before, after = page.read_text(), wrapped(page.read_text())
        if before != after:
            page.write_text(after)
            print(f"wrapped {page.relative_to(PROJECT)}")
