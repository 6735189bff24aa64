"""The forms of the shapes set, as distances: negative inside, positive outside, in units of the form's size.

x, y: arrays of any shape, with y upwards; every form lies within about the unit circle. No two forms are a
turned, mirrored or scaled copy of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

Distance = Callable[[np.ndarray, np.ndarray], np.ndarray]


def turned(x: np.ndarray, y: np.ndarray, angle: float) -> tuple[np.ndarray, np.ndarray]:
    """The coordinates in a frame turned by `angle`."""
    cos, sin = math.cos(angle), math.sin(angle)
    return x * cos + y * sin, y * cos - x * sin


def disc(x: np.ndarray, y: np.ndarray, radius: float = 0.85) -> np.ndarray:
    return np.hypot(x, y) - radius


def ring(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.abs(np.hypot(x, y) - 0.72) - 0.2


def crescent(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.maximum(disc(x, y, 0.95), -disc(x - 0.5, y, 0.8))


def heart(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A square on its corner with a disc on each upper side."""
    corner = np.maximum(np.abs(x + y + 0.15), np.abs(x - y - 0.15)) / np.sqrt(2) - 0.5
    side, radius = 0.5 / np.sqrt(2), 0.5
    discs = np.hypot(np.abs(x) - side, y - side + 0.15) - radius
    return np.minimum(corner, discs)


def dumbbell(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    bar = np.maximum(np.abs(x) - 0.6, np.abs(y) - 0.15)
    return np.minimum(np.hypot(np.abs(x) - 0.6, y) - 0.38, bar)


def square(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(x), np.abs(y)) - 0.72


def cross(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x, y = np.abs(x), np.abs(y)
    return np.minimum(np.maximum(x - 0.27, y - 0.95), np.maximum(x - 0.95, y - 0.27))


def polygon(*corners: tuple[float, float]) -> Distance:
    """The distance to a closed polygon."""
    start = np.array(corners, np.float32)
    edge = np.roll(start, -1, axis=0) - start
    lengths = (edge**2).sum(1)[:, None, None]
    sx, sy, ex, ey = (column[:, None, None] for column in (*start.T, *edge.T))
    side = np.sign(ey)

    def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        dx, dy = x - sx, y - sy  # (corners, height, width)
        along = np.minimum(np.maximum((dx * ex + dy * ey) / lengths, 0), 1)
        near = ((dx - along * ex) ** 2 + (dy - along * ey) ** 2).min(axis=0)
        crosses = (dy < 0) != (dy < ey)  # a ray to the right meets the edge or not: even-odd rule
        inside = np.logical_xor.reduce(crosses & ((dx * ey - dy * ex) * side < 0), axis=0)
        return np.where(inside, -1, 1) * np.sqrt(near)

    return distance


def _around(radii: Sequence[float], start: float = np.pi / 2) -> list[tuple[float, float]]:
    """Corners at equal angles, with these radii."""
    angles = start + 2 * np.pi * np.arange(len(radii)) / len(radii)
    return [(r * np.cos(a), r * np.sin(a)) for r, a in zip(radii, angles, strict=True)]


FORMS: dict[str, Distance] = {
    "disc": disc,
    "ring": ring,
    "crescent": crescent,
    "heart": heart,
    "dumbbell": dumbbell,
    "square": square,
    "cross": cross,
    "triangle": polygon(*_around([1, 1, 1])),
    "star": polygon(*_around([1, 0.4] * 5)),
    "arrow": polygon((0, 1), (0.75, 0.1), (0.27, 0.1), (0.27, -0.95), (-0.27, -0.95), (-0.27, 0.1), (-0.75, 0.1)),
    "hourglass": polygon((-0.7, 0.85), (0.7, 0.85), (0.12, 0), (0.7, -0.85), (-0.7, -0.85), (-0.12, 0)),
    "zigzag": polygon(
        *((-0.75, 0.85), (0.75, 0.85), (0.75, 0.5), (-0.15, -0.5), (0.75, -0.5)),
        *((0.75, -0.85), (-0.75, -0.85), (-0.75, -0.5), (0.15, 0.5), (-0.75, 0.5)),
    ),
}
