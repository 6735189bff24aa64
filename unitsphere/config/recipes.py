"""What holds for every method on a kind of data, by the data's name. A method adds its own settings (`methods/`)."""

from __future__ import annotations

from unitsphere.config.layers import Patch

# On small images every method has views without blur, a faster slow copy and more weight decay.
SMALL_IMAGES: Patch = {"stem": "small", "key_momentum": 0.99, "weight_decay": 5e-4, "lr_schedule": "cosine"}
CIFAR: Patch = {**SMALL_IMAGES, "backbone": "resnet18", "image_size": 32, "batch_size": 512, "queue_size": 4096}
IMAGENET: Patch = {"backbone": "resnet50", "image_size": 224, "normalise": "imagenet"}

# A method takes those fields of a recipe that it has.
RECIPES: dict[str, Patch] = {
    "imagenet": IMAGENET,
    "imagenet100": {**IMAGENET, "batch_size": 128, "base_lr": 0.06, "queue_size": 16384},  # MoCHi's: 0.03 at 128
    "cifar10": {**CIFAR, "normalise": "cifar10"},
    "cifar100": {**CIFAR, "normalise": "cifar100"},
    "stl10": {
        **SMALL_IMAGES,
        "backbone": "resnet18",
        "image_size": 96,
        "normalise": "imagenet",
        "batch_size": 256,
        "queue_size": 16384,
    },
    "shapes": {  # sized for 2 CPU cores and a few minutes; head and temperature are the method's own
        **SMALL_IMAGES,
        "backbone": "resnet-tiny",
        "image_size": 32,
        "normalise": "half",
        "batch_size": 128,
        "queue_size": 1024,
        "bn_groups": 1,
        "base_lr": 0.12,
        "epochs": 30,
        "log_every": 10,
    },
}


def recipe_of(data: str) -> str | None:
    """The recipe that a data set's name implies: cifar10=/data/c has cifar10's."""
    name = data.partition("=")[0].removesuffix("-unlabelled")
    return name if name in RECIPES else None
