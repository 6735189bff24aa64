"""Batch normalisation over groups of the batch: ShuffleBN's equivalent on one device.

MoCo hides which images share batch statistics by shuffling the keys over the GPUs. On one device the same is
had by normalising contiguous groups of the batch separately, with the keys permuted; R groups on one device
are what R ranks with plain batch normalisation compute.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GroupedBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d whose training statistics are those of `groups` contiguous parts of the batch.

    The running statistics move towards the mean of the groups' statistics. In eval mode it is BatchNorm2d.
    """

    def __init__(self, num_features: int, groups: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        assert self.num_batches_tracked is not None and self.momentum is not None
        self.num_batches_tracked += 1
        parts, means, variances = [], [], []
        for part in x.tensor_split(self.groups):
            # Statistics start from zero with momentum 1, so that what batch_norm leaves there is the group's own.
            mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)  # type: ignore[arg-type]
            parts.append(F.batch_norm(part, mean, variance, self.weight, self.bias, True, 1.0, self.eps))
            means.append(mean)
            variances.append(variance)
        with torch.no_grad():
            self.running_mean.lerp_(torch.stack(means).mean(0), self.momentum)  # type: ignore[union-attr]
            self.running_var.lerp_(torch.stack(variances).mean(0), self.momentum)  # type: ignore[union-attr]
        return torch.cat(parts)


def group_batch_norms(module: nn.Module, groups: int) -> nn.Module:
    """Replace every BatchNorm2d inside by a grouped one with the same parameters and buffers, in place."""
    for name, child in module.named_children():
        if type(child) is nn.BatchNorm2d:
            grouped = GroupedBatchNorm2d(child.num_features, groups, child.eps, child.momentum or 0.1)
            grouped.load_state_dict(child.state_dict())
            setattr(module, name, grouped)
        else:
            group_batch_norms(child, groups)
    return module
