"""The contrastive family: a query, its keys, and a set of negatives. MoCo, SimCLR, EqCo, SiMo, JCL and MoCHi combine.

Where the keys come from, how many there are, where the negatives come from and how they weigh: each is a field, so that
every method of the family takes the fields of all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from unitsphere.config.fields import Count, Positive, Section
from unitsphere.config.layers import Patch
from unitsphere.config.sizing import Facts, power_of_two
from unitsphere.config.unused import Unused
from unitsphere.methods import eqco, jcl, mochi
from unitsphere.methods.declaration import Method
from unitsphere.methods.embedding import (
    EMBEDDING_UNUSED,
    DispersionFields,
    EmbeddingConfig,
    EmbeddingFields,
    build_head,
    dispersion,
)

if TYPE_CHECKING:
    from torch import nn

    from unitsphere.methods.learners.contrastive import ContrastiveLearner
    from unitsphere.methods.learners.learner import Learner

__all__ = ["ContrastiveConfig", "ContrastiveMethod"]


class ContrastiveFields(Section):
    """Contrastive learning"""

    temperature: Positive = Field(0.2, description="scores are divided by it")
    key_encoder: Literal["slow", "online"] = Field("slow", description="online: keys take a gradient too (SimCLR)")
    negatives_from: Literal["queue", "batch"] = Field("queue", description="batch: keys of the batch's other images")
    queue_size: Count = Field(65536, description="keys kept as negatives")
    negatives: Count | None = Field(
        None, description="K, negatives that a query meets, drawn from those at hand; default: all of them"
    )
    shared_draw: bool = Field(False, description="draw the K negatives once a step for all queries, not for each")
    both_views: bool = Field(False, description="negatives of the batch are of both views, not of the key's alone")
    alpha: Annotated[float, Field(gt=0, le=1e30)] | None = Field(
        None, description="EqCo: weigh the negatives as if there were so many; default: K"
    )
    alpha_on: Literal["all", "real"] = Field("all", description="real: mixed negatives are not weighed by alpha")
    symmetric: bool = Field(False, description="each view is query once and key once; the two losses add")
    oracle: bool = Field(False, description="negatives of the image's own class do not count (needs labels)")


class ContrastiveConfig(mochi.MixingFields, jcl.JointFields, ContrastiveFields, EmbeddingConfig):
    """A contrastive run, in full."""

    def problems(self, sizes_are_known: bool) -> Iterator[str]:
        yield from super().problems(sizes_are_known)
        yield from jcl.problems(self)
        yield from mochi.problems(self)
        if self.key_encoder == "online" and (self.negatives_from == "queue" or self.keys > 1 or self.symmetric):
            yield (
                "key_encoder: online takes negatives_from batch and one key, and asks both ways as it is: leave out "
                "symmetric"
            )
        if self.both_views and self.key_encoder != "online":
            yield "both_views: it is for key_encoder online; a slow copy encodes the key's view alone"
        if self.accumulate > 1 and self.negatives_from == "batch":
            yield "accumulate: with negatives_from batch the negatives are the batch: it must come at once"
        if self.key_encoder == "online" and self.bn_groups > 1 and sizes_are_known:
            yield f"bn_groups: given {self.bn_groups}; with key_encoder online both views share one: use 1"

    @property
    def needs_labels(self) -> bool:
        return self.oracle

    @property
    def notes(self) -> list[str]:
        in_batch = 2 * self.batch_size - 2 if self.both_views else self.batch_size - 1
        at_hand = self.queue_size if self.negatives_from == "queue" else in_batch
        found = super().notes
        if self.negatives is not None and self.negatives > at_hand:
            found.append(f"negatives: {self.negatives} asked for, and all {at_hand} at hand are taken.")
        return [*found, *mochi.notes(self, min(at_hand, self.negatives or at_hand))]

    @property
    def memory_advice(self) -> Mapping[str, object]:
        return {**super().memory_advice, "queue_size": self.queue_size}


class ContrastiveMethod(Method):
    """A named point of the family. A loss of one's own for it is a subclass whose `learner` overrides `objective`."""

    family = "contrastive"
    learner: type[ContrastiveLearner] | None = None  # by default the family's own
    Config = ContrastiveConfig
    sections = (EmbeddingFields, ContrastiveFields, jcl.JointFields, mochi.MixingFields, DispersionFields)
    has_embedding_head = True
    unused = (
        *mochi.UNUSED,
        *eqco.UNUSED,
        *jcl.UNUSED,
        Unused(("queue_size",), lambda c: c.negatives_from == "batch", "negatives_from is batch"),
        Unused(("key_momentum", "momentum_schedule"), lambda c: c.key_encoder == "online", "key_encoder is online"),
        *EMBEDDING_UNUSED,
    )

    def size(self, sizes: Patch, facts: Facts, given: Mapping[str, Any]) -> Patch:
        """The queue is at most half of the images: a larger one holds every image's own old keys as negatives. The
        slow copy of a short run must be quicker, or it never leaves its starting point."""
        own, batch = self.about.defaults, sizes["batch_size"]
        queue_size = power_of_two(facts.count / 2, min(batch, 65536), 65536)
        steps = sizes["epochs"] * (facts.count // batch)
        return {
            "queue_size": queue_size,
            "key_momentum": quick(steps, own),
            **eqco.size(queue_size, own),
            **mochi.size(queue_size, sizes["epochs"], own),
        }

    def follow(self, values: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Patch]:
        """K drawn negatives are of a queue of K keys or, where a batch is larger, of the last batch (EqCo 2.3)."""
        found: dict[str, Patch] = {}
        if values["negatives"] is not None and "queue_size" not in named:
            words = f"{values['negatives']} negatives"
            found[words] = {"queue_size": max(values["negatives"], values["batch_size"])}
        if 0 < values["epochs"] <= values["mixing_warmup"] and "mixing_warmup" not in named:
            found[f"shortened to fit {values['epochs']} epochs"] = {"mixing_warmup": values["epochs"] // 10}
        return found

    def build(self, config: ContrastiveConfig, backbone: nn.Module, features: int) -> Learner:
        from unitsphere.common.randomness import generator
        from unitsphere.methods.learners.contrastive import ContrastiveLearner, LossSettings
        from unitsphere.methods.learners.key_encoder import KeyEncoder
        from unitsphere.methods.learners.negatives import NegativeSource
        from unitsphere.modules.encoder import Encoder
        from unitsphere.modules.norms import part_batch_norms
        from unitsphere.modules.queue import KeyQueue

        encoder = Encoder(backbone, build_head(config, features))
        # Groups keep both directions of a symmetric loss apart, so that one pass can hold them both.
        at_once = config.symmetric and config.bn_groups > 1
        part_batch_norms(encoder, config.bn_groups, batches=2 if at_once else 1)
        loss = LossSettings(
            config.temperature,
            alpha=config.alpha,
            alpha_on=config.alpha_on,
            variance_weight=config.variance_weight,
            variance_ramp=config.variance_ramp,
            positives=config.positives,
            symmetric=config.symmetric,
        )
        key_encoder = None
        if config.key_encoder == "slow":
            key_encoder = KeyEncoder(
                config.key_momentum,
                config.momentum_schedule,
                keys=config.keys,
                shuffles=config.bn_groups > 1,
                chunks=jcl.key_chunks(config),
                at_once=at_once,
            )
        negatives = NegativeSource(
            config.negatives,
            shared_draw=config.shared_draw,
            both_views=config.both_views,
            oracle=config.oracle,
            normalise_mean=config.normalise_mean,
        )
        queue = None
        if config.negatives_from == "queue":
            random = generator(config.seed, "queue")
            queue = KeyQueue(config.queue_size, config.dim, labelled=config.oracle, generator=random)
        return (self.learner or ContrastiveLearner)(
            encoder,
            loss,
            key_encoder,
            negatives,
            queue,
            mixing=mochi.mixing(config),
            mixing_warmup=config.mixing_warmup,
            dispersion=dispersion(config),
        )


def quick(steps: int, defaults: Patch) -> float:
    """The momentum of a slow copy that follows within a run of so many steps."""
    return min(0.99 if steps < 50_000 else 0.999, defaults.get("key_momentum", 0.999))
