"""Cross-entropy with the images' labels: what all methods without labels are measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unitsphere.methods.learners.learner import Inputs, Learner, StepOutput
from unitsphere.modules.encoder import Projection


class SupervisedLearner(Learner):
    """One view, a linear classifier on the backbone's features.

    encoder: images to features (N, F). inputs: labels (n,) int64, from the loop.
    """

    labels = True
    views = 1

    def __init__(self, encoder: Projection, classifier: nn.Module) -> None:
        super().__init__()
        self.online = encoder
        self.slow = None
        self.classifier = classifier

    def forward(self, views: Sequence[Tensor], inputs: Inputs | None = None) -> StepOutput:
        assert inputs is not None
        features, labels = self.online(views[0]), inputs["labels"]
        scores = self.classifier(features)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        loss = F.cross_entropy(scores, labels)
        accuracy = (scores.detach().argmax(dim=1) == labels).float().mean()
        return StepOutput(loss, {"loss": loss.detach(), "accuracy": accuracy}, features.detach())
