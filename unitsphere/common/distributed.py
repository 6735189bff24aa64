"""Several processes as one: gather, slice, agree. With one process each function gives back what it was given.

Ranks hold contiguous parts of the global batch, so gathering in the order of the ranks restores it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from unitsphere.common.errors import UnitsphereError

__all__ = ["average", "gather", "gather_with_gradient", "mine", "process_group", "rank", "world"]

PATIENCE = timedelta(minutes=30)  # how long a rank waits for the others: rank 0 may evaluate meanwhile


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def launched() -> bool:
    """Whether torchrun (or what sets its variables) has started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


@contextmanager
def process_group() -> Iterator[None]:
    """Joins the processes that torchrun started. Tensors on CUDA travel by NCCL; decisions, and the CPU, by gloo."""
    if not launched() or dist.is_initialized():
        yield
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise UnitsphereError(
                "another process died, or can no longer be reached; torchrun names the first that failed. --resume "
                "goes on from the last checkpoint."
            ) from error
        raise
    finally:
        dist.destroy_process_group()


@torch.no_grad()
def gather(x: Tensor) -> Tensor:
    """(n, ...) of each rank to (world n, ...) on every rank, without gradient."""
    if world() == 1:
        return x
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(world())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # Every rank's loss has read this rank's rows: their gradients add. Averaging over ranks, which makes it the
        # gradient of the mean loss, is done once for all parameters.
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return mine(gradient)


def gather_with_gradient(x: Tensor) -> Tensor:
    """As gather; a gradient on any rank's copy flows back to the rank that the rows came from."""
    return x if world() == 1 else _Gather.apply(x)


def mine(x: Tensor) -> Tensor:
    """This rank's part of a global tensor, along its first dimension."""
    share = len(x) // world()
    return x[rank() * share : (rank() + 1) * share]


@torch.no_grad()
def average(tensors: Iterable[Tensor]) -> None:
    """Replaces floating-point tensors by their mean over ranks, in place and in one message per type."""
    if world() == 1:
        return
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            by_type.setdefault(tensor.dtype, []).append(tensor)
    for group in by_type.values():
        flat = torch.cat([tensor.flatten() for tensor in group])
        dist.all_reduce(flat)
        flat /= world()
        for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(part.view_as(tensor))


def averaging_gradients(module: nn.Module) -> nn.Module:
    """The module with its gradients averaged over ranks while they are computed. Losses are means over a rank's own
    images, of which all ranks have as many: so the average is the gradient of the mean over the whole batch."""
    if world() == 1:
        return module
    # Batch statistics and memories are the same on all ranks, or meant to differ. (The argument's name is changing.)
    known = signature(nn.parallel.DistributedDataParallel).parameters
    buffers: dict[str, Any] = {
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False
    }
    return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, **buffers)


def without_averaging(module: nn.Module) -> AbstractContextManager[None]:
    """Within it the gradients of such a module only add up on each rank, for the next to be computed outside."""
    return module.no_sync() if isinstance(module, nn.parallel.DistributedDataParallel) else nullcontext()


def any_rank(*flags: bool) -> list[bool]:
    """For each flag whether it is true on some rank: all ranks then decide alike."""
    if world() == 1:
        return list(flags)
    votes = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return votes.bool().tolist()


def barrier() -> None:
    """Wait for all ranks."""
    any_rank(False)
