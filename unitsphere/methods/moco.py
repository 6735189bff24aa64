"""MoCo v1 and v2: a queue of keys that a slow copy of the network has encoded."""

from __future__ import annotations

from unitsphere.config.layers import Patch
from unitsphere.methods.declaration import About

MOCO_V2: Patch = {"head": "mlp", "temperature": 0.2, "views": "moco-v2", "lr_schedule": "cosine"}

# MoCo's settings for small images, from the demonstration of its authors on CIFAR-10. All methods with a queue have it.
SMALL_MOCO: Patch = {"head": "linear", "temperature": 0.1, "bn_groups": 8, "base_lr": 0.03}


def small(views: str, **more: object) -> dict[str, Patch]:
    """The recipes that a method with a queue has on small images. views: its policy for them."""
    cifar: Patch = {"views": views, **SMALL_MOCO, **more}
    return {"cifar10": cifar, "cifar100": cifar, "stl10": SMALL_MOCO, "shapes": {"views": views}}


V1 = About(
    title="Momentum Contrast",
    paper="He et al., CVPR 2020",
    needs="2 views, a queue, a slow copy; no labels",
    defaults={"head": "linear", "temperature": 0.07, "views": "moco-v1", "lr_schedule": "step"},
    recipes=small("moco-v1-small"),
)

V2 = About(
    title="MoCo with an MLP head, blur and a cosine schedule",
    paper="Chen et al., arXiv 2003.04297",
    needs="2 views, a queue, a slow copy; no labels",
    defaults=MOCO_V2,
    recipes=small("moco-v2-small"),
)
