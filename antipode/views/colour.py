"""Colour operations on a batch of images in [0, 1], each image with its own parameters.

x is always (N, C, H, W) float32. Hue, saturation and grey mean something for three channels only;
images of other channel counts keep brightness and contrast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from antipode.views.draw import BRIGHTNESS, CONTRAST, HUE, SATURATION, Table


def change_some(x: Tensor, mask: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """x[mask] = change(x[mask]), in place. mask: (N,) bool on the CPU, so no device is waited for."""
    if mask.any():
        chosen = mask.nonzero().squeeze(1).to(x.device, non_blocking=True)
        x.index_copy_(0, chosen, change(x.index_select(0, chosen)))


def grey(x: Tensor) -> Tensor:
    """(N, 1, H, W): luma (ITU-R 601) of three channels, else the mean of the channels."""
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True)
    red, green, blue = x.split(1, dim=1)
    return (red * 0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def jitter(x: Tensor, table: Table) -> None:
    """Brightness, contrast, saturation and hue in each image's own order, in place.

    Brightness, contrast and saturation are one blend, f x + (1 - f) reference, with the reference 0,
    mean(grey) and grey. So each of the four turns is one blend of the whole batch (f = 1 leaves an
    image bit for bit as it is) and one shift of hue for those whose turn it is.
    """
    if not table.jitter.any():
        return
    colour = x.shape[1] == 3
    blending = (BRIGHTNESS, CONTRAST, SATURATION) if colour else (BRIGHTNESS, CONTRAST)
    for turn in table.order.unbind(1):
        factor = table.factors.gather(1, turn[:, None]).squeeze(1)
        blends = table.jitter & torch.isin(turn, torch.tensor(blending))
        _blend(x, torch.where(blends, factor, 1.0), turn)
        shifts = table.jitter & (turn == HUE) & (factor != 0)
        if colour:
            change_some(x, shifts, partial(shift_hue, shift=factor[shifts]))


def _blend(x: Tensor, factor: Tensor, turn: Tensor) -> None:
    """x <- clamp(f x + (1 - f) reference), in place. factor, turn: (N,) on the CPU."""
    rest = 1 - factor
    numbers = torch.stack([factor, rest * (turn == CONTRAST), rest * (turn == SATURATION)])
    keep, of_mean, of_grey = numbers.to(x.device, non_blocking=True)[:, :, None, None, None]
    shade = grey(x)
    mean = shade.mean(dim=(1, 2, 3), keepdim=True)
    x.mul_(keep).add_(shade.mul_(of_grey).add_(mean * of_mean)).clamp_(0, 1)


def shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turns the hue by `shift` (N,) turns, keeping HSV's saturation and value. x: (N, 3, H, W).

    With V the largest and D the largest less the smallest channel, and hue h in sixths of a turn, HSV
    back to RGB is V - D clamp(min(k, 4 - k), 0, 1), k = (h + 5, 3, 1 for red, green, blue) mod 6.
    """
    red, green, blue = x.unbind(1)
    low, value = x.aminmax(dim=1)
    spread = value - low
    safe = spread.clamp(min=torch.finfo(x.dtype).tiny)  # a grey pixel has no hue: any will do
    hue = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    hue += (6 * shift).to(x.device, non_blocking=True)[:, None, None]
    phase = torch.tensor([5.0, 3.0, 1.0]).to(x.device, non_blocking=True)[:, None, None]
    k = (hue[:, None] + phase).remainder_(6)
    return value[:, None] - torch.minimum(k, 4 - k).clamp_(0, 1).mul_(spread[:, None])


def solarise(x: Tensor, threshold: float) -> Tensor:
    """Inverts what is at or above the threshold."""
    return torch.where(x >= threshold, 1 - x, x)
