"""What is done to a picture at test time: one view without chance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from unitsphere.common.devices import send
from unitsphere.images.canvas import Canvas
from unitsphere.images.decode import decode, picture_array, plain_mode
from unitsphere.views.apply import NO_BLUR, Frame, can_fuse, render_all
from unitsphere.views.policies import Policy
from unitsphere.views.resample import Axis, places


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
        if self._has_the_size(canvas) and not can_fuse(canvas):
            return self._whole(canvas)
        frame = Frame(Policy(), self.size, 0, 0, canvas.full_scale, self.mean, self.std)
        return render_all(canvas, self.numbers(canvas), frame)

    def numbers(self, canvas: Canvas) -> Tensor:
        """(N, 29) float64 on the CPU: `apply.parameters` of a view that is this crop with its colours as they are."""
        shorter = torch.minimum(canvas.heights, canvas.widths)
        crop = places(canvas, self._axis(canvas.heights, shorter), self._axis(canvas.widths, shorter))
        colours = torch.tensor([1.0, 0.0, 0.0, 0.0] * 4 + [0.0, NO_BLUR, 0.0], dtype=torch.float64)
        return torch.cat([crop, colours.expand(len(canvas), -1)], dim=1)

    def _has_the_size(self, canvas: Canvas) -> bool:
        same = (canvas.heights == self.size) & (canvas.widths == self.size)
        return self.resize == self.size and bool(same.all())

    def _whole(self, canvas: Canvas) -> Tensor:
        """For images that have the size already: their pixels, normalised."""
        pixels = torch.arange(self.size**2, device=canvas.device)
        reads = send(canvas.offsets, canvas.device)[:, None] + pixels
        x = canvas.pixels.index_select(0, reads.flatten()).view(len(canvas), self.size, self.size, canvas.channels)
        x = x.permute(0, 3, 1, 2) / canvas.full_scale
        mean, std = (self._spread(values, x) for values in (self.mean, self.std))
        return x.sub_(mean).div_(std)

    @staticmethod
    def _spread(values: tuple[float, ...], x: Tensor) -> Tensor:
        """One value per channel as a whole image that lies in memory as those of x do: the quickest to compute with."""
        return torch.empty_like(x[0]).copy_(send(torch.tensor(values), x.device)[:, None, None])

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
