"""What may be said of a backbone and of images, whatever is then made of them. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from unitsphere.common.errors import check_word
from unitsphere.evaluation.settings import several

FEATURES = ("backbone", "embedding")


class Options(BaseModel):
    """The keywords that `unitsphere.evaluate()` and `unitsphere.embed()` share, and their options on the command
    line."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    features: Literal["backbone", "embedding"] = Field(
        "backbone", description="the backbone's output, or that of backbone and head (runs only)"
    )
    batch_size: int | None = Field(None, ge=1, description="images at once (default: 256; more on CUDA)")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    holdout: float | None = Field(
        None, ge=0, lt=1, description="share of the val split where the data has none (default: the run's, else 0.1)"
    )
    classes: Annotated[tuple[str, ...] | None, BeforeValidator(several)] = Field(
        None, description="only these classes, by name (default: the run's, on its data)"
    )
    max_broken: float | None = Field(
        None, ge=0, le=1, description="share of unreadable images that may be skipped (default: the run's)"
    )
    max_pixels: int = Field(
        100_000_000, ge=1, description="pixels that an image may be decoded to; one with more counts as unreadable"
    )


class Architecture(BaseModel):
    """The keywords that say what is not known of weights that are no run."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    backbone: str | None = Field(None, description="architecture (default: resnet50)")
    stem: Literal["imagenet", "small"] | None = Field(None, description="of a ResNet (default: imagenet)")
    image_size: int | None = Field(None, ge=1, description="input size (default: 224)")
    channels: int | None = Field(None, ge=1, description="input channels (default: 3)")


def check_features(features: str) -> None:
    """Raise UsageError where `features` names neither the backbone's nor the head's output."""
    check_word("features", features, FEATURES)
