"""The regression family: predict what a slow copy says of other views of the same image.

There are no negatives. BYOL has two views; MSBReg has K, whose centroids meet, and forces that spread the embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unitsphere.common.devices import on_side_stream
from unitsphere.methods.learners.dispersion import Dispersion
from unitsphere.methods.learners.learner import Inputs, Learner, Moment, StepOutput
from unitsphere.modules.encoder import Projection
from unitsphere.modules.slow_copy import follow, momentum_at, slow_copy
from unitsphere.objectives.regression import centroid_distance, centroid_loss, image_spread, pair_distance

__all__ = ["RegressionLearner"]


class RegressionLearner(Learner):
    """One step of the family.

    encoder: images to projections (N, dim), not normalised. predictor: projection to prediction, on the online side
    alone. key_momentum: how slowly the target follows, with the cosine schedule ever more so. centroid: which
    centroids of views meet (objectives/regression.py).
    joint_statistics: all K views go through a network in one batch. By default they go one by one, as in BYOL's
    released code: views of different policies have different statistics, and in one batch the statistics of a view
    would tell of the others that it is to predict.
    """

    def __init__(
        self,
        encoder: Projection,
        predictor: nn.Module,
        *,
        views: int = 2,
        key_momentum: float,
        momentum_schedule: str = "constant",
        centroid: str = "others",
        dispersion: Dispersion | None = None,
        joint_statistics: bool = False,
    ) -> None:
        super().__init__()
        self.online = encoder
        self.predictor = predictor
        self.slow = slow_copy(encoder)
        self.views = views
        self.key_momentum, self.momentum_schedule = key_momentum, momentum_schedule
        self.centroid = centroid
        self.dispersion = dispersion or None
        self.joint_statistics = joint_statistics

    @property
    def networks(self) -> list[nn.Module]:
        return [*super().networks, self.predictor]

    def inputs(self, n: int, moment: Moment, generator: torch.Generator) -> dict[str, Tensor]:
        """Give key_momentum: now; and what the dispersion needs."""
        momentum = momentum_at(moment.step, moment.steps, self.key_momentum, self.momentum_schedule)
        forces = {} if self.dispersion is None else self.dispersion.inputs(generator)
        return {"key_momentum": torch.tensor(momentum), **forces}

    def forward(self, views: Sequence[Tensor], inputs: Inputs | None = None) -> StepOutput:
        assert self.slow is not None and inputs is not None
        # The network predicts, for each view, what the slow copy says of the others.
        predictions = self.embed([self.online, self.predictor], views)
        forces = {}
        if self.dispersion is not None:
            with on_side_stream(predictions.device) as wait:  # while the slow copy fills the card
                forces = self.dispersion(predictions, inputs)
        with torch.no_grad():
            targets = self.embed([self.slow], views)

        # The loss: centroids of predictions and targets meet; forces spread the predictions.
        attraction = centroid_loss(predictions, targets, self.centroid)
        if forces:
            wait()
        loss = torch.stack([attraction, *forces.values()]).sum()

        # Signs of health: how far the views of an image are from each other and from their centroid, and the centroids
        # of online network and slow copy from each other.
        apart = predictions.detach()
        health = {
            "alignment": pair_distance(apart),
            "image_spread": image_spread(apart),
            "centroid_distance": centroid_distance(apart, targets),
            "loss": attraction,
        }
        if forces:
            health |= {**forces, "total_loss": loss}
        # The slow copy moves when the step is over (`finish`).
        return StepOutput(
            loss,
            {name: value.detach() for name, value in health.items()},
            predictions[:, 0].detach(),
            {"key_momentum": inputs["key_momentum"]},
        )

    def embed(self, networks: Sequence[nn.Module], views: Sequence[Tensor]) -> Tensor:
        """Embed K views (n, C, H, W) by networks one after the other: unit vectors (n, K, D), in float32 at least."""
        batches = [torch.cat(list(views))] if self.joint_statistics else views
        outputs = []
        for x in batches:
            for network in networks:
                x = network(x)
            outputs.append(x)
        if self.joint_statistics:
            outputs = list(outputs[0].chunk(len(views)))
        embeddings = torch.stack(outputs, dim=1)
        return F.normalize(embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)), dim=2)

    def finish(self, step: StepOutput) -> None:
        """Move the slow copy towards what the optimiser has made of the network."""
        assert self.slow is not None
        follow(self.slow, self.online, step.keep["key_momentum"])
