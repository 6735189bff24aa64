"""The regression family: predict what a slow copy says of other views of the same image. BYOL and MSBReg."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from unitsphere.config.fields import Section
from unitsphere.config.layers import Patch
from unitsphere.config.sizing import Facts
from unitsphere.config.unused import Unused
from unitsphere.methods.contrastive import quick
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

    from unitsphere.methods.learners.learner import Learner

__all__ = ["RegressionConfig", "RegressionMethod"]


class RegressionFields(Section):
    """Regression: predict the slow copy's embedding of other views (BYOL, MSBReg)"""

    view_count: Annotated[int, Field(ge=2)] = Field(2, description="K, views of an image")
    centroid: Literal["others", "split", "all"] = Field(
        "others", description="which centroids of views meet: one view and all others, of two halves, all and all"
    )
    joint_statistics: bool = Field(False, description="all views in one batch, so in one set of batch statistics")
    lr_per_view: bool = Field(False, description="base_lr is multiplied by K (MSBReg)")


class RegressionConfig(RegressionFields, EmbeddingConfig):
    """A regression run, in full."""

    def problems(self, sizes_are_known: bool) -> Iterator[str]:
        yield from super().problems(sizes_are_known)
        if self.joint_statistics and self.bn_groups > 1 and sizes_are_known:
            yield f"joint_statistics: the views share one group; bn_groups is {self.bn_groups}: use 1"
        if self.accumulate > 1 and self.joint_statistics:
            yield "accumulate: with joint_statistics the views share the statistics of one batch: it must come at once"

    @property
    def learning_rate(self) -> float:
        scaled = super().learning_rate
        return scaled * self.view_count if self.lr_per_view and self.lr is None else scaled


class RegressionMethod(Method):
    """A named point of the family."""

    family = "regression"
    Config = RegressionConfig
    sections = (EmbeddingFields, RegressionFields, DispersionFields)
    has_embedding_head = True
    unused = (
        Unused(
            ("joint_statistics",),
            lambda c: "batch" not in (c.norm, c.head_norm),
            "no norm looks at more than one image",
        ),
        Unused(("lr_per_view",), lambda c: c.lr is not None, "lr is given"),
        *EMBEDDING_UNUSED,
    )

    def size(self, sizes: Patch, facts: Facts, given: Mapping[str, Any]) -> Patch:
        """The slow copy of a short run must be quicker. On a small backbone MSBReg's heads are 512 and 128 wide, as its
        supplement has it for ResNet-18."""
        own = self.about.defaults
        found: Patch = {"key_momentum": quick(sizes["epochs"] * (facts.count // sizes["batch_size"]), own)}
        small = given.get("backbone", sizes["backbone"]) in ("resnet18", "resnet-tiny")
        return found | ({"hidden": 512, "dim": 128} if small and own.get("brownian_weight") else {})

    def build(self, config: RegressionConfig, backbone: nn.Module, features: int) -> Learner:
        """The predictor is a projection head once more, from embedding to embedding."""
        from torch import nn

        from unitsphere.methods.learners.regression import RegressionLearner
        from unitsphere.modules.encoder import Projection
        from unitsphere.modules.norms import part_batch_norms

        encoder = Projection(backbone, build_head(config, features))
        predictor = build_head(config, config.dim)
        part_batch_norms(nn.ModuleList([encoder, predictor]), config.bn_groups)
        return RegressionLearner(
            encoder,
            predictor,
            views=config.view_count,
            key_momentum=config.key_momentum,
            momentum_schedule=config.momentum_schedule,
            centroid=config.centroid,
            dispersion=dispersion(config),
            joint_statistics=config.joint_statistics,
        )
