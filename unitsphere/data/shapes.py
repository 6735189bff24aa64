"""A data set that is drawn, not fetched: figures with random colour, texture, place, scale, turn and clutter.

Only the form tells the class. A picture shows four figures of one form, so the form is what any two crops of it
have in common. The rest is drawn so that it does not give a picture away, or contrastive learning would be content
with it: colours run through all hues within a picture, and the grain of the texture is alike in all pictures.

A picture is a function of (seed, split, index) alone, and the same at any size but for its resolution.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch

from unitsphere.common.errors import UsageError
from unitsphere.common.randomness import generator
from unitsphere.data.forms import FORMS, Distance, turned
from unitsphere.data.images import Images, Splits
from unitsphere.data.names import Names

CLASSES = tuple(FORMS)
DEFAULT_COUNT, DEFAULT_SIZE = 5000, 32
MOST, LARGEST = 100_000_000, 4096

# Lengths are in halves of the picture, lightness and colour in [0, 1].
SCALE = (0.4, 0.55)
PLACE = 0.12  # how far a figure strays from the middle of its quarter
GROUND = (0.45, 0.55)  # lightness
CONTRAST = (0.25, 0.45)  # of the figures against the ground, all lighter or all darker
CHROMA = 0.2
NOISE = (0.02, 0.08)
GRAIN = 9  # knots of the noise across the picture
SCRAPS = (2, 5)

QUARTERS = np.array([[-0.5, -0.5], [-0.5, 0.5], [0.5, -0.5], [0.5, 0.5]], np.float32)
# Red, green and blue a third of a turn apart, as planes of a picture.
HUES = np.float32(2 * np.pi / 3) * np.arange(3, dtype=np.float32)[:, None, None]


def shapes_splits(argument: str | None = None, seed: int = 0) -> Splits:
    """argument: "COUNT" or "COUNTxSIZE", COUNT the number of training images."""
    match = re.fullmatch(r"(\d{1,18})(?:x(\d{1,18}))?", argument or f"{DEFAULT_COUNT}x{DEFAULT_SIZE}")
    if not match:
        raise UsageError(f"shapes={argument}: give shapes, shapes=COUNT or shapes=COUNTxSIZE, as in shapes=5000x32.")
    count, size = int(match[1]), int(match[2] or DEFAULT_SIZE)
    if count < 2 or size < 8:
        raise UsageError(f"shapes={argument}: at least 2 images of at least 8 pixels are needed.")
    if count > MOST or size > LARGEST:
        raise UsageError(f"shapes={argument}: up to {MOST:,} images of up to {LARGEST:,} pixels a side can be drawn.")
    return {
        "train": partial(shapes, count, size, split="train", seed=seed),
        "val": partial(shapes, max(500, count // 5), size, split="val", seed=seed),
    }


def shapes(count: int, size: int = DEFAULT_SIZE, *, split: str = "train", seed: int = 0) -> Images:
    """`count` images of size x size, as many of each class; drawn when read."""
    return Images(
        name="shapes",
        names=Names(count, lambda index: f"{split}/{index}"),
        labels=np.arange(count, dtype=np.int64) % len(CLASSES),
        classes=CLASSES,
        read=lambda index: draw(index % len(CLASSES), size, generator(seed, f"shapes/{split}", index)),
    )


def draw(label: int, size: int, random: torch.Generator) -> np.ndarray:
    """One picture, (size, size, 3) uint8."""
    draws = Draws(random)
    raster = _raster(size)
    everywhere = slice(0, size)
    ground, side = draws.one(*GROUND), np.sign(draws.one(-1, 1))
    picture = _paint(raster, everywhere, everywhere, ground, draws)
    for _ in range(int(draws.one(SCRAPS[0], SCRAPS[1] + 1))):
        scrap = partial(_bar, half_length=draws.one(0.3, 0.9), half_width=draws.one(0.15, 0.45))
        _lay(picture, raster, scrap, draws.several(-1, 1, 2), 0.2, draws.one(0, 1), draws)
    for middle in QUARTERS:
        centre = middle + draws.several(-PLACE, PLACE, 2)
        light = ground + side * draws.one(*CONTRAST)
        _lay(picture, raster, FORMS[CLASSES[label]], centre, draws.one(*SCALE), light, draws)
    picture = np.rint(np.minimum(np.maximum(picture, 0), 1) * 255).astype(np.uint8)
    return np.ascontiguousarray(picture.transpose(1, 2, 0))


class Draws:
    """Uniform numbers, drawn at once and handed out one after another."""

    def __init__(self, random: torch.Generator) -> None:
        self._numbers = torch.rand(1000, generator=random).numpy()
        self._used = 0

    def several(self, low: float, high: float, *shape: int) -> np.ndarray:
        first, self._used = self._used, self._used + math.prod(shape)
        return low + (high - low) * self._numbers[first : self._used].reshape(shape)

    def one(self, low: float, high: float) -> float:
        self._used += 1
        return float(low + (high - low) * self._numbers[self._used - 1])


class Raster(NamedTuple):
    """What all pictures of a size share. steps: (size,) the pixels' centres, also as a list that is quick to search.
    knots: (size, GRAIN) the weights of linear interpolation between the knots of the noise."""

    steps: np.ndarray
    listed: list[float]
    knots: np.ndarray


@cache
def _raster(size: int) -> Raster:
    steps = ((np.arange(size, dtype=np.float32) + 0.5) / size) * 2 - 1
    place = (steps[:, None] + 1) * ((GRAIN - 1) / 2)
    knots = np.maximum(0, 1 - np.abs(place - np.arange(GRAIN, dtype=np.float32)))
    return Raster(steps, steps.tolist(), knots)


def _lay(
    picture: np.ndarray,
    raster: Raster,
    form: Distance,
    centre: np.ndarray,
    scale: float,
    light: float,
    draws: Draws,
) -> None:
    """Draws a form into the picture, turned at random, with an edge one pixel wide."""
    steps, listed, _ = raster
    pixel = listed[1] - listed[0]
    columns, rows = (
        slice(bisect_left(listed, middle - (scale + pixel)), bisect_left(listed, middle + (scale + pixel)))
        for middle in centre.tolist()
    )
    x, y = turned(steps[columns] - centre[0], steps[rows, None] - centre[1], np.pi * draws.one(-1, 1))
    cover = np.minimum(np.maximum(0.5 - form(x / scale, y / scale) * (scale / pixel), 0), 1)
    below = picture[:, rows, columns]
    below += cover * (_paint(raster, rows, columns, light, draws) - below)


def _paint(raster: Raster, rows: slice, columns: slice, light: float, draws: Draws) -> np.ndarray:
    """(3, rows, columns): about this lightness, all hues in a random direction, and soft noise."""
    steps, _, weights = raster
    angle = np.pi * draws.one(-1, 1)
    along = steps[columns] * math.cos(angle) + steps[rows, None] * math.sin(angle)
    hue = np.pi * (along + draws.one(-1, 1))
    knots = draws.one(*NOISE) * draws.several(-1, 1, GRAIN, GRAIN)
    noise = light + weights[rows] @ knots @ weights[columns].T
    colour = hue + HUES
    np.cos(colour, out=colour)
    colour *= CHROMA
    return noise + colour


def _bar(x: np.ndarray, y: np.ndarray, half_length: float, half_width: float) -> np.ndarray:
    return np.maximum(np.abs(x) - half_length, np.abs(y) - half_width)
