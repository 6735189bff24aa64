"""The fields of every method whose loss sees embeddings: the head, the slow copy, and MSBReg's forces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from unitsphere.config.config import Config
from unitsphere.config.fields import Count, NotNegative, Probability, Section
from unitsphere.config.unused import UNUSED, Unused
from unitsphere.modules.names import Norm

if TYPE_CHECKING:
    from torch import nn

    from unitsphere.methods.learners.dispersion import Dispersion

__all__ = ["DispersionFields", "EmbeddingConfig", "EmbeddingFields"]


class EmbeddingFields(Section):
    """The embedding that the loss sees, and its slow copy"""

    head: Literal["linear", "mlp", "mlp-bn", "mlp-bn-bn", "byol"] = Field(
        "mlp", description="projection head; with batch norm after its first layer, or after both; or BYOL's"
    )
    hidden: Count | None = Field(None, description="width of the mlp head; default: as wide as the features")
    dim: Count = Field(128, description="dimensions of the embedding")
    head_norm: Norm = Field("batch", description="norm of the heads that have one; default: the backbone's")
    key_momentum: Probability = Field(0.999, description="how slowly the slow copy follows, at first")
    momentum_schedule: Literal["constant", "cosine"] = Field(
        "constant", description="cosine: key_momentum grows to 1 over the run (BYOL)"
    )


class DispersionFields(Section):
    """Forces that spread embeddings, for any loss of embeddings (MSBReg; reconstructed from its supplement)"""

    singular_weight: NotNegative = Field(
        0.0, description="lambda_s, of the singular value loss; nuclear pushes as the root of a step's images x views"
    )
    singular_form: Literal["nuclear", "gram", "correlation"] = Field("nuclear", description="form of that loss")
    brownian_weight: NotNegative = Field(0.0, description="lambda_b, of the Brownian loss: a random force")
    brownian_per_view: bool = Field(False, description="a force for each view, not for each image")
    uniformity_weight: NotNegative = Field(0.0, description="of Wang & Isola's uniformity loss")


class EmbeddingConfig(DispersionFields, EmbeddingFields, Config):
    """What every method has whose loss sees embeddings."""

    def problems(self, sizes_are_known: bool) -> Iterator[str]:
        yield from super().problems(sizes_are_known)
        for name in ("singular_weight", "uniformity_weight"):
            if self.accumulate > 1 and getattr(self, name):
                yield f"accumulate: the loss of {name} compares all images of a batch: it must come at once"

    @property
    def reconstructed(self) -> list[str]:
        return reconstructed(self.model_dump())


def reconstructed(values: Mapping[str, Any]) -> list[str]:
    """Name the losses of a configuration whose formulas are reconstructed from MSBReg's supplement."""
    found = ["centroids"] if values.get("view_count", 2) > 2 else []
    return found + [f"{name}_loss" for name in ("singular", "brownian") if values.get(f"{name}_weight")]


def build_head(config: EmbeddingConfig, features: int) -> nn.Module:
    """Build the projection head. features: its input's dimensions."""
    from unitsphere.modules.heads import projection_head

    return projection_head(config.head, features, config.dim, config.hidden, config.head_norm)


def dispersion(config: EmbeddingConfig) -> Dispersion:
    """Build the forces that spread embeddings."""
    from unitsphere.methods.learners.dispersion import Dispersion

    return Dispersion(**{name: getattr(config, name) for name in DispersionFields.model_fields})


def one_view(config: Any) -> bool:
    """Whether the loss has a gradient for one view of an image alone."""
    return getattr(config, "key_encoder", None) == "slow" and not config.symmetric


EMBEDDING_UNUSED = (
    Unused(("hidden",), lambda c: c.head == "linear", "head is linear"),
    Unused(("head_norm",), lambda c: c.head in ("linear", "mlp"), "this head has no norm"),
    Unused(("singular_form",), lambda c: c.singular_weight == 0, "singular_weight is 0"),
    Unused(("brownian_per_view",), lambda c: c.brownian_weight == 0, "brownian_weight is 0"),
    Unused(("brownian_per_view",), one_view, "the loss moves one view of an image"),
    *UNUSED,
)
