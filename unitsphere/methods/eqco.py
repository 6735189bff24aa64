"""EqCo (equivalent rules): few negatives that weigh as many. Alpha, and the number of negatives, are its fields."""

from __future__ import annotations

from unitsphere.config.layers import Patch
from unitsphere.config.unused import Unused
from unitsphere.methods.declaration import About
from unitsphere.methods.moco import MOCO_V2, small

EQCO = About(
    title="MoCo v2 with 256 negatives that weigh as 65,536",
    paper="Zhu et al., EqCo, arXiv 2010.01929",
    needs="2 views, the last batch's keys, a slow copy; no labels",
    defaults={**MOCO_V2, "negatives": 256, "alpha": 65536},
    recipes={
        **small("moco-v2-small", negatives=64, alpha=4096),
        "imagenet100": {"alpha": 16384},  # the queue of that recipe
        "shapes": {"views": "moco-v2-small", "negatives": 64, "alpha": 1024},
    },
)

UNUSED = (
    Unused(("alpha_on",), lambda c: c.alpha is None or not c.mixes, "it is for alpha with mixed negatives"),
    Unused(("shared_draw",), lambda c: c.negatives is None, "all negatives at hand are taken"),
)


def size(queue_size: int, defaults: Patch) -> Patch:
    """A method with few negatives has no more than the queue could hold, and they weigh as such a queue."""
    return {name: min(defaults[name], queue_size) for name in ("negatives", "alpha")} if "negatives" in defaults else {}
