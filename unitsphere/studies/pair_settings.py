"""The settings of a cell of EqCo's toy study. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from unitsphere.config.fields import Count, Positive, Section


class PairSettings(Section):
    """One cell. The defaults are the paper's; the width of the embedding it leaves open."""

    mutual_information: Positive = Field(description="of x and y, in nats")
    k: int = Field(ge=2, description="pairs in a batch: each x has K - 1 negatives")
    alpha: Positive | None = Field(None, description="EqCo's alpha; None is InfoNCE")
    dimensions: Count = 20
    hidden: Count = 256
    embedding: Count = 256
    lr: Positive = 5e-4
    steps: Count = 5000
    evaluations: Count = 1000
    seed: int = Field(0, ge=0)
