"""The blocks of the built-in ResNets, with the norm, the residual sum and the ReLU of each as one operation.

On a CUDA device in training, that operation is one kernel (`norm_kernels.py`). Everywhere else it is the modules one
after the other, as torchvision has them. Parameters and their names are the same.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from unitsphere.common.devices import TRITON
from unitsphere.modules.norms import GroupedBatchNorm, is_plain

# For comparisons: "off" never uses the kernels, "plain" only without a compiler, "all" always.
KERNELS = os.environ.get("UNITSPHERE_NORM_KERNELS", "plain")
Pair = tuple[Tensor, Tensor]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def norm_act(
    norm: nn.Module, x: Tensor, act: nn.Module | None = None, residual: Tensor | None = None, twice: bool = False
) -> Any:
    """The norm of x, plus the residual, through the ReLU. All but x and the norm may be missing.

    twice: y as a pair, if two layers read it and a kernel can add up their gradients; otherwise as a tensor all the
    same."""
    if has_kernel(norm, x, residual):
        from unitsphere.modules.fused_norm import norm as fused

        norm = cast(nn.BatchNorm2d, norm)
        running = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
        groups = norm.groups if isinstance(norm, GroupedBatchNorm) else 1
        twice = twice and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        given = (groups, norm.momentum, norm.eps, act is not None, twice)
        return fused(x, norm.weight, norm.bias, residual, *running, *given)
    out = norm(x)
    if residual is not None:
        out += residual
    return out if act is None else act(out)


def has_kernel(norm: nn.Module, x: Tensor, residual: Tensor | None) -> bool:
    """Whether the kernels compute this norm: batch statistics of whole groups, on a CUDA device."""
    if not (uses_kernels(norm, x) and (isinstance(norm, GroupedBatchNorm) or is_plain(norm))):
        return False
    groups = norm.groups if isinstance(norm, GroupedBatchNorm) else 1
    same = residual is None or (residual.dtype == x.dtype and residual.shape == x.shape)
    enough = len(x) % groups == 0 and x.numel() // x.shape[1] > groups
    return same and enough and cast(nn.BatchNorm2d, norm).weight.dtype == torch.float32


def uses_kernels(module: nn.Module, x: Tensor) -> bool:
    """In training on a CUDA device; compiled only where asked for, since compilers fuse most of the same."""
    asked = KERNELS == "all" or (KERNELS == "plain" and not torch.compiler.is_compiling())
    return asked and TRITON and x.is_cuda and module.training and x.dtype in DTYPES


class MaxPool(nn.MaxPool2d):
    """The max-pool of a ResNet's stem."""

    def forward(self, x: Tensor) -> Tensor:
        usual = (self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode) == (3, 2, 1, 1, False)
        if usual and uses_kernels(self, x) and not torch.compiler.is_compiling():
            from unitsphere.modules.stem_kernels import max_pool

            return max_pool(x)
        return super().forward(x)


def as_pair(x: Tensor | Pair) -> Pair:
    """For the branch of a block and for its shortcut."""
    return x if isinstance(x, tuple) else (x, x)


class FusedBasicBlock(BasicBlock):
    twice = False  # whether a block follows, which reads the output twice

    def forward(self, x: Tensor | Pair) -> Tensor | Pair:
        x, shortcut = as_pair(x)
        out = norm_act(self.bn1, self.conv1(x), self.relu)
        out = self.conv2(out)
        shortcut = shortcut if self.downsample is None else self.downsample(shortcut)
        return norm_act(self.bn2, out, self.relu, shortcut, self.twice)


class FusedBottleneck(Bottleneck):
    twice = False

    def forward(self, x: Tensor | Pair) -> Tensor | Pair:
        x, shortcut = as_pair(x)
        out = norm_act(self.bn1, self.conv1(x), self.relu)
        out = norm_act(self.bn2, self.conv2(out), self.relu)
        out = self.conv3(out)
        shortcut = shortcut if self.downsample is None else self.downsample(shortcut)
        return norm_act(self.bn3, out, self.relu, shortcut, self.twice)


class FusedSequential(nn.Sequential):
    """A norm and the ReLU that follows it are one operation."""

    def forward(self, x: Tensor) -> Tensor:
        modules = list(self)
        while modules:
            module = modules.pop(0)
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                act = modules.pop(0) if modules and isinstance(modules[0], nn.ReLU) else None
                x = norm_act(module, x, act)
            else:
                x = module(x)
        return x


class FusedResNet(ResNet):
    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.maxpool(norm_act(self.bn1, self.conv1(x), self.relu))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


BLOCKS = (FusedBasicBlock, FusedBottleneck)
FUSED: dict[type, type] = {
    BasicBlock: FusedBasicBlock,
    Bottleneck: FusedBottleneck,
    nn.Sequential: FusedSequential,
    ResNet: FusedResNet,
    nn.MaxPool2d: MaxPool,
}


def fuse_norms(backbone: nn.Module) -> nn.Module:
    """Let the blocks inside do a norm and what follows it at once, in place."""
    for module in backbone.modules():
        module.__class__ = FUSED.get(type(module), type(module))
    for module in backbone.modules():
        if isinstance(module, FusedSequential):
            for block, follower in pairwise(module):
                if isinstance(block, BLOCKS) and isinstance(follower, BLOCKS):
                    block.twice = True
    return backbone
