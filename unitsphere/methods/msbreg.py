"""MSBReg: BYOL with centroids of K views and forces that spread embeddings. Reconstructed from its supplement."""

from __future__ import annotations

from unitsphere.config.layers import Patch
from unitsphere.methods.byol import BYOL_DEFAULTS, IMAGENET_100, STL_10
from unitsphere.methods.byol import SMALL as SMALL_BYOL
from unitsphere.methods.declaration import About

# BYOL's rate on small images: it is multiplied by the 4 views.
SMALL: Patch = {"views": "msbreg-small", **SMALL_BYOL, "hidden": 512, "dim": 128, "base_lr": 0.03}

MSBREG = About(
    title="BYOL with centroids of K views and forces that spread embeddings",
    paper="Moon et al., MSBReg; reconstructed from its supplement",
    needs="K views, a slow copy; no negatives, no labels",
    defaults={
        **BYOL_DEFAULTS,
        "hidden": 2048,
        "views": "msbreg",
        "view_count": 4,
        "singular_weight": 0.004,
        "brownian_weight": 0.5,
        "lr_per_view": True,
        "base_lr": 0.15,
        "weight_decay": 1e-5,
    },
    recipes={
        "imagenet": {"batch_size": 512, "epochs": 300},
        "imagenet100": IMAGENET_100,
        "cifar10": SMALL,
        "cifar100": SMALL,
        "stl10": {**STL_10, "brownian_weight": 0.05},
        "shapes": {**SMALL, "hidden": 256, "dim": 64, "warmup_epochs": 2},
    },
)
