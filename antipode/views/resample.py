"""The one linear primitive of the views.

Cropping, antialiased resizing and flipping are one linear map per axis, and so is blurring with its
padding: out = R_y X R_x^T, with matrices of each image's own. Everything that reads a pixel's
neighbours goes through `resample`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from antipode.data.canvas import Canvas
from antipode.errors import UsageError

CHUNK_BYTES = 256 * 2**20  # of padded float32 pixels at a time: a batch of large photos must fit


def resample(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows x columns^T for each image and channel, in float32.

    x: (N, C, H, W); rows: (N, S, H); columns: (N, T, W). Returns (N, C, S, T).

    Autocast is off because bfloat16 would coarsen the pixels. TF32 stays what the caller made it with
    torch.set_float32_matmul_precision: torch's default, "highest", is exact float32 on CUDA too.
    """
    with torch.autocast(x.device.type, enabled=False):
        # Rows first: a canvas is stored channels-last, so only the smaller, half-resized x is transposed.
        x = torch.einsum("nsh,nhwc->nswc", rows, x.permute(0, 2, 3, 1))
        return torch.einsum("nswc,ntw->ncst", x, columns)


class Axis(NamedTuple):
    """Where the output pixels of each image read along one axis; four (N,) float64 tensors on the CPU.

    start, length: the part of the image that is seen.
    first: the centre of output pixel 0, in input pixels from `start` (0.5 is the first pixel's centre).
    step: input pixels from one output pixel's centre to the next; negative reads backwards.
    """

    start: Tensor
    length: Tensor
    first: Tensor
    step: Tensor

    def slice(self, begin: int, end: int) -> Axis:
        return Axis(*(part[begin:end] for part in self))

    def weights(self, size: int, extent: int, device: torch.device) -> Tensor:
        """(N, size, extent) float32: what each output pixel takes from each input pixel.

        The triangle filter of ATen's antialiased bilinear resize: as wide as a step, or one pixel when
        enlarging; cut off at the ends of the part seen, then normalised.
        """
        start, length, first, step = torch.stack(self).to(device, non_blocking=True)[:, :, None, None]
        # Only the small factors are float64: an error of a far pixel's position is an error of its weight.
        centre = (first + step * torch.arange(size, device=device)[:, None]).float()  # (N, size, 1)
        width = step.abs().clamp(min=1).float()
        pixel = (torch.arange(extent, device=device) - start).float()  # (N, 1, extent)
        weights = (pixel + 0.5 - centre).abs_().div_(width).neg_().add_(1).clamp_(min=0)
        weights.mul_((pixel >= 0) & (pixel < length))
        return weights.div_(weights.sum(dim=2, keepdim=True))


def cut(canvas: Canvas, down: Axis, across: Axis, size: int) -> Tensor:
    """(N, C, size, size) float32 in [0, 1], read from the canvas along both axes."""
    padded = int(canvas.heights.max()) * int(canvas.widths.max()) * canvas.channels * 4
    chunk = max(1, CHUNK_BYTES // padded)
    parts = []
    for begin in range(0, len(canvas), chunk):
        end = min(begin + chunk, len(canvas))
        pixels = canvas.select(torch.arange(begin, end)).padded().float()
        rows = down.slice(begin, end).weights(size, pixels.shape[2], pixels.device)
        columns = across.slice(begin, end).weights(size, pixels.shape[3], pixels.device)
        parts.append(resample(pixels, rows, columns))
    return torch.cat(parts).div_(canvas.full_scale)


def normalise(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x - mean) / std per channel, in place. x: (N, C, H, W)."""
    if not len(mean) == len(std) == x.shape[1]:
        raise UsageError(
            f"images of {x.shape[1]} channels were given a mean of {len(mean)} and a deviation of "
            f"{len(std)} values; give one value per channel"
        )
    scale = torch.tensor([mean, std], dtype=x.dtype).to(x.device, non_blocking=True)
    return x.sub_(scale[0][:, None, None]).div_(scale[1][:, None, None])
