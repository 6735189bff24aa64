"""The deterministic half of a view: a canvas and a table of parameters in, a batch out.

Equal to torchvision's v2 functions on float32 in [0, 1] with the same parameters, image by image, but
done for the whole batch at once where the canvas lives, and without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from antipode.data.canvas import Canvas
from antipode.views.colour import change_some, grey, jitter, solarise
from antipode.views.draw import Table, crop_boxes
from antipode.views.resample import Axis, cut, normalise, resample


def apply(canvas: Canvas, table: Table, *, size: int, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(N, C, size, size) float32 on the canvas's device: one normalised view of each image."""
    policy = table.policy
    turns_grey = table.grey if canvas.channels == 3 else torch.zeros_like(table.grey)
    x = crop(canvas, crop_boxes(table, canvas.heights, canvas.widths), table.flip, size)
    if policy.grey_first:
        change_some(x, turns_grey, _to_grey)
    jitter(x, table)
    if not policy.grey_first:
        change_some(x, turns_grey, _to_grey)
    change_some(x, table.blur, lambda some: blur(some, table.sigma[table.blur]))
    change_some(x, table.solarise, lambda some: solarise(some, policy.solarise_threshold))
    return normalise(x, mean, std)


def _to_grey(x: Tensor) -> Tensor:
    return grey(x).expand_as(x)


def crop(canvas: Canvas, boxes: Tensor, flip: Tensor, size: int) -> Tensor:
    """(N, C, size, size) in [0, 1]: each image's box, resized with antialiasing, mirrored where asked.

    Mirroring here or last is the same: no later operation tells left from right.
    boxes: (N, 4) top, left, height, width; flip: (N,) bool; both on the CPU.
    """
    top, left, height, width = boxes.double().unbind(1)
    down, across = height / size, width / size
    rows = Axis(top, height, down / 2, down)
    columns = Axis(
        left,
        width,
        torch.where(flip, width - across / 2, across / 2),
        torch.where(flip, -across, across),
    )
    return cut(canvas, rows, columns, size)


def blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur with reflected borders. x: (N, C, S, S); sigma: (N,) on the CPU, in pixels.

    The kernel spans the odd number of pixels nearest to a tenth of the image, at least 3, as in SimCLR.
    """
    size = x.shape[-1]
    reach = max(1, size // 20)
    pixel = torch.arange(size, device=x.device)
    seen_at = torch.stack([pixel, -pixel, 2 * (size - 1) - pixel])  # itself, and in the two mirrors
    distance = seen_at[:, None, :] - pixel[:, None]  # (3, S, S): of what pixel j shows from pixel i
    within = distance.abs() <= reach
    within[1, :, 0] = within[2, :, -1] = False  # the mirror's own pixel is not doubled
    precision = (0.5 / sigma**2).to(x.device, non_blocking=True)[:, None, None, None]
    weights = (distance**2 * -precision).exp_().mul_(within).sum(dim=1)  # (N, S, S)
    weights = weights.div_(weights.sum(dim=2, keepdim=True))
    return resample(x, weights, weights)
