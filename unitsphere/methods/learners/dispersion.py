"""Forces that spread the embeddings of a batch, for any method whose loss sees embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from unitsphere.common.distributed import gather_with_gradient, rank
from unitsphere.common.randomness import lots, uniform
from unitsphere.methods.learners.learner import Inputs
from unitsphere.objectives.geometry import uniformity
from unitsphere.objectives.regression import SINGULAR_LOSSES, brownian_loss


@dataclass(frozen=True)
class Dispersion:
    """Weights of MSBReg's singular value and Brownian losses and of the uniformity loss; 0 leaves one out."""

    singular_weight: float = 0.0
    singular_form: str = "nuclear"
    brownian_weight: float = 0.0
    brownian_per_view: bool = False
    uniformity_weight: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.singular_weight or self.brownian_weight or self.uniformity_weight)

    def inputs(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw brownian_seed: it decides the random forces, which are made on the device for each rank's own images."""
        return {"brownian_seed": torch.randint(2**62, (), generator=generator)} if self.brownian_weight else {}

    def __call__(self, embeddings: Tensor, inputs: Inputs) -> dict[str, Tensor]:
        """Compute the weighted losses by name; their sum is to be added to the method's own loss.

        embeddings: (n, K, D), unit vectors of the K views of this rank's images, with their gradient. Singular values
        and uniformity are of the whole batch over all ranks; uniformity is between images, so within each view.
        """
        losses = {}
        with torch.autocast(embeddings.device.type, enabled=False):
            if self.brownian_weight:
                seed, place = inputs["brownian_seed"], inputs.get("place", rank())
                directions = brownian_directions(seed, embeddings, per_view=self.brownian_per_view, place=place)
                losses["brownian_loss"] = self.brownian_weight * brownian_loss(embeddings, directions)
            if self.singular_weight or self.uniformity_weight:
                embeddings = gather_with_gradient(embeddings)
            if self.singular_weight:
                singular = SINGULAR_LOSSES[self.singular_form](embeddings.flatten(0, 1))
                losses["singular_loss"] = self.singular_weight * singular
            if self.uniformity_weight:
                losses["uniformity_loss"] = self.uniformity_weight * uniformity(embeddings.transpose(0, 1)).mean()
        return losses


def brownian_directions(seed: Tensor, like: Tensor, *, per_view: bool = False, place: Tensor | int = 0) -> Tensor:
    """Draw directions uniformly on the sphere (mean 0, covariance I/D): (n, 1, D), or (n, K, D) per view.

    like: the embeddings (n, K, D); place: which of the parts of that size of the whole batch they are. A direction is a
    Gaussian vector, normalised: the inverse of the normal distribution gives its entries, up to a factor.
    """
    n, views, dim = like.shape
    parts = views if per_view else 1
    rows = place * n * parts + torch.arange(n * parts, device=like.device)
    entries = torch.erfinv(2 * uniform(lots(seed, rows, dim)) - 1)
    return F.normalize(entries, dim=1).view(n, parts, dim).to(like.dtype)
