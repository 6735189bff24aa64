"""What a study would take before it starts: card hours, and data that are not there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from unitsphere.config.config import Config
from unitsphere.data.named import NAMED
from unitsphere.methods.contrastive import ContrastiveConfig
from unitsphere.methods.regression import RegressionConfig

IMAGES = {"imagenet": 1_281_167, "imagenet100": 126_689, "cifar10": 50_000, "cifar100": 50_000,
          "stl10": 5_000, "stl10-unlabelled": 100_000}  # fmt: skip
# GFLOPs of a forward pass at 224 x 224. With the stem for small images they are as many at 32 x 32 times `SMALL_STEM`.
GFLOPS = {"resnet-tiny": 0.0115, "resnet18": 1.8, "resnet34": 3.7, "resnet50": 4.1, "resnet101": 7.8, "resnet152": 11.5,
          "resnet50x2": 16.0, "resnet50x4": 64.0}  # fmt: skip
SMALL_STEM = 15.0
# Measured on one NVIDIA H200, of which these are the forward passes a second and GFLOP: MoCo v2's compiled step of
# ResNet-50 with 256 images takes 48.9 ms (docs/cifar10.md), and has four times the work of a forward pass.
GFLOPS_A_SECOND = 256 * 4 * 4.1 / 0.0489
SECONDS_A_PASS, GFLOPS_ON_2_CORES, SECONDS_A_RUN = 0.0004, 40.0, 12.0  # as small studies took on two cores
BACKWARD = 2  # times a forward pass


def hours(config: Config, epochs: int) -> float | None:
    """About how long a run takes on one NVIDIA H200; None where the number of images is not known before they are
    opened, or the network is no built-in one."""
    count, one = images_of(config), gflops(config)
    if count is None or one is None:
        return None
    return count * epochs * passes(config) * one / GFLOPS_A_SECOND / 3600


def minutes_on_2_cores(config: Config, epochs: int, images: float) -> float:
    """The same of a small network on a CPU, with what starting and judging it takes."""
    one = gflops(config) or 0.0
    return (images * epochs * passes(config) * (SECONDS_A_PASS + one / GFLOPS_ON_2_CORES) + SECONDS_A_RUN) / 60


def gflops(config: Config) -> float | None:
    """Of a forward pass of an image; None where that is not known."""
    small = SMALL_STEM if config.stem == "small" or config.backbone == "resnet-tiny" else 1.0
    known = GFLOPS.get(config.backbone)
    return None if known is None else known * small * (config.image_size / 224) ** 2


def images_of(config: Config) -> float | None:
    name, _, argument = config.data.partition("=")
    if name == "shapes":
        count = argument.partition("x")[0]
        return float(count) if count.isdecimal() else 10_000.0
    return IMAGES[name] * config.fraction if name in IMAGES else None


def passes(config: Config) -> float:
    """Forward passes of an image in a step, those of the gradient included."""
    if isinstance(config, RegressionConfig):
        return config.view_count * (1 + BACKWARD) + config.view_count
    if not isinstance(config, ContrastiveConfig):
        return 1 + BACKWARD
    if config.key_encoder == "online" or config.symmetric:
        return 2 * (1 + BACKWARD) + (2 if config.symmetric else 0)
    queries = config.keys if config.positives == "repeated" else 1
    return queries * (1 + BACKWARD) + config.keys


def missing(data: Iterable[str]) -> list[str]:
    """Of some data sets, what is to be done about those that are not there. One that torchvision fetches is not
    missing."""
    found = []
    for each in dict.fromkeys(data):
        name, equals, path = each.partition("=")
        if name in NAMED:
            if NAMED[name].needs_path and not path:
                found.append(f"{name}: say where it lies: --set data={name}=PATH (evaluate.data for the judge's).")
            elif name != "shapes" and equals and not any(mark in path for mark in "{*") and not there(path):
                found.append(f"{each}: there is no {path}.")
        elif not there(each):
            found.append(f"{each}: there is no such file, folder or named data set.")
    return found


def there(path: str) -> bool:
    return Path(os.path.expanduser(path)).exists()
