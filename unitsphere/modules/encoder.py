"""A backbone and a head as one network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Encoder", "Projection"]


class Encoder(nn.Module):
    """A backbone and a head; images (N, C, H, W) to unit vectors (N, dim), in float32 at least."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        x = self.head(self.backbone(images))
        return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=1)


class Projection(Encoder):
    """A backbone and a head; images (N, C, H, W) to the head's outputs (N, dim), in float32 at least."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.head(self.backbone(images))
        return x.to(torch.promote_types(x.dtype, torch.float32))
