"""The slow copy: a network that follows another by an exponential moving average."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

__all__ = ["follow", "slow_copy"]


def slow_copy(module: nn.Module) -> nn.Module:
    """An equal module that takes no gradient."""
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, momentum: float | Tensor) -> None:
    """slow = momentum * slow + (1 - momentum) * fast, for parameters only.

    Buffers are left alone: the batch statistics of the slow copy come from its own forward passes.
    momentum: of rank 0 where it is a tensor, which may live on the device: the host does not wait for it.
    """
    ours: list[Tensor] = list(slow.parameters())
    theirs: list[Tensor] = list(fast.parameters())
    if isinstance(momentum, Tensor):  # to lerp by it torch would read its value on the host
        steps = torch._foreach_sub(theirs, ours)
        torch._foreach_mul_(steps, 1.0 - momentum)
        torch._foreach_add_(ours, list(steps))
    else:
        torch._foreach_lerp_(ours, theirs, 1.0 - momentum)


def momentum_at(step: int, steps: int, base: float, schedule: str) -> float:
    """The momentum of step `step` (from 0). cosine: from base to 1, as 1 - (1 - base)(cos(pi t/T) + 1)/2 (BYOL)."""
    return 1.0 - (1.0 - base) * (math.cos(math.pi * step / steps) + 1.0) / 2.0 if schedule == "cosine" else base
