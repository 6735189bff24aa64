"""BYOL: predict the slow copy's embedding of the other view; there are no negatives."""

from __future__ import annotations

from unitsphere.config.layers import Patch
from unitsphere.methods.declaration import About
from unitsphere.methods.simclr import LONG_COSINE

BYOL_DEFAULTS: Patch = {
    **LONG_COSINE,
    "head": "byol",
    "hidden": 4096,
    "dim": 256,
    "views": "byol",
    "key_momentum": 0.99,
    "momentum_schedule": "cosine",
    "bn_groups": 1,
    "zero_init_residual": True,  # as in the released code
    "optimizer": "lars",
    "base_lr": 0.3,
    "weight_decay": 1e-6,
}

# The regression methods on CIFAR have no published settings that agree: SGD and weight decay as MoCo's, a head in
# proportion to ResNet-18.
SMALL: Patch = {"optimizer": "sgd", "hidden": 1024, "base_lr": 0.12}

# MSBReg's supplement: ResNet-18 with heads of 512 and 128 units, 320 epochs. Its BYOL rows presumably are the same
# with two views and no forces, so BYOL has it here too.
MSBREG_18: Patch = {
    "backbone": "resnet18",
    "hidden": 512,
    "dim": 128,
    "batch_size": 512,
    "epochs": 320,
    "weight_decay": 1e-5,
}
IMAGENET_100: Patch = {**MSBREG_18, "base_lr": 0.4}
STL_10: Patch = {**MSBREG_18, "base_lr": 0.5}

BYOL = About(
    title="predict the slow copy's embedding of the other view",
    paper="Grill et al., NeurIPS 2020",
    needs="2 views, a slow copy; no negatives, no labels",
    defaults=BYOL_DEFAULTS,
    recipes={
        "imagenet": {"batch_size": 4096, "epochs": 300},
        "imagenet100": {**IMAGENET_100, "lr_per_view": True},
        "cifar10": {"views": "byol-small", **SMALL},
        "cifar100": {"views": "byol-small", **SMALL},
        "stl10": {**STL_10, "lr_per_view": True},
        "shapes": {"views": "byol-small", **SMALL, "hidden": 256, "dim": 64, "warmup_epochs": 2},
    },
    lengths={  # what its authors took on ImageNet for runs of so many epochs (40: the momentum alone is known)
        "imagenet": {
            40: {"base_lr": 0.45, "weight_decay": 1e-6, "key_momentum": 0.97},
            100: {"base_lr": 0.45, "weight_decay": 1e-6, "key_momentum": 0.99},
            300: {"base_lr": 0.3, "weight_decay": 1e-6, "key_momentum": 0.99},
            1000: {"base_lr": 0.2, "weight_decay": 1.5e-6, "key_momentum": 0.996},
        }
    },
)
