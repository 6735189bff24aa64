"""What is done to a picture at test time: one view without chance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from antipode.data.canvas import Canvas
from antipode.data.decode import decode, picture_array, plain_mode
from antipode.devices import send
from antipode.views.resample import Axis, chunks, cut, places


@dataclass(frozen=True)
class Preprocess:
    """Resize the shorter side to `resize`, cut the central `size` x `size`, normalise.

    With resize == size the whole shorter side is kept. mean, std: per channel, of pixels in [0, 1].
    """

    size: int
    resize: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels: int = 3
    depth: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.size <= self.resize:
            raise ValueError(f"resize is {self.resize} and size {self.size}; 0 < size <= resize is needed")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != self.channels:
                raise ValueError(f"{name} has {len(values)} values for {self.channels} channels")

    def __call__(self, canvas: Canvas) -> Tensor:
        """(N, C, size, size) float32 on the canvas's device."""
        shorter = torch.minimum(canvas.heights, canvas.widths)
        where = places(canvas, self._axis(canvas.heights, shorter), self._axis(canvas.widths, shorter))
        where = send(where, canvas.device)
        with torch.autocast(canvas.device.type, enabled=False):  # bfloat16 would coarsen the pixels
            parts = [
                cut(canvas.pixels, where[begin:end], height, width, self.size)
                for begin, end, height, width in chunks(canvas)
            ]
        x = torch.cat(parts) / canvas.full_scale
        mean, std = (send(torch.tensor(values), x.device)[:, None, None] for values in (self.mean, self.std))
        return (x - mean) / std

    def _axis(self, length: Tensor, shorter: Tensor) -> Axis:
        """torchvision's rounding: the longer side is cut to a whole number, the margin rounded to even."""
        length = length.double()
        resized = (self.resize * length / shorter).floor()
        margin = ((resized - self.size) / 2).round()
        step = length / resized
        return Axis(torch.zeros_like(length), length, (margin + 0.5) * step, step)

    def image(self, picture: str | Path | bytes | np.ndarray | Image.Image) -> Tensor:
        """(C, size, size) for one picture in hand: a file, its bytes, an array or a PIL image."""
        if isinstance(picture, (str, Path)):
            picture = Path(picture).read_bytes()
        elif isinstance(picture, Image.Image):
            picture = picture_array(plain_mode(ImageOps.exif_transpose(picture)))
        array = decode(picture, channels=self.channels, depth=self.depth)
        return self(Canvas.of([array]))[0]
