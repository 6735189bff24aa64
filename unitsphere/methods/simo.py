"""SiMo, of EqCo's paper: momentum contrast without a queue; the batch's keys are the negatives."""

from __future__ import annotations

from unitsphere.config.layers import Patch
from unitsphere.methods.declaration import About
from unitsphere.methods.simclr import LONG_COSINE

SMALL: Patch = {"views": "moco-v2-small", "alpha": 512}

SIMO = About(
    title="momentum contrast without a queue",
    paper="Zhu et al., EqCo, arXiv 2010.01929, section 3",
    needs="2 views, a slow copy; no labels",
    defaults={
        "head": "mlp-bn-bn",
        "temperature": 0.2,
        "views": "moco-v2",
        "negatives_from": "batch",
        "alpha": 256,
        "shared_draw": True,  # as in the released code, where fewer negatives than the batch has are asked for
        "bn_groups": 1,
        "zero_init_residual": True,
        **LONG_COSINE,
        "warmup_kind": "times",
    },
    recipes={"cifar10": SMALL, "cifar100": SMALL, "shapes": {"views": "moco-v2-small", "warmup_epochs": 2}},
)
