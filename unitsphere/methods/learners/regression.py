"""The regression family: predict what a slow copy says of other views of the same image.

There are no negatives. BYOL has two views; MSBReg has K, whose centroids meet, and forces that spread the embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unitsphere.common.devices import on_side_stream
from unitsphere.methods.learners.dispersion import Dispersion
from unitsphere.methods.learners.learner import Inputs, Learner, Moment, StepOutput
from unitsphere.modules.encoder import Projection, not_half
from unitsphere.modules.slow_copy import follow, momentum_at, slow_copy
from unitsphere.objectives.regression import centroid_distance, centroid_loss, image_spread, pair_distance


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
        self.dispersion = dispersion or Dispersion()
        self.joint_statistics = joint_statistics

    @property
    def networks(self) -> list[nn.Module]:
        return [*super().networks, self.predictor]

    def inputs(self, n: int, moment: Moment, generator: torch.Generator) -> dict[str, Tensor]:
        """key_momentum: now; and those of the dispersion."""
        momentum = momentum_at(moment.step, moment.steps, self.key_momentum, self.momentum_schedule)
        return {"key_momentum": torch.tensor(momentum), **self.dispersion.inputs(generator)}

    def forward(self, views: Sequence[Tensor], inputs: Inputs | None = None) -> StepOutput:
        assert self.slow is not None and inputs is not None
        predictions = self.embed(lambda images: self.predictor(self.online(images)), views)
        with on_side_stream(predictions.device) as wait:  # beside the target, which fills the card
            forces = self.dispersion(predictions, inputs)
        with torch.no_grad():
            targets = self.embed(self.slow, views)
        wait()
        attraction = centroid_loss(predictions, targets, self.centroid)
        loss = torch.stack([attraction, *forces.values()]).sum()
        health = self.health(predictions.detach(), targets) | {"loss": attraction}
        if forces:
            health |= {**forces, "total_loss": loss}
        return StepOutput(
            loss,
            {name: value.detach() for name, value in health.items()},
            predictions[:, 0].detach(),
            {"key_momentum": inputs["key_momentum"]},
        )

    def embed(self, network: Callable[[Tensor], Tensor], views: Sequence[Tensor]) -> Tensor:
        """Unit vectors (n, K, D) of K views (n, C, H, W), in float32."""
        if self.joint_statistics:
            outputs = list(network(torch.cat(list(views))).chunk(len(views)))
        else:
            outputs = [network(view) for view in views]
        return F.normalize(not_half(torch.stack(outputs, dim=1)), dim=2)

    def finish(self, step: StepOutput) -> None:
        """The target follows what the optimiser has made of the network."""
        assert self.slow is not None
        follow(self.slow, self.online, step.keep["key_momentum"])

    def health(self, predictions: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The picture of particles: how far the views of an image are from each other (alignment) and from their
        centroid, how far the centroids of online and target are apart."""
        return {
            "alignment": pair_distance(predictions),
            "image_spread": image_spread(predictions),
            "centroid_distance": centroid_distance(predictions, targets),
        }
