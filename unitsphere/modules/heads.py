"""Projection heads: from the backbone's features to the space of the loss."""

from __future__ import annotations

from torch import nn

from unitsphere.modules.image_norms import use_norm
from unitsphere.modules.names import Norm
from unitsphere.modules.norms import batch_norms

__all__ = ["projection_head"]


def projection_head(kind: str, features: int, dim: int, hidden: int | None = None, norm: Norm = "batch") -> nn.Module:
    """A head by name; hidden is as wide as the features unless given. norm: of the heads that have one.

    linear (MoCo v1); mlp (MoCo v2): fc-ReLU-fc; mlp-bn (SimCLR): fc-BN-ReLU-fc, the first without the bias that the
    norm undoes; mlp-bn-bn (SiMo): fc-BN-ReLU-fc-BN, no biases, weights from N(0, 0.01); byol: fc-BN-ReLU-fc, the
    first with a bias and the last without, as in its released code.
    """
    head = _projection_head(kind, features, dim, hidden or features)
    if batch_norms(head):  # one without norms keeps none
        use_norm(head, norm)
    return head


def _projection_head(kind: str, features: int, dim: int, hidden: int) -> nn.Module:
    if kind == "linear":
        return nn.Linear(features, dim)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, dim))
    first = nn.Linear(features, hidden, bias=kind == "byol")
    begin = (first, nn.BatchNorm1d(hidden), nn.ReLU(inplace=True))
    if kind == "byol":
        return nn.Sequential(*begin, nn.Linear(hidden, dim, bias=False))
    if kind == "mlp-bn":
        return nn.Sequential(*begin, nn.Linear(hidden, dim))
    if kind == "mlp-bn-bn":
        last = nn.Linear(hidden, dim, bias=False)
        for layer in (first, last):
            nn.init.normal_(layer.weight, std=0.01)
        return nn.Sequential(*begin, last, nn.BatchNorm1d(dim))
    raise ValueError(f"head {kind!r}: known are linear, mlp, mlp-bn, mlp-bn-bn, byol")
