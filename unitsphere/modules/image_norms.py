"""Norms that look at one image at a time, in the place of batch normalisation."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from unitsphere.common.errors import UsageError
from unitsphere.modules.backbones import SmallStemConv, StemConv
from unitsphere.modules.names import NORMS
from unitsphere.modules.norms import batch_norms, is_batch_norm


def use_norm(module: nn.Module, name: str, groups: int = 32) -> None:
    """Give a network another norm than batch normalisation, in place; the parameters stay, under their names.

    batch: nothing changes. layer: each image is normalised over all its channels and places. group: over its places
    and each of `groups` parts of its channels (Wu & He); where the channels do not divide so, over as many parts as
    divide both. standardised: group, and the layers before the norms have standardised weights (Qiao et al.), which is
    how the authors do without batches. A vector has no places, and a part of it too few numbers: it is normalised as
    a whole (layer) in each case.
    """
    if name not in NORMS:
        raise ValueError(f"norm {name!r}: known are {', '.join(NORMS)}")
    if name == "batch":
        return
    found = batch_norms(module)
    others = {type(m).__name__ for m in module.modules() if isinstance(m, _BatchNorm) and not is_batch_norm(m)}
    if others or not found:
        has = f"has {', '.join(sorted(others))}, whose place it cannot take" if others else "has no BatchNorm"
        raise UsageError(f"norm: given {name}, but the network {has}. Use batch, or a network with torch's BatchNorm.")
    if name == "standardised":
        standardise_weights(module)
    for parent, place, norm in found:
        parts = 1 if name == "layer" else math.gcd(groups, norm.num_features)
        other = (
            nn.LayerNorm(norm.num_features, eps=norm.eps)
            if isinstance(norm, nn.BatchNorm1d)
            else nn.GroupNorm(parts, norm.num_features, eps=norm.eps)
        )
        other.weight, other.bias = norm.weight, norm.bias  # None where it has none
        setattr(parent, place, other)


def standardise_weights(module: nn.Module) -> None:
    """Standardise, in place, the weights of each layer that stands right before a batch norm: the scale that this
    takes from its outputs, the norm takes anyway. Other layers, such as a head's last, keep theirs."""
    leaves = [leaf for leaf in module.modules() if not list(leaf.children())]
    for layer, norm in pairwise(leaves):
        if type(layer) in STANDARDISED and is_batch_norm(norm):
            layer.__class__ = STANDARDISED[type(layer)]  # the same layer and parameters, with another forward


def standardised(weight: Tensor) -> Tensor:
    """(O, ...): each output's weights with mean 0 and variance 1."""
    return F.layer_norm(weight, weight.shape[1:])


class StandardisedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, standardised(self.weight), self.bias)


class StandardisedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, standardised(self.weight), self.bias)


class StandardisedStemConv(StandardisedConv, StemConv):
    """The stem's own way of convolving, with standardised weights."""


class StandardisedSmallStemConv(StandardisedConv, SmallStemConv):
    """The small stem's own way of convolving, with standardised weights."""


STANDARDISED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: StandardisedLinear,
    nn.Conv2d: StandardisedConv,
    StemConv: StandardisedStemConv,
    SmallStemConv: StandardisedSmallStemConv,
}
