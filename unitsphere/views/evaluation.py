"""Prepare pictures at test time: one view, nothing of it random."""

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
from unitsphere.views.apply import can_fuse, render_views
from unitsphere.views.policies import Policy
from unitsphere.views.render import NO_BLUR, Frame

__all__ = ["Preprocess"]


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
        size, pixels = self.size, canvas.pixels
        whole = self.resize == size and bool(((canvas.heights == size) & (canvas.widths == size)).all())
        if not whole or (pixels.is_cuda and can_fuse(canvas)):
            frame = Frame(Policy(), size, 0, 0, canvas.full_scale, self.mean, self.std)
            return render_views(canvas, [self.numbers(canvas)], [frame])[0]

        # All images have the size already: their pixels are gathered and normalised, nothing is resized.
        constants = [canvas.offsets, torch.tensor(self.mean), torch.tensor(self.std)]
        if pixels.is_cuda:
            constants = [send(values, pixels.device) for values in constants]
        offsets, *mean_std = constants
        reads = offsets[:, None] + torch.arange(size**2, device=pixels.device)
        x = pixels.index_select(0, reads.flatten()).view(len(reads), size, size, pixels.shape[1])
        x = x.permute(0, 3, 1, 2) / canvas.full_scale
        # Mean and deviation as whole images that lie in memory as those of x do: the quickest to compute with.
        mean, std = (torch.empty_like(x[0]).copy_(values[:, None, None]) for values in mean_std)
        return x.sub_(mean).div_(std)

    def numbers(self, canvas: Canvas) -> Tensor:
        """(N, 29) float64 on the CPU: `apply.parameters` of a view that is this crop with its colours as they are.

        The rounding is torchvision's: the longer side is cut to a whole number, the margin rounded to even.
        """
        shorter = torch.minimum(canvas.heights, canvas.widths)
        columns = [canvas.offsets.double(), canvas.widths.double()]
        for side in (canvas.heights, canvas.widths):
            length = side.double()
            resized = (self.resize * length / shorter).floor()
            step = length / resized
            first = (((resized - self.size) / 2).round() + 0.5) * step
            columns += [torch.zeros_like(length), length, first, step]
        colours = torch.tensor([1.0, 0.0, 0.0, 0.0] * 4 + [0.0, NO_BLUR, 0.0], dtype=torch.float64)
        return torch.cat([torch.stack(columns, dim=1), colours.expand(len(shorter), -1)], dim=1)

    def image(self, picture: str | Path | bytes | np.ndarray | Image.Image) -> Tensor:
        """(C, size, size) for one picture in hand: a file, its bytes, an array or a PIL image."""
        if isinstance(picture, (str, Path)):
            picture = Path(picture).read_bytes()
        elif isinstance(picture, Image.Image):
            picture = picture_array(plain_mode(ImageOps.exif_transpose(picture)))
        array = decode(picture, channels=self.channels, depth=self.depth)
        return self(Canvas.of([array]))[0]
