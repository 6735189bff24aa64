"""A backbone and a head as one network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def not_half(x: Tensor) -> Tensor:
    """In float32 at least: what follows is no matter for half precision."""
    return x if x.dtype == torch.float64 else x.float()


class Encoder(nn.Module):
    """A backbone and a head; images (N, C, H, W) to unit vectors (N, dim), in float32 at least."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(not_half(self.head(self.backbone(images))), dim=1)


class Projection(Encoder):
    """The same before it is normalised, for what reads on from there."""

    def forward(self, images: Tensor) -> Tensor:
        return not_half(self.head(self.backbone(images)))
