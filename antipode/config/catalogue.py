"""The named methods and recipes: small patches over the defaults, not one file per experiment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Patch = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A named point of a family: what it is, and how it differs from the defaults."""

    title: str
    paper: str
    needs: str
    patch: Patch


METHODS: dict[str, Method] = {
    "moco-v1": Method(
        title="Momentum Contrast",
        paper="He et al., CVPR 2020",
        needs="2 views, a queue, a slow copy; no labels",
        patch={
            "head": "linear",
            "temperature": 0.07,
            "views": "moco-v1",
            "lr_schedule": "step",
        },
    ),
    "moco-v2": Method(
        title="MoCo with an MLP head, blur and a cosine schedule",
        paper="Chen et al., arXiv 2003.04297",
        needs="2 views, a queue, a slow copy; no labels",
        patch={
            "head": "mlp",
            "temperature": 0.2,
            "views": "moco-v2",
            "lr_schedule": "cosine",
        },
    ),
}

# A recipe is for a kind of data: first what holds for every method, then what holds for one.
# The small-data settings are MoCo's for CIFAR-10: a linear head, a hotter schedule, a faster slow copy.
SMALL_DATA: Patch = {
    "head": "linear",
    "temperature": 0.1,
    "key_momentum": 0.99,
    "weight_decay": 5e-4,
    "lr_schedule": "cosine",
    "bn_groups": 8,
    "base_lr": 0.03,
}
SMALL_VIEWS: dict[str, Patch] = {"moco-v1": {"views": "moco-v1-small"}, "moco-v2": {"views": "moco-v2-small"}}

RECIPES: dict[str, dict[str, Patch]] = {
    "imagenet": {
        "*": {"backbone": "resnet50", "image_size": 224, "normalise": "imagenet"},
    },
    "imagenet100": {  # MoCHi's: 0.03 at a batch of 128, a queue of 16384
        "*": {
            "backbone": "resnet50",
            "image_size": 224,
            "normalise": "imagenet",
            "batch_size": 128,
            "base_lr": 0.06,
            "queue_size": 16384,
        },
    },
    "cifar10": {
        "*": {
            **SMALL_DATA,
            "backbone": "resnet18",
            "stem": "small",
            "image_size": 32,
            "normalise": "cifar10",
            "batch_size": 512,
            "queue_size": 4096,
        },
        **SMALL_VIEWS,
    },
    "stl10": {
        "*": {
            **SMALL_DATA,
            "backbone": "resnet18",
            "stem": "small",
            "image_size": 96,
            "normalise": "imagenet",
            "batch_size": 256,
            "queue_size": 16384,
        },
    },
    "shapes": {  # sized for 2 CPU cores and a few minutes; head and temperature are the method's own
        "*": {
            "backbone": "resnet-tiny",
            "stem": "small",
            "image_size": 32,
            "normalise": "half",
            "batch_size": 128,
            "queue_size": 1024,
            "key_momentum": 0.99,
            "weight_decay": 5e-4,
            "lr_schedule": "cosine",
            "bn_groups": 1,
            "base_lr": 0.12,
            "epochs": 30,
            "log_every": 10,
        },
        **SMALL_VIEWS,
    },
}
RECIPES["cifar100"] = {**RECIPES["cifar10"], "*": {**RECIPES["cifar10"]["*"], "normalise": "cifar100"}}

# Mean and deviation by name, in [0, 1]; `half` is for data without statistics of its own.
NORMALISATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "half": ((0.5,), (0.25,)),
}
