"""JCL: infinitely many keys of an image, through the variance of a few. And its rival, a loss term for each key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from unitsphere.common.errors import UsageError
from unitsphere.config.fields import Count, NotNegative, Section
from unitsphere.config.layers import Patch
from unitsphere.config.unused import Unused
from unitsphere.methods.declaration import About
from unitsphere.methods.moco import MOCO_V2, small


class JointFields(Section):
    """JCL: several keys of an image, and the limit of infinitely many"""

    keys: Count = Field(1, description="M', keys of an image")
    variance_weight: NotNegative = Field(0.0, description="lambda, weight of the variance of the positive scores")
    variance_ramp: bool = Field(True, description="lambda grows linearly to its full value over the run")
    normalise_mean: bool = Field(False, description="the mean key enters the queue with length 1")
    positives: Literal["joint", "each", "repeated"] = Field(
        "joint", description="each: a term for each key; repeated: the same as a batch as many times larger"
    )
    key_chunks: Count | None = Field(
        None,
        description="passes in which keys are encoded (with bn_groups 1 each has statistics of its own); "
        "default: as many as leave the groups of the norms whole",
    )


def problems(c: Any) -> Iterator[str]:
    """Yield what contradicts several keys of an image."""
    if c.symmetric and c.keys > 1:
        yield f"symmetric: it is for one key of an image; keys is {c.keys}"
    if c.positives == "repeated" and (c.negatives_from == "batch" or c.symmetric):
        yield "positives: repeated is for negatives_from queue, one way"


def key_chunks(c: Any) -> int:
    """Return the number of passes in which the keys of a step are encoded.

    A pass holds whole groups of the norms, which changes nothing. There are at least as many passes as keys of an
    image, so that a pass is no larger than the batch of one key, or as many as groups. One group has one pass, because
    more passes would have other statistics.
    """
    from unitsphere.common.distributed import world

    if c.key_chunks is not None:
        keys = c.batch_size * c.keys // world()
        if keys % c.key_chunks or keys == c.key_chunks:
            raise UsageError(
                f"key_chunks: given {c.key_chunks}; it must divide the {keys} keys of a step, with at least 2 a pass."
            )
        return int(c.key_chunks)
    groups = max(1, c.bn_groups // world())
    return next((passes for passes in range(c.keys, groups) if groups % passes == 0), groups)


UNUSED = (
    Unused(("variance_weight", "variance_ramp", "normalise_mean", "positives"), lambda c: c.keys == 1, "keys is 1"),
    Unused(("variance_weight", "variance_ramp"), lambda c: c.positives != "joint", "each key has a term of its own"),
    Unused(("variance_ramp",), lambda c: c.variance_weight == 0, "variance_weight is 0"),
    Unused(("key_chunks",), lambda c: c.key_encoder == "online", "key_encoder is online"),
)

# JCL's ablations on ImageNet-100: ResNet-18, 0.1 at a batch of 128, 100 epochs, the queue of all its experiments.
ABLATIONS: Patch = {"backbone": "resnet18", "base_lr": 0.2, "epochs": 100, "queue_size": 65536}

JCL = About(
    title="infinitely many keys of an image, by the variance of a few",
    paper="Cai et al., JCL, NeurIPS 2020",
    needs="1 + M' views, a queue, a slow copy; no labels",
    defaults={**MOCO_V2, "keys": 4, "positives": "joint", "variance_weight": 2.0},
    recipes={**small("moco-v2-small"), "imagenet100": {**ABLATIONS, "keys": 5, "variance_weight": 4.0}},
)

VANILLA = About(
    title="several keys of an image, each with a term of its own",
    paper="Cai et al., JCL, NeurIPS 2020, section 2 of the supplement",
    needs="1 + M views, a queue, a slow copy; no labels",
    defaults={**MOCO_V2, "keys": 4, "positives": "each"},  # as many as JCL has
    recipes={**small("moco-v2-small"), "imagenet100": {**ABLATIONS, "keys": 5}},
)
