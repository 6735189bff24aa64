"""The deterministic half of a view: a canvas and a table of parameters in, a batch out.

Equal to torchvision's v2 functions on float32 in [0, 1] with the same parameters, image by image, but done for the
whole batch at once where the canvas lives. The host turns the table into one small tensor of numbers per image;
what the device does with it has fixed shapes and waits for nothing, so it can be compiled as it is. `render` is that
part in plain torch, the reference; `fused.render` is the same as Triton kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unitsphere.common.devices import TRITON, one_thread, send
from unitsphere.common.errors import UsageError
from unitsphere.images.canvas import Canvas
from unitsphere.views.colour import grey, jitter, solarise, turns
from unitsphere.views.draw import Table, crop_boxes
from unitsphere.views.policies import Policy
from unitsphere.views.resample import Axis, chunks, cut, places, resample

NO_BLUR = 1e-3  # a deviation so small that the kernel is exactly one pixel


class Frame(NamedTuple):
    """What is the same for the whole batch."""

    policy: Policy
    size: int
    height: int  # of the largest image; the fused form does without
    width: int
    full_scale: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


Render = Callable[[Tensor, Tensor, Frame], Tensor]


@one_thread()
def parameters(canvas: Canvas, table: Table, size: int) -> Tensor:
    """(N, 29) float64 on the CPU: ten numbers for the crop, sixteen for the jitter, then grey, sigma, solarise."""
    colour = canvas.channels == 3
    down, across = axes(crop_boxes(table, canvas.heights, canvas.widths), table.flip, size)
    flags = [
        table.grey.double() * colour,
        torch.where(table.blur, table.sigma.double(), NO_BLUR),
        table.solarise.double(),
    ]
    return torch.cat([places(canvas, down, across), turns(table, colour).flatten(1), torch.stack(flags, dim=1)], dim=1)


def axes(boxes: Tensor, flip: Tensor, size: int) -> tuple[Axis, Axis]:
    """How the box of each image is read, down and across; backwards where it is mirrored.

    Mirroring here or last is the same: no later operation tells left from right.
    boxes: (N, 4) top, left, height, width; flip: (N,) bool; both on the CPU.
    """
    top, left, height, width = boxes.double().unbind(1)
    down, across = height / size, width / size
    first = torch.where(flip, width - across / 2, across / 2)
    return Axis(top, height, down / 2, down), Axis(left, width, first, torch.where(flip, -across, across))


def render(pixels: Tensor, numbers: Tensor, frame: Frame) -> Tensor:
    """The view itself, in float32 also under autocast. pixels: a canvas's; numbers: `parameters`, beside them."""
    with torch.autocast(pixels.device.type, enabled=False):
        return _render(pixels, numbers, frame)


def _render(pixels: Tensor, numbers: Tensor, frame: Frame) -> Tensor:
    policy = frame.policy
    x = cut(pixels, numbers[:, :10], frame.height, frame.width, frame.size) / frame.full_scale
    turns_grey = numbers[:, 26, None, None, None] != 0
    if policy.grey_first and policy.grey:
        x = torch.where(turns_grey, grey(x), x)
    if policy.jitter:
        x = jitter(x, numbers[:, 10:26].unflatten(1, (4, 4)))
    if policy.grey and not policy.grey_first:
        x = torch.where(turns_grey, grey(x), x)
    if policy.blur:
        x = blur(x, numbers[:, 27].float())
    if policy.solarise:
        inverted = solarise(x, policy.solarise_threshold)
        x = torch.where(numbers[:, 28, None, None, None] != 0, inverted, x)
    channels = [(x[:, c] - frame.mean[c]) / frame.std[c] for c in range(x.shape[1])]
    return torch.stack(channels, dim=1)


def blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur with reflected borders. x: (N, C, S, S); sigma: (N,), in pixels."""
    size = x.shape[-1]
    reach = blur_reach(size)
    offsets = torch.arange(-reach, reach + 1, device=x.device)
    kernel = torch.softmax(-(offsets**2) / (2 * sigma[:, None] ** 2), dim=1)  # (N, K)

    pixels = torch.arange(size, device=x.device)
    reads = (pixels[:, None] + offsets).abs()  # (S, K): -1 reflects to 1 ...
    reads = (size - 1) - (size - 1 - reads).abs()  # ... and S to S - 2
    lands = (reads.T[:, :, None] == pixels).float()  # (K, S, S): tap k of pixel i falls on pixel j
    matrix = torch.einsum("nk,kij->nij", kernel, lands)
    return resample(x, matrix, matrix)


def blur_reach(size: int) -> int:
    """The kernel spans the odd number of pixels nearest to a tenth of the image, at least 3, as in SimCLR."""
    return max(1, size // 20)


def apply(
    canvas: Canvas,
    table: Table,
    *,
    size: int,
    mean: Sequence[float],
    std: Sequence[float],
    plain: Render = render,
) -> Tensor:
    """(N, C, size, size) float32 on the canvas's device: one normalised view of each image.

    Made by the fused kernels where they can run; elsewhere by `plain`: `render`, or what torch.compile makes of it.
    """
    if not len(mean) == len(std) == canvas.channels:
        raise UsageError(
            f"images of {canvas.channels} channels were given a mean of {len(mean)} and a deviation of {len(std)} "
            "values; give one value per channel"
        )
    frame = Frame(table.policy, size, 0, 0, canvas.full_scale, tuple(mean), tuple(std))
    return render_all(canvas, parameters(canvas, table, size), frame, plain)


def render_all(canvas: Canvas, numbers: Tensor, frame: Frame, plain: Render = render) -> Tensor:
    """The views that the numbers (N, 29), on the CPU, ask for; the frame's height and width are seen to here."""
    numbers = send(numbers, canvas.device)
    if can_fuse(canvas):
        from unitsphere.views import fused  # needs Triton

        return fused.render(canvas.pixels, numbers, frame)
    parts = []
    for begin, end, height, width in chunks(canvas):
        parts.append(plain(canvas.pixels, numbers[begin:end], frame._replace(height=height, width=width)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def can_fuse(canvas: Canvas) -> bool:
    """Whether the kernels of `fused` can make the views: three channels on CUDA, with Triton installed."""
    return TRITON and canvas.device.type == "cuda" and canvas.channels == 3
