"""What every method is: views in, a loss and signs of health out, and a memory that moves when the step is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unitsphere.common.distributed import rank
from unitsphere.modules.norms import refuse_shared_statistics, split_groups

Inputs = Mapping[str, Tensor]


class Moment(NamedTuple):
    """Where in its run a step lies, for what changes over time. All from 0."""

    step: int
    steps: int
    epoch: int
    epochs: int


@dataclass(frozen=True)
class StepOutput:
    """What a step of a method gives: the loss to minimise, and signs of health as scalars on the device."""

    loss: Tensor
    health: dict[str, Tensor]
    embedding: Tensor  # (N, dim), of the first view, without gradient
    keep: dict[str, Tensor] = field(default_factory=dict)  # what the memory takes when the step is over


def joined(steps: Sequence[StepOutput]) -> StepOutput:
    """The step of a batch that came in equal parts: means of what they measured; the memory is of the whole batch."""
    health = {name: torch.stack([step.health[name] for step in steps]).mean() for name in steps[0].health}
    loss = torch.stack([step.loss.detach() for step in steps]).mean()
    return StepOutput(loss, health, torch.cat([step.embedding for step in steps]), steps[-1].keep)


class Learner(nn.Module):
    """A method holds its networks and its memory.

    online: what takes a gradient. slow: its moving average, where there is one.
    views: how many views of an image a step takes. labels: whether it takes the images' labels too.
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
        """The parts that are worth compiling."""
        return [network for network in (self.online, self.slow) if network is not None]

    def inputs(self, n: int, moment: Moment, generator: torch.Generator) -> dict[str, Tensor]:
        """What a step needs beside the views, on the CPU, drawn for the n images of the whole batch over all ranks.
        Tensors only, of the same shapes each time: a recorded step reads them from where the last ones were."""
        return {}

    def forward(self, views: Sequence[Tensor], inputs: Inputs | None = None) -> StepOutput:
        """views: (n, C, H, W) each, of this rank's images; inputs: of `inputs`, on their device."""
        raise NotImplementedError

    def split(self, parts: int) -> None:
        """Batches come in so many equal parts from now on, to hold less at once: the mean of the parts' losses is the
        loss of the batch. The norms keep their groups, which must stay whole."""
        refuse_shared_statistics(self, parts)
        split_groups(self, parts)
        self.parts = parts

    def of_the_whole(self, views: Sequence[Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """What each part of a batch needs of the whole of it, without gradient: added to the inputs of each."""
        return {}

    def in_parts(self, views: Sequence[Tensor], inputs: Inputs) -> list[tuple[list[Tensor], Inputs]]:
        """The views and inputs of each part of this rank's images. place: which part of the whole batch it is."""
        shared = {**inputs, **self.of_the_whole(views, inputs)}
        found: list[tuple[list[Tensor], Inputs]] = []
        for number, part in enumerate(zip(*(view.chunk(self.parts) for view in views), strict=True)):
            own = {"place": torch.full((), rank() * self.parts + number, device=part[0].device)}
            if "labels" in inputs:
                own["labels"] = inputs["labels"].chunk(self.parts)[number]
            found.append((list(part), shared | own))
        return found

    def finish(self, step: StepOutput) -> None:
        """After the optimiser."""

    def phase(self, moment: Moment) -> int:
        """A number that changes when the step becomes another computation, so that a recording is made anew."""
        return 0
