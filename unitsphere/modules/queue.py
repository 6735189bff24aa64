"""MoCo's queue: the keys of the last batches, the oldest replaced first."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["KeyQueue"]

UNLABELLED = -1


class KeyQueue(nn.Module):
    """A ring of `size` keys. Any size against any batch: a batch wraps around, and of one larger than the
    queue the last `size` keys stay.

    keys: (size, dim) buffer, random unit vectors until real keys replace them (as in MoCo).
    labels: (size,) int64 buffer, kept only with labelled=True (for the class oracle).
    pushed: how many real keys have ever entered. A tensor of rank 0, so that it travels with the state.
    """

    keys: Tensor
    labels: Tensor
    pushed: Tensor

    def __init__(
        self, size: int, dim: int, *, labelled: bool = False, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("keys", F.normalize(torch.randn(size, dim, generator=generator), dim=1))
        self.register_buffer("pushed", torch.zeros((), dtype=torch.int64))
        self.labelled = labelled
        if labelled:
            self.register_buffer("labels", torch.full((size,), UNLABELLED, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def fill(self) -> Tensor:
        """Share of the queue that holds real keys, on the queue's device."""
        return (self.pushed / len(self.keys)).clamp(max=1.0)

    @torch.no_grad()
    def push(self, keys: Tensor, labels: Tensor | None = None) -> None:
        """Replace the oldest keys by these (n, dim). No host synchronisation."""
        size, count = len(self.keys), len(keys)
        skipped = max(0, count - size)  # these would be overwritten by the same call
        where = (self.pushed + skipped + torch.arange(count - skipped, device=self.keys.device)) % size
        self.keys.index_copy_(0, where, keys[skipped:].to(self.keys.dtype))
        if self.labelled:
            assert labels is not None
            self.labels.index_copy_(0, where, labels[skipped:])
        self.pushed += count
