"""MoCo in the manner of its authors' code: what most people run when they run MoCo.

Written anew from the paper's Algorithm 1 and the habits of that code: NCHW, float32 or autocast to float16, one small
operation for each parameter of the key encoder, a clone of the queue, logits concatenated for a cross-entropy, torch's
plain SGD, the accuracy and the loss read after every step. Its ShuffleBN needs several devices; on one, only the
permutation is left, and batch normalisation sees the whole batch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class OfficialMoCo(nn.Module):
    """A query encoder, a key encoder that follows it, and a queue (dim, K) of keys in columns."""

    queue: Tensor
    pointer: Tensor

    def __init__(self, encoder: nn.Module, keys: Tensor, *, momentum: float, temperature: float) -> None:
        """encoder: images to embeddings (N, dim), not normalised; keys: (K, dim), what the queue starts with."""
        super().__init__()
        self.momentum = momentum
        self.temperature = temperature
        self.encoder_q = encoder
        self.encoder_k = copy.deepcopy(encoder)
        for parameter in self.encoder_k.parameters():
            parameter.requires_grad = False
        self.register_buffer("queue", keys.T.clone())
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def update_key_encoder(self) -> None:
        for query, key in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            key.data = key.data * self.momentum + query.data * (1.0 - self.momentum)

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        count, size = len(keys), self.queue.shape[1]
        start = int(self.pointer)  # the host waits for the device here
        if size % count:
            raise ValueError(f"a queue of {size} keys is no multiple of the batch of {count}")
        self.queue[:, start : start + count] = keys.T
        self.pointer[0] = (start + count) % size

    def forward(self, query_images: Tensor, key_images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (N, 1 + K), the positive first, and their labels: zeros (N,)."""
        query = F.normalize(self.encoder_q(query_images), dim=1)
        with torch.no_grad():
            self.update_key_encoder()
            shuffle = torch.randperm(len(key_images), device=key_images.device)
            keys = F.normalize(self.encoder_k(key_images[shuffle]), dim=1)[torch.argsort(shuffle)]
        positive = torch.einsum("nc,nc->n", query, keys).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", query, self.queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / self.temperature
        labels = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        self.enqueue(keys)
        return logits, labels


class OfficialStep:
    """One step of its training loop; amp: autocast to float16 and a gradient scaler."""

    def __init__(self, model: OfficialMoCo, *, lr: float, momentum: float, weight_decay: float, amp: bool) -> None:
        self.model = model
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(model.parameters(), lr, momentum=momentum, weight_decay=weight_decay)
        self.amp = amp
        self.scaler = torch.amp.GradScaler(model.queue.device.type, enabled=amp)

    def __call__(self, views: Sequence[Tensor]) -> float:
        with torch.autocast(views[0].device.type, torch.float16, enabled=self.amp):
            logits, labels = self.model(*views)
            loss = self.criterion(logits, labels)
        top_accuracies(logits, labels)
        value = loss.item()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return value


@torch.no_grad()
def top_accuracies(logits: Tensor, labels: Tensor) -> list[Tensor]:
    """Percent of the queries whose key is the best, and among the best five."""
    correct = labels == logits.topk(5, dim=1).indices.T
    return [100.0 * correct[:k].any(dim=0).float().mean() for k in (1, 5)]
