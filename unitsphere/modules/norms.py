"""Batch normalisation over parts of the batch, or over the batch of all ranks.

MoCo hides which images share batch statistics by shuffling the keys over the GPUs. On one device the same is
had by normalising contiguous groups of the batch separately, with the keys permuted; R groups on one device
are what R ranks with plain batch normalisation compute. So the number of groups says what is computed, and the
number of ranks only where.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unitsphere.common.distributed import gather_with_gradient, world
from unitsphere.common.errors import UsageError

__all__ = ["GroupedBatchNorm", "SynchronisedBatchNorm", "part_batch_norms"]

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d
Part = TypeVar("Part")


class GroupedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm whose training statistics are those of `groups` contiguous parts of the batch.

    The running statistics move towards the mean of the groups' statistics. In eval mode it is torch's own.
    x: (N, C) or (N, C, H, W).
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def __init__(self, groups: int, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum)
        self.groups = groups

    def _check_input_dim(self, input: Tensor) -> None:
        pass

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
        rest = range(3, grouped.dim())
        variance, mean = torch.var_mean(grouped, dim=(1, *rest), correction=0)  # (G, C)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        count = x.numel() // (self.groups * self.num_features)
        self.track(mean.detach(), variance.detach() * (count / (count - 1)))
        wide = (slice(None), None, slice(None), *[None for _ in rest])
        return (grouped * scale[wide] + shift[wide]).to(x.dtype).flatten(0, 1)

    @torch.no_grad()
    def track(self, means: Tensor, variances: Tensor) -> None:
        """Move the running statistics; means, variances: (G, C), the latter unbiased."""
        self.num_batches_tracked += 1
        self.running_mean.lerp_(means.mean(0), self.momentum)
        self.running_var.lerp_(variances.mean(0), self.momentum)


class SynchronisedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalisation over the batch of all ranks, each of which has as many images. (torch's own refuses CPUs, so
    that what several GPUs compute could not be tested without them.)

    The ranks exchange mean and variance once; the variance of the whole is the mean of the variances plus the variance
    of the means.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or world() == 1:
            return super().forward(x)
        wide = [1, -1, *[1] * (x.dim() - 2)]
        exact = x.to(self.weight.dtype)
        variance, mean = torch.var_mean(exact, dim=[0, *range(2, x.dim())], correction=0)
        means, variances = gather_with_gradient(torch.stack([mean, variance])[None]).unbind(1)  # (ranks, C) each
        mean, variance = means.mean(0), variances.mean(0) + means.var(0, correction=0)
        count = x.numel() // self.num_features * world()
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return ((exact - mean.view(wide)) * scale.view(wide) + self.bias.view(wide)).to(x.dtype)


def part_batch_norms(module: nn.Module, groups: int, batches: int = 1) -> None:
    """Give every BatchNorm inside the statistics of `groups` parts of the batch over all ranks, in place.

    One part over several ranks is synchronised; as many parts as ranks is torch's own norm on each. batches: how many
    batches of more than one group each go through at once, one after the other.
    """
    ranks = world()
    if groups == 1 and ranks == 1:
        return
    if groups % ranks and groups > 1:
        raise UsageError(
            f"bn_groups: given {groups} on {ranks} processes; allowed are 1 (synchronised) and multiples of {ranks}."
        )
    norms = [child for child in module.modules() if isinstance(child, nn.modules.batchnorm._BatchNorm)]
    if not norms and groups > 1:
        raise UsageError(f"bn_groups: given {groups}, but the networks have no BatchNorm to group. Use --bn-groups 1.")
    if groups > 1 and groups * batches == ranks:
        return
    if other := next((norm for norm in norms if not is_plain(norm)), None):
        raise UsageError(
            f"bn_groups: {groups} on {ranks} processes, but the networks have a {type(other).__name__} whose "
            "statistics can be neither grouped nor synchronised. Use plain BatchNorm, or --bn-groups 1 on one process."
        )
    if groups == 1:
        replace_batch_norms(module, SynchronisedBatchNorm)
    else:
        replace_batch_norms(module, partial(GroupedBatchNorm, groups * batches // ranks))


def split_groups(module: nn.Module, passes: int, *, batches: int = 1) -> None:
    """Make the grouped norms inside ready for a batch that comes in so many passes of whole groups, in place. batches:
    as in `part_batch_norms`. On one rank norms without groups may be split, into statistics of each pass; on several
    that would not be what one rank computes."""
    for norm in module.modules():
        if isinstance(norm, GroupedBatchNorm):
            if norm.groups % (batches * passes):
                groups = norm.groups // batches
                raise UsageError(f"key_chunks: given {passes}; it must divide the {groups} groups of the norms.")
            norm.groups //= passes
        elif passes > 1 and world() > 1 and (is_plain(norm) or isinstance(norm, SynchronisedBatchNorm)):
            have = "all images" if isinstance(norm, SynchronisedBatchNorm) else "all images of a process"
            raise UsageError(
                f"key_chunks: given {passes} on {world()} processes, but norms take their statistics from {have}. In "
                "passes they would be other ones than on one process. Leave it out, or give --bn-groups as a multiple "
                f"of {passes * world()}."
            )


def groups_of(module: nn.Module) -> list[int]:
    """Over how many parts of a batch each norm inside computes its statistics; norms without a batch have none."""
    norms = (norm for norm in module.modules() if isinstance(norm, nn.modules.batchnorm._BatchNorm))
    return [norm.groups if isinstance(norm, GroupedBatchNorm) else 1 for norm in norms]


def refuse_shared_statistics(module: nn.Module, parts: int, *, batches: int = 1) -> None:
    """Raise UsageError where batch statistics inside are of images that so many parts of a batch would hold apart."""
    groups = math.gcd(*groups_of(module)) // batches
    if groups % parts:
        have = "the whole batch" if groups == 1 else f"{groups} groups of the batch, which {parts} does not divide"
        raise UsageError(
            f"accumulate: given {parts}, but norms take their statistics from {have}. Computed in parts they would be "
            f"other ones. Give --bn-groups as a multiple of {parts * world()}, or take norms without a batch (--norm, "
            "--head-norm)."
        )


def running_statistics(network: nn.Module) -> list[Tensor]:
    return [buffer for name, buffer in network.named_buffers() if name.endswith(("running_mean", "running_var"))]


def one_by_one(network: nn.Module, parts: Sequence[Part]) -> Iterator[Part]:
    """Gives the parts of a batch, each to be taken through the network before the next. Running statistics move towards
    the mean of the parts', as if all had come at once."""
    running = running_statistics(network)
    if len(parts) == 1 or not running:
        yield from parts
        return
    before, total = [buffer.clone() for buffer in running], [torch.zeros_like(buffer) for buffer in running]
    for part in parts:
        yield part
        torch._foreach_add_(total, running)
        torch._foreach_copy_(running, before)
    torch._foreach_div_(total, len(parts))
    torch._foreach_copy_(running, total)


def replace_batch_norms(module: nn.Module, make: Callable[..., nn.Module]) -> None:
    """Replace every BatchNorm inside by make(features, eps=, momentum=) with the same parameters and buffers, in
    place. Relatives of BatchNorm, and those without parameters or statistics, stay."""
    for parent, name, norm in batch_norms(module):
        if is_plain(norm):
            other = make(norm.num_features, eps=norm.eps, momentum=norm.momentum)
            other.load_state_dict(norm.state_dict())
            setattr(parent, name, other)


def batch_norms(module: nn.Module) -> list[tuple[nn.Module, str, BatchNorm]]:
    """torch's own batch norms inside: the parent, the name under it, the norm."""
    return [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if is_batch_norm(child)
    ]


def is_batch_norm(module: nn.Module) -> TypeGuard[BatchNorm]:
    return type(module) is nn.BatchNorm1d or type(module) is nn.BatchNorm2d


def is_plain(module: nn.Module) -> TypeGuard[BatchNorm]:
    return is_batch_norm(module) and module.affine and module.track_running_stats and module.momentum is not None
