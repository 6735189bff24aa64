"""Augmentation policies as data: what may happen to a picture, how often and how strongly."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["POLICIES", "Policy"]

Range = tuple[float, float]

_PROBABILITIES = ("jitter", "grey", "blur", "solarise", "flip")
_STRENGTHS = ("brightness", "contrast", "saturation")
_RANGES = ("crop_ratio", "blur_sigma")


@dataclass(frozen=True)
class Policy:
    """One view of a picture. The defaults do nothing but resize the whole picture.

    The operations come in this order: crop, jitter, grey, blur, solarise, flip; with grey_first
    (MoCo v1) grey comes before jitter. Strengths mean what they mean in torchvision's ColorJitter.
    """

    crop_scale: Range | None = None  # share of the picture's area; None keeps the whole picture
    crop_ratio: Range = (3 / 4, 4 / 3)  # width / height
    brightness: float = 0.0  # a factor from U(max(0, 1 - strength), 1 + strength)
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # a shift from U(-hue, hue), in turns
    jitter: float = 0.0  # probability of the four above, which come in random order
    grey: float = 0.0  # probability
    grey_first: bool = False
    blur: float = 0.0  # probability
    blur_sigma: Range = (0.1, 2.0)  # in pixels of the view
    solarise: float = 0.0  # probability
    solarise_threshold: float = 0.5
    flip: float = 0.0  # probability, left to right

    def __post_init__(self) -> None:
        for name in _PROBABILITIES:
            self._require(name, 0 <= getattr(self, name) <= 1, "a probability between 0 and 1")
        for name in _STRENGTHS:
            self._require(name, 0 <= getattr(self, name) < float("inf"), "a number not below 0")
        self._require("hue", 0 <= self.hue <= 0.5, "between 0 and 0.5")
        self._require("solarise_threshold", 0 <= self.solarise_threshold <= 1, "between 0 and 1")
        for name in _RANGES:
            self._require_range(name, float("inf"), "two numbers, 0 < low <= high")
        if self.crop_scale is not None:
            self._require_range("crop_scale", 1.0, "two numbers, 0 < low <= high <= 1, or None")

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")

    def _require_range(self, name: str, highest: float, allowed: str) -> None:
        given = tuple(getattr(self, name))
        self._require(name, len(given) == 2 and 0 < given[0] <= given[1] <= highest, allowed)
        object.__setattr__(self, name, given)  # a saved configuration gives a list

    def describe(self) -> str:
        """One line for a person."""
        crop = "whole picture" if self.crop_scale is None else f"crop {_span(self.crop_scale)}"
        strengths = "/".join(f"{s:g}" for s in (self.brightness, self.contrast, self.saturation, self.hue))
        jitter = f"jitter {strengths} p {self.jitter:g}" if self.jitter else ""
        grey = f"grey p {self.grey:g}" if self.grey else ""
        blur = f"blur {_span(self.blur_sigma)} p {self.blur:g}" if self.blur else ""
        solarise = f"solarise {self.solarise_threshold:g} p {self.solarise:g}" if self.solarise else ""
        flip = f"flip p {self.flip:g}" if self.flip else ""
        colour = (grey, jitter) if self.grey_first else (jitter, grey)
        return ", ".join(part for part in (crop, *colour, blur, solarise, flip) if part)


def _span(pair: Range) -> str:
    return f"{pair[0]:g}-{pair[1]:g}"


_MOCO_V1 = Policy(
    crop_scale=(0.2, 1.0),
    grey=0.2,
    grey_first=True,
    brightness=0.4,
    contrast=0.4,
    saturation=0.4,
    hue=0.4,
    jitter=1.0,
    flip=0.5,
)
_MOCO_V2 = Policy(
    crop_scale=(0.2, 1.0),
    brightness=0.4,
    contrast=0.4,
    saturation=0.4,
    hue=0.1,
    jitter=0.8,
    grey=0.2,
    blur=0.5,
    flip=0.5,
)

_SIMCLR = Policy(  # strength 1
    crop_scale=(0.08, 1.0),
    brightness=0.8,
    contrast=0.8,
    saturation=0.8,
    hue=0.2,
    jitter=0.8,
    grey=0.2,
    blur=0.5,
    flip=0.5,
)

_BYOL = Policy(  # what its two views share
    crop_scale=(0.08, 1.0),
    brightness=0.4,
    contrast=0.4,
    saturation=0.2,
    hue=0.1,
    jitter=0.8,
    grey=0.2,
    flip=0.5,
)
_SUPERVISED = Policy(crop_scale=(0.08, 1.0), flip=0.5)

POLICIES: dict[str, Policy] = {
    "moco-v1": _MOCO_V1,
    "moco-v2": _MOCO_V2,
    "moco-v1-small": replace(_MOCO_V1, blur=0.0),
    "moco-v2-small": replace(_MOCO_V2, blur=0.0),
    "simclr": _SIMCLR,
    "simclr-small": replace(_SIMCLR, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, blur=0.0),  # strength 0.5
    "byol-1": replace(_BYOL, blur=1.0),
    "byol-2": replace(_BYOL, blur=0.1, solarise=0.2),
    "byol-1-small": _BYOL,
    "byol-2-small": replace(_BYOL, solarise=0.2),
    "msbreg": replace(_BYOL, blur=1.0, solarise=0.2),  # Table 1 of its supplement, with BYOL's crop
    "msbreg-small": replace(_BYOL, solarise=0.2),
    "supervised": _SUPERVISED,
    "supervised-small": replace(_SUPERVISED, crop_scale=(0.5, 1.0)),
    "none": Policy(),
}

# Views that are not made alike: the policy of the first, of the second.
VIEWS: dict[str, tuple[str, ...]] = {
    "byol": ("byol-1", "byol-2"),
    "byol-small": ("byol-1-small", "byol-2-small"),
}
