"""Draw the parameters of a view: a table with one row per image.

Every row is drawn in full whatever the policy's probabilities and whatever the images' sizes. So the
draws of one operation do not move when another is switched off, and each rank can slice its rows from
the table of the global batch without knowing the other ranks' images.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from unitsphere.common.devices import one_thread
from unitsphere.views.policies import Policy

__all__ = ["Table", "draw"]

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
        """The parameters of the views `start` to `stop`."""
        rows = {f.name: getattr(self, f.name)[start:stop] for f in fields(self) if f.name != "policy"}
        return replace(self, **rows)


@one_thread()  # small tables: more threads gain nothing, and take cores from those that decode
def draw(policy: Policy, n: int, generator: torch.Generator) -> Table:
    """Draw the parameters of one view of each of n images. generator: on the CPU."""
    uniform = torch.rand(n, 2 * TRIES + 16, generator=generator, dtype=torch.float64)
    area, ratio, place, order, factors, sigma, chance = uniform.split([TRIES, TRIES, 2, 4, 4, 1, 5], dim=1)

    # Each uniform number is stretched to the range that the policy gives: low + u (high - low).
    p = policy
    area_low, area_high = p.crop_scale or (1.0, 1.0)
    ratio_low, ratio_high = torch.tensor(p.crop_ratio, dtype=torch.float64).log().tolist()
    sigma_low, sigma_high = p.blur_sigma
    factor_ranges = [(max(0.0, 1.0 - s), 1.0 + s) for s in (p.brightness, p.contrast, p.saturation)]
    low, high = torch.tensor([*factor_ranges, (-p.hue, p.hue)], dtype=torch.float64).unbind(1)
    happens = chance < torch.tensor([p.flip, p.jitter, p.grey, p.blur, p.solarise], dtype=torch.float64)
    return Table(
        policy,
        area_low + area * (area_high - area_low),
        (ratio_low + ratio * (ratio_high - ratio_low)).exp(),
        place,
        order.argsort(dim=1),
        (low + factors * (high - low)).float(),
        (sigma_low + sigma * (sigma_high - sigma_low)).squeeze(1).float(),
        *happens.unbind(1),
    )
