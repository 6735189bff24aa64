"""Colour operations on a batch of images in [0, 1], each image with its own parameters.

x is always (N, C, H, W) float32, and parameters are (N,) tensors on its device. Every operation is done for the
whole batch and has a parameter that leaves an image as it is, so that nothing depends on which images it is for:
shapes never change, and a compiler can fuse it all. Hue, saturation and grey mean something for three channels only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unitsphere.views.draw import CONTRAST, HUE, SATURATION, Table


def grey(x: Tensor) -> Tensor:
    """(N, 1, H, W): luma (ITU-R 601) of three channels, else the mean of the channels."""
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True)
    red, green, blue = x.split(1, dim=1)
    return (red * 0.2989).add(green, alpha=0.587).add(blue, alpha=0.114)


def turns(table: Table, colour: bool) -> Tensor:
    """(n, 4, 4) float64 on the CPU: for each of the four turns what `jitter` needs to know of each image.

    Brightness, contrast and saturation are one blend, f x + (1 - f) reference, with the reference 0, mean(grey)
    and grey: f, (1 - f) [contrast], (1 - f) [saturation]. Last the shift of hue. (1, 0, 0, 0) changes nothing.
    """
    factor = table.factors.double().gather(1, table.order)
    blends = table.jitter[:, None] & (table.order != HUE)
    shifts = table.jitter[:, None] & (table.order == HUE)
    if not colour:
        blends = blends & (table.order != SATURATION)
        shifts = torch.zeros_like(shifts)
    keep = torch.where(blends, factor, 1.0)
    of_mean, of_grey = ((1 - keep) * (table.order == kind) for kind in (CONTRAST, SATURATION))
    return torch.stack([keep, of_mean, of_grey, torch.where(shifts, factor, 0.0)], dim=2)


def jitter(x: Tensor, turns: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue in each image's own order. turns: (N, 4, 4), see `turns`."""
    for turn in turns.to(x.dtype).unbind(1):
        keep, of_mean, of_grey = (turn[:, n, None, None, None] for n in range(3))
        shade = grey(x)
        mean = shade.mean(dim=(1, 2, 3), keepdim=True)
        x = (keep * x + (of_grey * shade + of_mean * mean)).clamp(0, 1)
        if x.shape[1] == 3:
            x = shift_some(x, turn[:, 3])
    return x


def shift_some(x: Tensor, shift: Tensor) -> Tensor:
    """The hue of the images whose shift is not 0. On a device all are shifted, since choosing would mean waiting."""
    if not x.is_cpu:
        return torch.where((shift != 0)[:, None, None, None], shift_hue(x, shift), x)
    chosen = shift.nonzero()[:, 0]
    return x.index_copy(0, chosen, shift_hue(x[chosen], shift[chosen]))


def shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turns the hue by `shift` (N,) turns, keeping HSV's saturation and value. x: (N, 3, H, W).

    With V the largest and D the largest less the smallest channel, and hue h in sixths of a turn, HSV
    back to RGB is V - D clamp(min(k, 4 - k), 0, 1), k = (h + 5, 3, 1 for red, green, blue) mod 6.
    """
    red, green, blue = x.unbind(1)
    value, low = x.amax(dim=1), x.amin(dim=1)
    spread = value - low
    safe = spread.clamp(min=torch.finfo(x.dtype).tiny)  # a grey pixel has no hue: any will do
    hue = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    hue = hue + 6 * shift[:, None, None]

    def channel(phase: float) -> Tensor:
        k = (hue + phase).remainder(6)
        return value - torch.minimum(k, 4 - k).clamp(0, 1) * spread

    return torch.stack([channel(5.0), channel(3.0), channel(1.0)], dim=1)


def solarise(x: Tensor, threshold: float) -> Tensor:
    """Inverts what is at or above the threshold."""
    return torch.where(x >= threshold, 1 - x, x)
