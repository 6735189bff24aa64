"""The base of all learners: views in, a loss and signs of health out, a memory that moves when the step is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unitsphere.common.distributed import rank
from unitsphere.modules.norms import refuse_shared_statistics, split_groups

__all__ = ["Learner", "Moment", "StepOutput"]

Inputs = Mapping[str, Tensor]


class Moment(NamedTuple):
    """Where a step lies in its run, for what changes over time. All numbers begin at 0."""

    step: int
    steps: int
    epoch: int
    epochs: int


@dataclass(frozen=True)
class StepOutput:
    """What a step gives.

    loss: to be minimised. health: scalars on the device, by name. embedding: (N, dim), of the first view, without
    gradient. keep: what the memory takes when the step is over (`Learner.finish`).
    """

    loss: Tensor
    health: dict[str, Tensor]
    embedding: Tensor
    keep: dict[str, Tensor] = field(default_factory=dict)


def joined(steps: Sequence[StepOutput]) -> StepOutput:
    """Join the steps of the equal parts of a batch: means of losses and signs; the memory is of the whole batch."""
    health = {name: torch.stack([step.health[name] for step in steps]).mean() for name in steps[0].health}
    loss = torch.stack([step.loss.detach() for step in steps]).mean()
    return StepOutput(loss, health, torch.cat([step.embedding for step in steps]), steps[-1].keep)


class Learner(nn.Module):
    """The networks and the memory of a method, and one step of its loss.

    online: the network that takes a gradient. slow: its moving average, or None.
    views: how many views of an image a step takes. labels: whether a step takes the images' labels too.
    parts: in how many parts the batch goes through the networks (`split`).
    """

    online: nn.Module
    slow: nn.Module | None
    views: int
    labels: bool = False
    parts: int = 1

    @property
    def backbone(self) -> nn.Module:
        return self.online.backbone  # type: ignore[return-value]

    @property
    def networks(self) -> list[nn.Module]:
        """List the networks that are worth compiling."""
        return [network for network in (self.online, self.slow) if network is not None]

    def inputs(self, n: int, moment: Moment, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw what a step needs beside the views, for the n images of the whole batch over all ranks.

        Returns tensors on the CPU, of the same shapes each time: a recorded step reads them from one place."""
        return {}

    def forward(self, views: Sequence[Tensor], inputs: Inputs | None = None) -> StepOutput:
        """Compute a step. views: (n, C, H, W) each, of this rank's images; inputs: of `inputs`, on the same device."""
        raise NotImplementedError

    def split(self, parts: int) -> None:
        """Accept batches that come in so many equal parts (gradient accumulation), to hold less at once.

        The mean of the parts' losses is the loss of the batch. The norms keep their groups, which must stay whole."""
        refuse_shared_statistics(self, parts)
        split_groups(self, parts)
        self.parts = parts

    def of_the_whole(self, views: Sequence[Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """Compute, without gradient, what each part of a batch needs of the whole of it, to join its inputs."""
        return {}

    def in_parts(self, views: Sequence[Tensor], inputs: Inputs) -> list[tuple[list[Tensor], Inputs]]:
        """Split this rank's views and inputs into parts. Each part is told its place in the whole batch."""
        shared = {**inputs, **self.of_the_whole(views, inputs)}
        found: list[tuple[list[Tensor], Inputs]] = []
        for number, part in enumerate(zip(*(view.chunk(self.parts) for view in views), strict=True)):
            own = {"place": torch.full((), rank() * self.parts + number, device=part[0].device)}
            if "labels" in inputs:
                own["labels"] = inputs["labels"].chunk(self.parts)[number]
            found.append((list(part), shared | own))
        return found

    def finish(self, step: StepOutput) -> None:
        """Move the memory, after the optimiser."""

    def phase(self, moment: Moment) -> int:
        """Give a number that changes when the step becomes another computation, which then is recorded anew."""
        return 0
