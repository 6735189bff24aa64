"""The named methods: small patches over the defaults, not one file per experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unitsphere.common.errors import UsageError

Patch = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A named point of a family: what it is, and how it differs from the defaults."""

    title: str
    paper: str
    needs: str
    patch: Patch
    family: str = "contrastive"


MOCO_V2: Patch = {"head": "mlp", "temperature": 0.2, "views": "moco-v2", "lr_schedule": "cosine"}
LONG_COSINE: Patch = {"lr_schedule": "cosine", "lr_update": "step", "warmup_epochs": 10}
BYOL: Patch = {
    **LONG_COSINE,
    "head": "byol",
    "hidden": 4096,
    "dim": 256,
    "views": "byol",
    "key_momentum": 0.99,
    "momentum_schedule": "cosine",
    "bn_groups": 1,
    "optimizer": "lars",
    "base_lr": 0.3,
    "weight_decay": 1e-6,
}

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
            **LONG_COSINE,
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
            **LONG_COSINE,
            "warmup_kind": "times",
        },
    ),
    "jcl": Method(
        title="infinitely many keys of an image, by the variance of a few",
        paper="Cai et al., JCL, NeurIPS 2020",
        needs="1 + M' views, a queue, a slow copy; no labels",
        patch={**MOCO_V2, "keys": 4, "positives": "joint", "variance_weight": 2.0},
    ),
    "jcl-vanilla": Method(
        title="several keys of an image, each with a term of its own",
        paper="Cai et al., JCL, NeurIPS 2020, section 2 of the supplement",
        needs="1 + M views, a queue, a slow copy; no labels",
        patch={**MOCO_V2, "keys": 5, "positives": "each"},
    ),
    "mochi": Method(
        title="MoCo v2 with negatives mixed from the hardest ones",
        paper="Kalantidis et al., MoCHi, NeurIPS 2020",
        needs="2 views, a queue, a slow copy; no labels",
        patch={**MOCO_V2, "hardest": 1024, "pairs": 1024, "with_query": 128, "mixing_warmup": 10},
    ),
    "byol": Method(
        title="predict the slow copy's embedding of the other view",
        paper="Grill et al., NeurIPS 2020",
        needs="2 views, a slow copy; no negatives, no labels",
        patch=BYOL,
        family="regression",
    ),
    "msbreg": Method(
        title="BYOL with centroids of K views and forces that spread embeddings",
        paper="Moon et al., MSBReg; reconstructed from its supplement",
        needs="K views, a slow copy; no negatives, no labels",
        patch={
            **BYOL,
            "hidden": 2048,
            "views": "msbreg",
            "view_count": 4,
            "singular_weight": 0.004,
            "brownian_weight": 0.5,
            "lr_per_view": True,
            "base_lr": 0.15,
            "weight_decay": 1e-5,
        },
        family="regression",
    ),
    "supervised": Method(
        title="cross-entropy with the labels, the reference from above",
        paper="He et al., CVPR 2016",
        needs="1 view, labels",
        patch={
            "views": "supervised",
            "bn_groups": 1,
            "base_lr": 0.1,
            "lr_schedule": "step",
            "lr_drops": (0.33, 0.66),
            "epochs": 90,
        },
        family="supervised",
    ),
}

# Mean and deviation by name, in [0, 1]; `half` is for data without statistics of its own.
NORMALISATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "half": ((0.5,), (0.25,)),
}


def family_of(method: str) -> str:
    """The family of a method, or of several as in jcl+eqco."""
    first, *others = method.split("+")
    for other in others:
        if METHODS[other].family != METHODS[first].family:
            raise UsageError(
                f"method: {method} cannot be combined: {first} is a {METHODS[first].family} method, and {other} a "
                f"{METHODS[other].family} one."
            )
    return METHODS[first].family


def combined(name: str, patches: Mapping[str, Patch]) -> Patch:
    """The patch of a method, or of several as in jcl+eqco. Where they differ the user must settle it: `disputes`."""
    return {field: value for part in name.split("+") for field, value in patches.get(part, {}).items()}


def disputes(name: str, *layers: Mapping[str, Patch]) -> dict[str, str]:
    """The fields that the parts of a method would have different values of, each alone, and who would have what.
    layers: patches by part, the later over the earlier; "*" is for every part."""
    sides: dict[str, dict[str, Any]] = {}
    for part in name.split("+"):
        for patches in layers:
            for field, value in {**patches.get("*", {}), **patches.get(part, {})}.items():
                sides.setdefault(field, {})[part] = value
    return {
        field: ", ".join(f"{part}: {value}" for part, value in values.items())
        for field, values in sides.items()
        if any(value != next(iter(values.values())) for value in values.values())
    }
