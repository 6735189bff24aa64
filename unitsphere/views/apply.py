"""The deterministic half of a view: a canvas and a table of parameters in, a batch out.

The host turns the table into one small tensor of numbers per image. The device renders the views from it, and waits for
nothing: by the Triton kernels of `fused` where they can run, else by `render`, the reference in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unitsphere.common.devices import TRITON, one_thread, send
from unitsphere.common.errors import UsageError
from unitsphere.images.canvas import Canvas
from unitsphere.views.draw import CONTRAST, HUE, SATURATION, Table
from unitsphere.views.render import NO_BLUR, Frame, Render, render

__all__ = ["apply"]

CHUNK_BYTES = 256 * 2**20  # of padded float32 pixels at a time: a batch of large photos must fit


def apply(
    canvas: Canvas,
    table: Table,
    *,
    size: int,
    mean: Sequence[float],
    std: Sequence[float],
    plain: Render = render,
) -> Tensor:
    """Make one normalised view of each image.

    mean, std: per channel, of pixels in [0, 1]. plain: what renders where the kernels of `fused` cannot: `render`, or
    what torch.compile makes of it. Returns (N, C, size, size) float32 on the canvas's device.
    """
    with one_thread():
        numbers = parameters(canvas, table, size)
    frame = Frame(table.policy, size, 0, 0, canvas.full_scale, tuple(mean), tuple(std))
    return render_views(canvas, [numbers], [frame], plain)[0]


def render_views(
    canvas: Canvas, numbers: Sequence[Tensor], frames: Sequence[Frame], plain: Render = render
) -> list[Tensor]:
    """Render one batch of views for each tensor of numbers and its frame.

    numbers: (N, 29) on the CPU, see `parameters`. frames: their height and width are set here.
    Returns as many tensors (N, C, size, size) float32 on the canvas's device.
    """
    pixels, channels = canvas.pixels, canvas.pixels.shape[1]
    for frame in frames:
        if not len(frame.mean) == len(frame.std) == channels:
            raise UsageError(
                f"images of {channels} channels were given a mean of {len(frame.mean)} and a deviation of "
                f"{len(frame.std)} values; give one value per channel"
            )
    if pixels.is_cuda:
        numbers = [send(rows, pixels.device) for rows in numbers]
        if can_fuse(canvas):
            from unitsphere.views import fused  # needs Triton

            return [fused.render(pixels, rows, frame) for rows, frame in zip(numbers, frames, strict=True)]

    # The plain form pads images to the largest. Large ones are rendered some at a time.
    heights, widths = canvas.heights, canvas.widths
    chunk = max(1, CHUNK_BYTES // (int(heights.max()) * int(widths.max()) * channels * 4))
    views = []
    for rows, frame in zip(numbers, frames, strict=True):
        parts = []
        for begin in range(0, len(rows), chunk):
            some = slice(begin, begin + chunk)
            fitting = frame._replace(height=int(heights[some].max()), width=int(widths[some].max()))
            parts.append(plain(pixels, rows[some], fitting))
        views.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    return views


def can_fuse(canvas: Canvas) -> bool:
    """Whether the kernels of `fused` can make the views: three channels on CUDA, with Triton installed."""
    return TRITON and canvas.pixels.is_cuda and canvas.pixels.shape[1] == 3


def parameters(canvas: Canvas, table: Table, size: int) -> Tensor:
    """Turn the rows of a table into the numbers by which a view of `size` is rendered. All on the CPU.

    Returns (N, 29) float64, which holds offsets exactly. The columns:
    0, 1: where the image begins on the canvas, and its width.
    2-5: how it is read down: the start and the length of the part seen, then, in pixels from the start, the centre of
        the first output pixel (0.5 is the first pixel's centre) and the step to the next; negative reads backwards.
    6-9: the same across.
    10-25: four turns of jitter, of four numbers each: see below.
    26: whether it turns grey. 27: sigma of the blur. 28: whether it is solarised.
    """
    colour = canvas.pixels.shape[1] == 3  # hue, saturation and grey mean something for three channels only
    crop = crop_numbers(canvas, crop_boxes(table, canvas.heights, canvas.widths), table.flip, size)

    # Brightness, contrast and saturation are one blend, f x + (1 - f) reference, with the reference 0, mean(grey) and
    # grey. The numbers of a turn: f, (1 - f) [contrast], (1 - f) [saturation], shift of hue. (1, 0, 0, 0) does nothing.
    factor = table.factors.double().gather(1, table.order)
    blends = table.jitter[:, None] & (table.order != HUE)
    shifts = table.jitter[:, None] & (table.order == HUE) & colour
    if not colour:
        blends = blends & (table.order != SATURATION)
    keep = torch.where(blends, factor, 1.0)
    of_mean, of_grey = (1 - keep) * (table.order == CONTRAST), (1 - keep) * (table.order == SATURATION)
    turns = torch.stack([keep, of_mean, of_grey, torch.where(shifts, factor, 0.0)], dim=2)

    sigma = torch.where(table.blur, table.sigma.double(), NO_BLUR)
    flags = torch.stack([table.grey.double() * colour, sigma, table.solarise.double()], dim=1)
    return torch.cat([crop, turns.flatten(1), flags], dim=1)


def crop_numbers(canvas: Canvas, boxes: Tensor, flip: Tensor, size: int) -> Tensor:
    """Say how the box of each image is read: the first ten columns of `parameters`, (N, 10) float64.

    Mirroring here or last is the same: no later operation tells left from right.
    boxes: (N, 4) top, left, height, width; flip: (N,) bool; both on the CPU.
    """
    top, left, height, width = boxes.double().unbind(1)
    down, across = height / size, width / size
    first = torch.where(flip, width - across / 2, across / 2)
    axes = (top, height, down / 2, down, left, width, first, torch.where(flip, -across, across))
    return torch.stack([canvas.offsets.double(), canvas.widths.double(), *axes], dim=1)


def crop_boxes(table: Table, heights: Tensor, widths: Tensor) -> Tensor:
    """Choose each image's crop by the rule of torchvision's RandomResizedCrop.

    That is the first proposal that fits, else the largest central crop whose ratio is allowed.
    heights, widths: (n,) int64 on the CPU. Returns (n, 4) int64 on the CPU: top, left, height, width.
    """
    if table.policy.crop_scale is None:
        return torch.stack([torch.zeros_like(heights), torch.zeros_like(widths), heights, widths], dim=1)
    tall, wide = heights.double()[:, None], widths.double()[:, None]
    area = tall * wide * table.area
    height, width = (area / table.ratio).sqrt().round(), (area * table.ratio).sqrt().round()
    fits = (height > 0) & (height <= tall) & (width > 0) & (width <= wide)
    first = fits.int().argmax(dim=1, keepdim=True)
    size = torch.cat([height.gather(1, first), width.gather(1, first)], dim=1)
    whole = torch.cat([tall, wide], dim=1)
    placed = (table.place * (whole - size + 1)).floor()

    low, high = table.policy.crop_ratio
    ratio = wide / tall
    height = torch.where(ratio < low, (wide / low).round(), tall)
    width = torch.where(ratio > high, (tall * high).round(), wide)
    central = torch.cat([height, width], dim=1).clamp(min=1)

    found = fits.any(dim=1, keepdim=True)
    size = torch.where(found, size, central)
    corner = torch.where(found, placed, ((whole - central) / 2).floor())
    return torch.cat([corner, size], dim=1).long()
