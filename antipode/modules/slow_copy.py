"""The slow copy: a network that follows another by an exponential moving average."""

from __future__ import annotations

import copy

import torch
from torch import nn


def slow_copy(module: nn.Module) -> nn.Module:
    """An equal module that takes no gradient."""
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, momentum: float) -> None:
    """slow = momentum * slow + (1 - momentum) * fast, for parameters only.

    Buffers are left alone: the batch statistics of the slow copy come from its own forward passes.
    """
    torch._foreach_lerp_(list(slow.parameters()), list(fast.parameters()), 1.0 - momentum)
