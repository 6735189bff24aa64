"""What every method is: views in, a loss and signs of health out, and a memory that moves when the step is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Inputs = Mapping[str, Tensor]


class Moment(NamedTuple):
    """Where in its run a step lies, for what changes over time. All from 0."""

    step: int
    steps: int
    epoch: int
    epochs: int


@dataclass(frozen=True)
class Step:
    """What a step of a method gives: the loss to minimise, and signs of health as scalars on the device."""

    loss: Tensor
    health: dict[str, Tensor]
    embedding: Tensor  # (N, dim), of the first view, without gradient
    keep: dict[str, Tensor] = field(default_factory=dict)  # what the memory takes when the step is over


class Encoder(nn.Module):
    """A backbone and a head; images (N, C, H, W) to unit vectors (N, dim) in float32."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.head(self.backbone(images)).float(), dim=1)


class Projection(Encoder):
    """The same before it is normalised, for what reads on from there."""

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images)).float()


class Method(nn.Module):
    """A method holds its networks and its memory.

    online: what takes a gradient. slow: its moving average, where there is one.
    views: how many views of an image a step takes. labels: whether it takes the images' labels too.
    """

    online: nn.Module
    slow: nn.Module | None
    views: int
    labels: bool = False

    @property
    def backbone(self) -> nn.Module:
        return self.online.backbone  # type: ignore[return-value]

    @property
    def networks(self) -> list[nn.Module]:
        """The parts that are worth compiling."""
        return [network for network in (self.online, self.slow) if network is not None]

    def inputs(self, n: int, moment: Moment, generator: torch.Generator) -> dict[str, Tensor]:
        """What a step needs beside the views, on the CPU, drawn for the n images of the whole batch over all ranks.
        Tensors only, of the same shapes each time: a recorded step reads them from where the last ones were."""
        return {}

    def forward(self, views: Sequence[Tensor], inputs: Inputs | None = None) -> Step:
        """views: (n, C, H, W) each, of this rank's images; inputs: of `inputs`, on their device."""
        raise NotImplementedError

    def finish(self, step: Step) -> None:
        """After the optimiser."""

    def phase(self, moment: Moment) -> int:
        """A number that changes when the step becomes another computation, so that a recording is made anew."""
        return 0
