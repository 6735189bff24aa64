"""The named recipes: for a kind of data, first what holds for every method, then what holds for one.

Of what holds for every method a family takes the fields that it has.
"""

from __future__ import annotations

from unitsphere.config.catalogue import METHODS, Patch

# On small images every method has views without blur, a faster slow copy and more weight decay. Those with a queue
# have MoCo's small-data settings: a linear head, a lower temperature, groups of images for the norms.
SMALL_IMAGES: Patch = {"stem": "small", "key_momentum": 0.99, "weight_decay": 5e-4, "lr_schedule": "cosine"}
SMALL_MOCO: Patch = {"head": "linear", "temperature": 0.1, "bn_groups": 8, "base_lr": 0.03}
WITH_QUEUE = ("moco-v1", "moco-v2", "eqco", "jcl", "jcl-vanilla", "mochi")

# The regression methods on CIFAR have no published settings that agree: SGD and weight decay as MoCo's, a head in
# proportion to ResNet-18. MSBReg has BYOL's rate: it is multiplied by its 4 views.
SMALL_BYOL: Patch = {"optimizer": "sgd", "hidden": 1024, "base_lr": 0.12}
SMALL_MSBREG: Patch = {**SMALL_BYOL, "hidden": 512, "dim": 128, "base_lr": 0.03}
SMALL_SUPERVISED: Patch = {"base_lr": 0.1, "warmup_epochs": 5, "lr_update": "step", "nesterov": True}

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


def small_views(name: str) -> Patch:
    return {"views": f"{METHODS[name].patch['views']}-small"}


SMALL: dict[str, Patch] = {name: small_views(name) | (SMALL_MOCO if name in WITH_QUEUE else {}) for name in METHODS}
SMALL["eqco"] |= {"negatives": 64, "alpha": 4096}
SMALL["simo"] |= {"alpha": 512}
SMALL["simclr"] |= {"temperature": 0.2, "base_lr": 0.24}
SMALL["byol"] |= SMALL_BYOL
SMALL["msbreg"] |= SMALL_MSBREG
SMALL["supervised"] |= SMALL_SUPERVISED | {"epochs": 200}

# MoCHi's runs on 4 GPUs, of which the 100-epoch results are the checkpoint half-way.
OF_MOCHI: Patch = {"bn_groups": 4, "keep_epochs": [100]}
# JCL's ablations on ImageNet-100: ResNet-18, 0.1 at a batch of 128, 100 epochs, the queue of all its experiments.
OF_JCL: Patch = {"backbone": "resnet18", "base_lr": 0.2, "epochs": 100, "queue_size": 65536}

RECIPES: dict[str, dict[str, Patch]] = {
    "imagenet": {
        "*": {"backbone": "resnet50", "image_size": 224, "normalise": "imagenet"},
        # as published: LARS on a large batch
        "simclr": {"optimizer": "lars", "base_lr": 0.3, "weight_decay": 1e-6, "batch_size": 4096, "epochs": 100},
        "mochi": {**OF_MOCHI, "mixing_warmup": 15},
        "byol": {"batch_size": 4096, "epochs": 300},
        "msbreg": {"batch_size": 512, "epochs": 300},
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
        "mochi": OF_MOCHI,
        "jcl": {**OF_JCL, "keys": 5, "variance_weight": 4.0},
        "jcl-vanilla": OF_JCL,
        "byol": {**IMAGENET_100, "lr_per_view": True},
        "msbreg": IMAGENET_100,
        "supervised": {"batch_size": 256, "base_lr": 0.1},
    },
    "cifar10": {
        "*": {
            **SMALL_IMAGES,
            "backbone": "resnet18",
            "image_size": 32,
            "normalise": "cifar10",
            "batch_size": 512,
            "queue_size": 4096,
        },
        **SMALL,
    },
    "stl10": {
        "*": {
            **SMALL_IMAGES,
            "backbone": "resnet18",
            "image_size": 96,
            "normalise": "imagenet",
            "batch_size": 256,
            "queue_size": 16384,
        },
        **dict.fromkeys(WITH_QUEUE, SMALL_MOCO),
        "byol": {**STL_10, "lr_per_view": True},
        "msbreg": {**STL_10, "brownian_weight": 0.05},
        "supervised": {**SMALL_SUPERVISED, "epochs": 200},
    },
    "shapes": {  # sized for 2 CPU cores and a few minutes; head and temperature are the method's own
        "*": {
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
        **{name: small_views(name) for name in METHODS},
        "eqco": {**small_views("eqco"), "negatives": 64, "alpha": 1024},
        "mochi": {**small_views("mochi"), "hardest": 256, "pairs": 256, "with_query": 32, "mixing_warmup": 3},
        "byol": {**small_views("byol"), **SMALL_BYOL, "hidden": 256, "dim": 64},
        "msbreg": {**small_views("msbreg"), **SMALL_MSBREG, "hidden": 256, "dim": 64},
    },
}
# What BYOL's authors took on ImageNet for runs of so many epochs (40: the momentum alone is known).
BY_LENGTH: dict[tuple[str, str], dict[int, Patch]] = {
    ("imagenet", "byol"): {
        40: {"base_lr": 0.45, "weight_decay": 1e-6, "key_momentum": 0.97},
        100: {"base_lr": 0.45, "weight_decay": 1e-6, "key_momentum": 0.99},
        300: {"base_lr": 0.3, "weight_decay": 1e-6, "key_momentum": 0.99},
        1000: {"base_lr": 0.2, "weight_decay": 1.5e-6, "key_momentum": 0.996},
    }
}
for _long in ("simclr", "simo", "byol", "msbreg"):  # a warm-up of ten epochs is a third of the run
    RECIPES["shapes"][_long] |= {"warmup_epochs": 2}
RECIPES["cifar100"] = {**RECIPES["cifar10"], "*": {**RECIPES["cifar10"]["*"], "normalise": "cifar100"}}
