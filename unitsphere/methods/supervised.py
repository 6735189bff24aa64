"""Cross-entropy with the images' labels: what all methods without labels are measured against."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from unitsphere.methods.method import Inputs, Method, Projection, Step, not_half


class Supervised(Method):
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

    def forward(self, views: Sequence[Tensor], inputs: Inputs | None = None) -> Step:
        assert inputs is not None
        features, labels = self.online(views[0]), inputs["labels"]
        scores = not_half(self.classifier(features))
        loss = F.cross_entropy(scores, labels)
        accuracy = (scores.detach().argmax(dim=1) == labels).float().mean()
        return Step(loss, {"loss": loss.detach(), "accuracy": accuracy}, features.detach())
