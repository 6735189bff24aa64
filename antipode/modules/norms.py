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

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def __init__(self, num_features: int, groups: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        at_once = torch.compiler.is_compiling() and len(x) % self.groups == 0
        return self.all_groups(x) if at_once else self.group_by_group(x)

    def group_by_group(self, x: Tensor) -> Tensor:
        """torch's own batch norm for each group: quick where each call is cheap."""
        means = self.running_mean.new_zeros(self.groups, self.num_features)
        variances = torch.zeros_like(means)
        # With momentum 1 batch_norm leaves the group's own statistics where it would keep the running ones.
        parts = [
            F.batch_norm(part, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
            for part, mean, variance in zip(
                x.tensor_split(self.groups), means.unbind(), variances.unbind(), strict=True
            )
        ]
        self.track(means, variances)
        return torch.cat(parts)

    def all_groups(self, x: Tensor) -> Tensor:
        """The same for all groups together, in operations that a compiler fuses (and that are slow without one)."""
        grouped = x.to(self.weight.dtype).unflatten(0, (self.groups, -1))  # (G, n, C, H, W)
        variance, mean = torch.var_mean(grouped, dim=(1, 3, 4), correction=0)  # (G, C)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        count = x.numel() // (self.groups * self.num_features)
        self.track(mean.detach(), variance.detach() * (count / (count - 1)))
        wide = (slice(None), None, slice(None), None, None)
        return (grouped * scale[wide] + shift[wide]).to(x.dtype).flatten(0, 1)

    @torch.no_grad()
    def track(self, means: Tensor, variances: Tensor) -> None:
        """Move the running statistics; means, variances: (G, C), the latter unbiased."""
        self.num_batches_tracked += 1
        self.running_mean.lerp_(means.mean(0), self.momentum)
        self.running_var.lerp_(variances.mean(0), self.momentum)


def group_batch_norms(module: nn.Module, groups: int) -> int:
    """Replace every BatchNorm2d inside by a grouped one with the same parameters and buffers, in place.

    Returns how many there were. Relatives of BatchNorm2d, and those without parameters or statistics, stay.
    """
    replaced = 0
    for name, child in module.named_children():
        if type(child) is nn.BatchNorm2d and child.affine and child.track_running_stats:
            grouped = GroupedBatchNorm2d(child.num_features, groups, child.eps, child.momentum or 0.1)
            grouped.load_state_dict(child.state_dict())
            setattr(module, name, grouped)
            replaced += 1
        else:
            replaced += group_batch_norms(child, groups)
    return replaced
