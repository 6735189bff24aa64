"""The named methods and recipes: small patches over the defaults, not one file per experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from antipode.errors import UsageError

Patch = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A named point of a family: what it is, and how it differs from the defaults."""

    title: str
    paper: str
    needs: str
    patch: Patch


MOCO_V2: Patch = {"head": "mlp", "temperature": 0.2, "views": "moco-v2", "lr_schedule": "cosine"}

METHODS: dict[str, Method] = {
    "moco-v1": Method(
        title="Momentum Contrast",
        paper="He et al., CVPR 2020",
        needs="2 views, a queue, a slow copy; no labels",
        patch={"head": "linear", "temperature": 0.07, "views": "moco-v1", "lr_schedule": "step"},
    ),
    "moco-v2": Method(
        title="MoCo with an MLP head, blur and a cosine schedule",
        paper="Chen et al., arXiv 2003.04297",
        needs="2 views, a queue, a slow copy; no labels",
        patch=MOCO_V2,
    ),
    "simclr": Method(
        title="both views of a batch are each other's keys",
        paper="Chen et al., ICML 2020; with SGD, as in EqCo 2.3",
        needs="2 views, a large batch; no labels",
        patch={
            "head": "mlp-bn",
            "temperature": 0.1,
            "views": "simclr",
            "key_encoder": "online",
            "negatives_from": "batch",
            "both_views": True,
            "bn_groups": 1,
            "lr_schedule": "cosine",
            "lr_update": "step",
            "warmup_epochs": 10,
        },
    ),
    "eqco": Method(
        title="MoCo v2 with 256 negatives that weigh as 65,536",
        paper="Zhu et al., EqCo, arXiv 2010.01929",
        needs="2 views, the last batch's keys, a slow copy; no labels",
        patch={**MOCO_V2, "negatives": 256, "alpha": 65536},
    ),
    "simo": Method(
        title="momentum contrast without a queue",
        paper="Zhu et al., EqCo, arXiv 2010.01929, section 3",
        needs="2 views, a slow copy; no labels",
        patch={
            "head": "mlp-bn-bn",
            "temperature": 0.2,
            "views": "moco-v2",
            "negatives_from": "batch",
            "alpha": 256,
            "bn_groups": 1,
            "zero_init_residual": True,
            "lr_schedule": "cosine",
            "lr_update": "step",
            "warmup_epochs": 10,
        },
    ),
    "jcl": Method(
        title="infinitely many keys of an image, by the variance of a few",
        paper="Cai et al., JCL, NeurIPS 2020",
        needs="1 + M' views, a queue, a slow copy; no labels",
        patch={**MOCO_V2, "keys": 4, "variance_weight": 2.0},
    ),
}

# A recipe is for a kind of data: first what holds for every method, then what holds for one.
# On small images every method has views without blur, a faster slow copy and more weight decay. Those with a queue
# have MoCo's small-data settings: a linear head, a lower temperature, groups of images for the norms.
SMALL_IMAGES: Patch = {"stem": "small", "key_momentum": 0.99, "weight_decay": 5e-4, "lr_schedule": "cosine"}
SMALL_MOCO: Patch = {"head": "linear", "temperature": 0.1, "bn_groups": 8, "base_lr": 0.03}
WITH_QUEUE = ("moco-v1", "moco-v2", "eqco", "jcl")


def small_views(name: str) -> Patch:
    return {"views": f"{METHODS[name].patch['views']}-small"}


SMALL: dict[str, Patch] = {name: small_views(name) | (SMALL_MOCO if name in WITH_QUEUE else {}) for name in METHODS}
SMALL["eqco"] |= {"negatives": 64, "alpha": 4096}
SMALL["simo"] |= {"alpha": 512}
SMALL["simclr"] |= {"temperature": 0.2}

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
        # JCL's ablations: ResNet-18, 0.1 at a batch of 128, 100 epochs
        "jcl": {"backbone": "resnet18", "base_lr": 0.2, "epochs": 100, "keys": 5, "variance_weight": 4.0},
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
    },
}
for _long in ("simclr", "simo"):  # a warm-up of ten epochs is a third of the run
    RECIPES["shapes"][_long] |= {"warmup_epochs": 2}
RECIPES["cifar100"] = {**RECIPES["cifar10"], "*": {**RECIPES["cifar10"]["*"], "normalise": "cifar100"}}

# Mean and deviation by name, in [0, 1]; `half` is for data without statistics of its own.
NORMALISATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "half": ((0.5,), (0.25,)),
}


def combined(name: str, patches: Mapping[str, Patch]) -> Patch:
    """The patch of a method, or of several as in jcl+eqco: what they set differently must be settled by the user."""
    result: Patch = {}
    for part in name.split("+"):
        for field, value in patches.get(part, {}).items():
            if result.setdefault(field, value) != value:
                raise UsageError(f"method: {name} cannot be combined: its parts set {field} to different values.")
    return result
