"""The random half of a view: a table of parameters, one row per image.

Every row is drawn in full whatever the policy's probabilities and whatever the images' sizes. So the
draws of one operation do not move when another is switched off, and each rank can slice its rows from
the table of the global batch without knowing the other ranks' images.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from unitsphere.common.devices import one_thread
from unitsphere.views.policies import Policy, Range

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
TRIES = 10  # proposals of RandomResizedCrop before it falls back to the centre


@dataclass(frozen=True)
class Table:
    """The parameters of n views, on the CPU: what they decide is known without asking the device.

    area, ratio: (n, TRIES) float64, proposed crops as a share of the image's area, and width / height.
    place: (n, 2) float64 in [0, 1), where the crop lies in the room it has, down and across.
    order: (n, 4) int64, a permutation of BRIGHTNESS, CONTRAST, SATURATION, HUE, first to last.
    factors: (n, 4) float32, by operation: three factors, and the shift of the hue in turns.
    sigma: (n,) float32, of the blur, in pixels of the view.
    flip, jitter, grey, blur, solarise: (n,) bool, whether it happens.
    """

    policy: Policy
    area: Tensor
    ratio: Tensor
    place: Tensor
    order: Tensor
    factors: Tensor
    sigma: Tensor
    flip: Tensor
    jitter: Tensor
    grey: Tensor
    blur: Tensor
    solarise: Tensor

    def __len__(self) -> int:
        return len(self.flip)

    def slice(self, start: int, stop: int) -> Table:
        rows = {f.name: getattr(self, f.name)[start:stop] for f in fields(self) if f.name != "policy"}
        return replace(self, **rows)


@one_thread()
def draw(policy: Policy, n: int, generator: torch.Generator) -> Table:
    """The parameters of one view of each of n images. generator: on the CPU."""
    uniform = torch.rand(n, 2 * TRIES + 16, generator=generator, dtype=torch.float64)
    area, ratio, place, order, factors, sigma, chance = uniform.split([TRIES, TRIES, 2, 4, 4, 1, 5], dim=1)
    low, high = torch.tensor(policy.crop_ratio, dtype=torch.float64).log().tolist()
    p = policy
    happens = chance < torch.tensor([p.flip, p.jitter, p.grey, p.blur, p.solarise], dtype=torch.float64)
    return Table(
        policy,
        _between(area, policy.crop_scale or (1.0, 1.0)),
        _between(ratio, (low, high)).exp(),
        place,
        order.argsort(dim=1),
        _factors(policy, factors),
        _between(sigma, policy.blur_sigma).squeeze(1).float(),
        *happens.unbind(1),
    )


def _factors(policy: Policy, uniform: Tensor) -> Tensor:
    strengths = (policy.brightness, policy.contrast, policy.saturation)
    ranges = [*((max(0.0, 1.0 - s), 1.0 + s) for s in strengths), (-policy.hue, policy.hue)]
    columns = zip(uniform.unbind(1), ranges, strict=True)
    return torch.stack([_between(u, limits) for u, limits in columns], dim=1).float()


def _between(uniform: Tensor, limits: Range) -> Tensor:
    low, high = limits
    return low + uniform * (high - low)


def crop_boxes(table: Table, heights: Tensor, widths: Tensor) -> Tensor:
    """(n, 4) int64 on the CPU: top, left, height, width of each image's crop.

    The rule of torchvision's RandomResizedCrop: the first proposal that fits, else the largest central
    crop whose ratio is allowed. heights, widths: (n,) int64 on the CPU.
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
