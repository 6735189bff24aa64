"""Sizes for data without a recipe, from the number and size of the images and the device at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unitsphere.config.catalogue import Patch

MIXED = {"hardest": 4, "pairs": 4, "with_query": 32}  # what share of the queue they may be


@dataclass(frozen=True)
class Facts:
    """What is known of the data and the machine before a run is configured."""

    count: int  # training images
    side: int  # median of the shorter side, in pixels
    cuda: bool


def power_of_two(value: float, low: int, high: int) -> int:
    """The largest power of two not above value, within [low, high]."""
    size = low
    while size * 2 <= min(value, high):
        size *= 2
    return size


def sized(facts: Facts, method: Patch, given: Mapping[str, Any]) -> Patch:
    """500 photos and 5 million must both work: every size follows from the facts, from the method's own settings
    and from the sizes given.

    - The view is as large as the images allow; on a CPU at most 96.
    - An epoch has at least 8 steps, and the queue at most half of the images (a queue larger than the data
      holds every image's own old keys as negatives). A method with fewer negatives has no more than that either,
      and they weigh as such a queue. What is mixed is at most a quarter of it, and with the query a 32nd.
    - On a GPU few images are seen more often: 800 epochs of 500 images down to 100 of a million; on a CPU the
      run is held to about 200,000 images.
    - MSBReg's heads are 512 and 128 wide on a small backbone, as its supplement has it for ResNet-18.
    - The slow copy of a short run must be quicker, or it never leaves its starting point.

    What a family has no field for is left out by the caller.
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
    steps = epochs * (count // batch_size)
    queue_size = power_of_two(count / 2, min(batch_size, 65536), 65536)
    groups = next(n for n in range(max(1, batch_size // 32), 0, -1) if batch_size % n == 0)
    few = ("negatives", "alpha") if "negatives" in method else ()
    narrow = "brownian_weight" in method and given.get("backbone", backbone) in ("resnet18", "resnet-tiny")
    return {
        "image_size": image_size,
        "backbone": backbone,
        "stem": "small" if small else "imagenet",
        "views": f"{method['views']}-small" if small else method["views"],
        **({"hidden": 512, "dim": 128} if narrow else {}),
        "epochs": epochs,
        "batch_size": batch_size,
        "queue_size": queue_size,
        **{name: min(method[name], queue_size) for name in few},
        **{name: min(method[name], max(2, queue_size // part)) for name, part in MIXED.items() if name in method},
        "mixing_warmup": min(method.get("mixing_warmup", 0), epochs // 10),
        "bn_groups": method.get("bn_groups", groups),
        "warmup_epochs": min(method.get("warmup_epochs", 0), epochs // 10),
        "key_momentum": min(0.99 if steps < 50_000 else 0.999, method.get("key_momentum", 0.999)),
        "log_every": max(1, min(50, count // batch_size)),
    }
