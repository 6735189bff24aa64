"""A data set that is drawn, not fetched: forms with random colour, texture, place, scale, turn and clutter.

Only the form tells the class. A picture is a function of (seed, split, index) alone, and the same at any size
but for its resolution.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from antipode.data.forms import FORMS
from antipode.data.images import Images, Splits
from antipode.errors import UsageError
from antipode.randomness import generator

CLASSES = tuple(FORMS)
DEFAULT_COUNT, DEFAULT_SIZE = 5000, 32
COPIES = (3, 5)
SCALE = (0.36, 0.5)  # of a form, in halves of the picture
PLACE = 0.15  # how far a form strays from the middle of its quarter
GROUND = (0.4, 0.6)  # lightness
CONTRAST = (0.25, 0.45)  # of a form against the ground, lighter or darker
CHROMA = 0.05
TEXTURE = (0.0, 0.05)
CLUTTER = (2, 6)
BOTH = True
SPACING = 0.5
Uniform = Callable[[float, float, int], np.ndarray]  # (low, high, count)


def shapes_splits(argument: str | None = None, seed: int = 0) -> Splits:
    """argument: "COUNT" or "COUNTxSIZE", COUNT the number of training images."""
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", argument or f"{DEFAULT_COUNT}x{DEFAULT_SIZE}")
    if not match:
        raise UsageError(f"shapes={argument}: give shapes, shapes=COUNT or shapes=COUNTxSIZE, as in shapes=5000x32.")
    count, size = int(match[1]), int(match[2] or DEFAULT_SIZE)
    if count < 2 or size < 8:
        raise UsageError(f"shapes={argument}: at least 2 images of at least 8 pixels are needed.")
    return {
        "train": partial(shapes, count, size, split="train", seed=seed),
        "val": partial(shapes, max(500, count // 5), size, split="val", seed=seed),
    }


def shapes(count: int, size: int = DEFAULT_SIZE, *, split: str = "train", seed: int = 0) -> Images:
    """`count` images of size x size, as many of each class; drawn when read."""
    return Images(
        name="shapes",
        names=[f"{split}/{index}" for index in range(count)],
        labels=np.arange(count, dtype=np.int64) % len(CLASSES),
        classes=CLASSES,
        read=lambda index: draw(index % len(CLASSES), size, generator(seed, f"shapes/{split}", index)),
    )


def draw(label: int, size: int, random: torch.Generator) -> np.ndarray:
    """One picture, (size, size, 3) uint8."""

    def uniform(low: float, high: float, count: int) -> np.ndarray:
        return (low + (high - low) * torch.rand(count, generator=random, dtype=torch.float32)).numpy()

    steps = ((np.arange(size, dtype=np.float32) + 0.5) / size) * 2 - 1
    x, y = steps[None, :], -steps[:, None]  # [-1, 1], y upwards
    pixel = 2 / size

    ground = uniform(*GROUND, 1)
    picture = _texture(x, y, ground, CHROMA, TEXTURE, uniform)
    for _ in range(int(uniform(*CLUTTER, 1)[0])):
        cx, cy, turn, half, thin = uniform(0, 1, 5)
        along, across = _turned(x - 2 * cx + 1, y - 2 * cy + 1, np.pi * turn)
        distance = np.maximum(np.abs(along) - 0.06 - 0.12 * half, np.abs(across) - 0.03 - 0.06 * thin)
        picture = _over(picture, uniform(0, 1, 1) + uniform(-CHROMA, CHROMA, 3), distance, pixel)

    form = FORMS[CLASSES[label]]
    pside = uniform(0, 1, 1)[0]
    for quarter in np.argsort(uniform(0, 1, 4))[: int(uniform(*COPIES, 1)[0])]:
        scale = uniform(*SCALE, 1)[0]
        turn, mirror, side = uniform(0, 1, 3)
        cx, cy = SPACING * (2 * np.array([quarter % 2, quarter // 2]) - 1) + uniform(-PLACE, PLACE, 2)
        fx, fy = _turned(x - cx, y - cy, 2 * np.pi * turn)
        distance = scale * form(fx / scale * (1 if mirror < 0.5 else -1), fy / scale)
        light = ground + uniform(*CONTRAST, 1) * (1 if (side if BOTH else pside) < 0.5 else -1)
        picture = _over(picture, _texture(x, y, light, CHROMA, TEXTURE, uniform), distance, pixel)
    return np.rint(picture.clip(0, 1) * 255).astype(np.uint8)


def _texture(
    x: np.ndarray, y: np.ndarray, light: np.ndarray, chroma: float, strengths: tuple[float, float], uniform: Uniform
) -> np.ndarray:
    """(H, W, 3): a colour of about this lightness, varied by a slope, stripes or soft noise."""
    kind = int(uniform(0, 3, 1)[0])
    strength = uniform(*strengths, 1)[0]
    if kind == 0:
        along, _ = _turned(x, y, 2 * np.pi * uniform(0, 1, 1)[0])
        pattern = along
    elif kind == 1:
        along, _ = _turned(x, y, 2 * np.pi * uniform(0, 1, 1)[0])
        pattern = np.sin(uniform(6, 16, 1)[0] * along + 2 * np.pi * uniform(0, 1, 1)[0])
    else:
        pattern = (
            sum(
                np.sin(fx * x + fy * y + 2 * np.pi * phase)
                for fx, fy, phase in zip(uniform(-12, 12, 4), uniform(-12, 12, 4), uniform(0, 1, 4), strict=True)
            )
            / 2
        )
    colour = light + uniform(-chroma, chroma, 3)
    tint = uniform(0.4, 1, 3)
    return colour + strength * pattern[:, :, None] * tint


def _turned(x: np.ndarray, y: np.ndarray, angle: float) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    return x * cos + y * sin, y * cos - x * sin


def _over(below: np.ndarray, above: np.ndarray, distance: np.ndarray, pixel: float) -> np.ndarray:
    """`above` where the distance is negative, with an edge one pixel wide."""
    cover = np.clip(0.5 - distance / pixel, 0, 1)[:, :, None]
    return below + cover * (above - below)
