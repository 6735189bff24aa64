"""Rows of small pictures on one sheet: views of an image, neighbours of a query."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from unicodedata import combining, normalize

import numpy as np
from PIL import Image, ImageDraw, ImageFont

__all__ = ["contact_sheet"]

PAPER = (250, 250, 248)
MOUNT = (236, 236, 232)  # behind a picture that does not fill its tile
INK = (60, 60, 64)
MARGIN, GAP = 12, 4
APART = 10  # beside the gap, between the first picture of a row and those that are compared with it
CAPTION_WIDTH = 132
FONT_SIZE = 12
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def contact_sheet(
    rows: Sequence[Sequence[np.ndarray]], captions: Sequence[str] | None = None, tile: int = 96
) -> Image.Image:
    """A grid of `tile` x `tile` pixels a picture, the first of each row apart, with one caption per row at the left.

    rows: (H, W, C) uint8 arrays of any sizes, C = 1 (grey), 3 (RGB) or 4 (RGBA). Rows may differ in length.
    """
    left = MARGIN + (CAPTION_WIDTH + MARGIN if captions else 0)
    pitch = tile + GAP
    most = max((len(row) for row in rows), default=0)
    width, height = (start + max(n * pitch - GAP, 0) + MARGIN for start, n in ((left, most), (MARGIN, len(rows))))
    width += APART if most > 1 else 0
    sheet = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(sheet)
    for r, row in enumerate(rows):
        top = MARGIN + r * pitch
        if captions:
            _write(pen, captions[r], (MARGIN, top, CAPTION_WIDTH, tile))
        for c, array in enumerate(row):
            sheet.paste(_mount(array, tile), (left + c * pitch + (APART if c else 0), top))
    return sheet


def _mount(array: np.ndarray, tile: int) -> Image.Image:
    """The picture as large as the tile allows, centred, its proportions kept."""
    picture = Image.fromarray(array.squeeze(2) if array.shape[2] == 1 else array).convert("RGBA")
    scale = tile / max(picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    mounted = Image.new("RGB", (tile, tile), MOUNT)
    mounted.paste(picture, ((tile - width) // 2, (tile - height) // 2), mask=picture)
    return mounted


def _write(pen: ImageDraw.ImageDraw, text: str, box: tuple[int, int, int, int]) -> None:
    """Text in a box (left, top, width, height): wrapped, cut where it does not fit, centred in height."""
    left, top, width, height = box
    text, font = _legible(text)
    line_height = FONT_SIZE + 4
    lines = _wrap(text, width, font)
    room = max(1, height // line_height)
    if len(lines) > room:
        last = lines[room - 1]
        while last and font.getlength(last + "...") > width:
            last = last[:-1]
        lines = [*lines[: room - 1], last + "..."]
    y = top + (height - line_height * len(lines)) // 2
    for line in lines:
        pen.text((left, y), line, fill=INK, font=font)
        y += line_height


def _legible(text: str) -> tuple[str, Font]:
    """The text and the first font that has all its letters; where none has, the last, and the letters that it has."""
    text = normalize("NFC", text)
    for font in _fonts():
        if all(_has(font, letter) for letter in set(text)):
            return text, font
    return "".join(_nearest(font, letter) for letter in text), font


def _fonts() -> Iterator[Font]:
    """Pillow's own, which has hardly more than ASCII, and one with most alphabets where matplotlib brings it."""
    yield ImageFont.load_default(FONT_SIZE)
    matplotlib = find_spec("matplotlib")
    if matplotlib and matplotlib.origin:
        file = Path(matplotlib.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
        if file.is_file():
            yield ImageFont.truetype(str(file), FONT_SIZE)


def _has(font: Font, letter: str) -> bool:
    """A letter that the font lacks looks like one that no font has."""
    return letter.isspace() or bytes(font.getmask(letter)) != bytes(font.getmask("\U0010ffff"))


def _nearest(font: Font, letter: str) -> str:
    """The letter, or it without its accents, or a question mark."""
    if _has(font, letter):
        return letter
    return "".join(part for part in normalize("NFKD", letter) if not combining(part) and _has(font, part)) or "?"


def _wrap(text: str, width: int, font: Font) -> list[str]:
    """Lines no wider than `width`, broken at spaces, and inside a word (a file name) that is too long."""
    lines: list[str] = []
    for paragraph in text.splitlines():
        line = ""
        for word in paragraph.split():
            joined = f"{line} {word}" if line else word
            if font.getlength(joined) <= width:
                line = joined
                continue
            lines += [line] if line else []
            while font.getlength(word) > width:
                fits = next(n for n in range(1, len(word)) if font.getlength(word[: n + 1]) > width)
                lines.append(word[:fits])
                word = word[fits:]
            line = word
        lines.append(line)
    return lines
