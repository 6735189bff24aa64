"""The one linear primitive of the views.

Cropping, antialiased resizing and flipping are one linear map per axis, and so is blurring with its
padding: out = R_y X R_x^T, with matrices of each image's own. Everything that reads a pixel's
neighbours goes through `resample`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from unitsphere.images.canvas import Canvas

CHUNK_BYTES = 256 * 2**20  # of padded float32 pixels at a time: a batch of large photos must fit


def resample(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows x columns^T for each image and channel, in float32.

    x: (N, C, H, W); rows: (N, S, H); columns: (N, T, W). Returns (N, C, S, T).

    TF32 stays what the caller made it with torch.set_float32_matmul_precision: torch's default, "highest", is
    exact float32 on CUDA too.
    """
    # Rows first: a canvas is stored channels-last, so only the smaller, half-resized x is transposed.
    x = torch.einsum("nsh,nhwc->nswc", rows, x.permute(0, 2, 3, 1))
    return torch.einsum("nswc,ntw->ncst", x, columns)


class Axis(NamedTuple):
    """Where the output pixels of each image read along one axis; four (N,) tensors on the CPU.

    start, length: the part of the image that is seen.
    first: the centre of output pixel 0, in input pixels from `start` (0.5 is the first pixel's centre).
    step: input pixels from one output pixel's centre to the next; negative reads backwards.
    """

    start: Tensor
    length: Tensor
    first: Tensor
    step: Tensor


def places(canvas: Canvas, down: Axis, across: Axis) -> Tensor:
    """(N, 10) float64 on the CPU: all that `cut` needs to know of each image. float64 holds offsets exactly."""
    return torch.stack([t.double() for t in (canvas.offsets, canvas.widths, *down, *across)], dim=1)


def cut(pixels: Tensor, where: Tensor, height: int, width: int, size: int) -> Tensor:
    """(N, C, size, size) float32 in the pixels' own scale. where: `places` on the pixels' device.

    height, width: at least as large as every image; what lies beyond an image gets no weight.
    """
    offsets, widths = where[:, 0].long(), where[:, 1].long()
    rows = torch.arange(height, device=pixels.device)[:, None]
    columns = torch.arange(width, device=pixels.device)
    reads = offsets[:, None, None] + rows * widths[:, None, None] + columns  # (N, H, W)
    x = pixels[reads.clamp_(max=len(pixels) - 1)].permute(0, 3, 1, 2).float()
    return resample(x, weights(where[:, 2:6], size, height), weights(where[:, 6:10], size, width))


def weights(axis: Tensor, size: int, extent: int) -> Tensor:
    """(N, size, extent) float32: what each output pixel takes from each input pixel. axis: (N, 4) float64.

    The triangle filter of ATen's antialiased bilinear resize: as wide as a step, or one pixel when
    enlarging; cut off at the ends of the part seen, then normalised.
    """
    start, length, first, step = axis.T[:, :, None, None]
    # Only the small factors are float64: an error of a far pixel's position is an error of its weight.
    centre = (first + step * torch.arange(size, device=axis.device)[:, None]).float()  # (N, size, 1)
    reach = step.abs().clamp(min=1).float()
    pixel = (torch.arange(extent, device=axis.device) - start).float()  # (N, 1, extent)
    triangle = (1 - (pixel + 0.5 - centre).abs() / reach).clamp(min=0)
    triangle = triangle * ((pixel >= 0) & (pixel < length.float()))
    return triangle / triangle.sum(dim=2, keepdim=True)


def chunks(canvas: Canvas) -> Iterator[tuple[int, int, int, int]]:
    """(begin, end, height, width): parts of the batch whose padded pixels stay within CHUNK_BYTES."""
    height, width = int(canvas.heights.max()), int(canvas.widths.max())
    chunk = max(1, CHUNK_BYTES // (height * width * canvas.channels * 4))
    for begin in range(0, len(canvas), chunk):
        end = min(begin + chunk, len(canvas))
        yield begin, end, int(canvas.heights[begin:end].max()), int(canvas.widths[begin:end].max())
