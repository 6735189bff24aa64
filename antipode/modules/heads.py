"""Projection heads: from the backbone's features to the space of the loss."""

from __future__ import annotations

from torch import nn


def projection_head(kind: str, features: int, dim: int, hidden: int | None = None) -> nn.Module:
    """`linear` (MoCo v1) or `mlp` (MoCo v2: fc-ReLU-fc, hidden as wide as the features unless given)."""
    if kind == "linear":
        return nn.Linear(features, dim)
    if kind == "mlp":
        hidden = hidden or features
        return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, dim))
    raise ValueError(f"head {kind!r}: known are linear, mlp")
