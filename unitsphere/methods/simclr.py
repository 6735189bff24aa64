"""SimCLR: both views of a batch are each other's keys, and the batch's other images are the negatives."""

from __future__ import annotations

from unitsphere.config.layers import Patch
from unitsphere.methods.declaration import About

LONG_COSINE: Patch = {"lr_schedule": "cosine", "lr_update": "step", "warmup_epochs": 10}
SMALL: Patch = {"views": "simclr-small", "temperature": 0.2, "base_lr": 0.24}

SIMCLR = About(
    title="both views of a batch are each other's keys",
    paper="Chen et al., ICML 2020; with SGD, as in EqCo 2.3",
    needs="2 views, a large batch; no labels",
    defaults={
        "head": "mlp-bn-bn",  # as in the released codes: a norm after each layer, the last included
        "zero_init_residual": True,
        "temperature": 0.1,
        "views": "simclr",
        "key_encoder": "online",
        "negatives_from": "batch",
        "both_views": True,
        "bn_groups": 1,
        **LONG_COSINE,
    },
    recipes={
        # as published: LARS on a large batch
        "imagenet": {"optimizer": "lars", "base_lr": 0.3, "weight_decay": 1e-6, "batch_size": 4096, "epochs": 100},
        "cifar10": SMALL,
        "cifar100": SMALL,
        "shapes": {"views": "simclr-small", "warmup_epochs": 2},
    },
)
