"""Sizes for data without a recipe, from the number and size of the images and the device at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unitsphere.config.layers import Patch

__all__ = ["Facts"]


@dataclass(frozen=True)
class Facts:
    """What is known of the data and the machine before a run is configured.

    count: training images. side: the median of their shorter sides, in pixels. classes: how many there are, where the
    images have labels.
    """

    count: int
    side: int
    cuda: bool
    classes: int | None = None


def power_of_two(value: float, low: int, high: int) -> int:
    """The largest power of two not above value, within [low, high]."""
    size = low
    while size * 2 <= min(value, high):
        size *= 2
    return size


def sized(facts: Facts, defaults: Patch, given: Mapping[str, Any]) -> Patch:
    """500 photos and 5 million must both work: every size follows from the facts, from the method's defaults and from
    the sizes given. A method sizes its own fields after these (`Method.size`).

    - The view is as large as the images allow; on a CPU at most 96.
    - An epoch has at least 8 steps.
    - On a GPU few images are seen more often: 800 epochs of 500 images down to 100 of a million; on a CPU the
      run is held to about 200,000 images.
    """
    count = facts.count
    limit = 224 if facts.cuda else 96
    fitting = next((size for size in (224, 128, 96, 64) if facts.side >= size and size <= limit), 32)
    image_size = given.get("image_size", fitting)
    small = image_size <= 64
    if facts.cuda:
        backbone = "resnet50" if count >= 50_000 and not small else "resnet18"
        epochs = next((e for n, e in ((2_000, 800), (20_000, 400), (500_000, 200)) if count < n), 100)
    else:
        backbone = "resnet-tiny" if small else "resnet18"
        epochs = max(5, min(200, 200_000 // count))
    epochs = given.get("epochs", epochs)
    batch_size = given.get("batch_size", power_of_two(count / 8, 2, 256 if facts.cuda else 128))
    groups = next(n for n in range(max(1, batch_size // 32), 0, -1) if batch_size % n == 0)
    views = defaults.get("views", "moco-v2")
    return {
        "image_size": image_size,
        "backbone": backbone,
        "stem": "small" if small else "imagenet",
        "views": f"{views}-small" if small else views,
        "epochs": epochs,
        "batch_size": batch_size,
        "bn_groups": defaults.get("bn_groups", groups),
        "warmup_epochs": min(defaults.get("warmup_epochs", 0), epochs // 10),
        "log_every": max(1, min(50, count // batch_size)),
    }
