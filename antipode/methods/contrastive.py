"""The contrastive family: one query, its key, and negatives from a queue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from antipode.errors import UsageError
from antipode.modules.norms import group_batch_norms
from antipode.modules.queue import KeyQueue
from antipode.modules.slow_copy import follow, slow_copy
from antipode.objectives import info_nce

# Health is measured on so many queries of the batch: enough for a mean, and nearly free beside a large queue.
HEALTH_QUERIES = 64


class Encoder(nn.Module):
    """A backbone and a head; images (N, C, H, W) to unit vectors (N, dim) in float32."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.head(self.backbone(images)).float(), dim=1)


@dataclass(frozen=True)
class Step:
    """What a step of a method gives: the loss to minimise, and signs of health as scalars on the device."""

    loss: Tensor
    health: dict[str, Tensor]
    embedding: Tensor  # (N, dim), of the first view, without gradient
    keys: Tensor  # what the memory takes when the step is over


class MoCo(nn.Module):
    """Momentum Contrast, v1 and v2 (He et al. 2020, Algorithm 1; Chen et al. 2020).

    A step: the query's forward; then without gradient the slow copy moves, and the keys are encoded in permuted
    order (with bn_groups > 1, so that a query and its key do not share batch statistics); the scores are taken
    against the queue before this batch's keys enter it, so the positive is never among the negatives.

    symmetric: each view is query once and key once, and the two losses add.
    """

    views = 2

    def __init__(
        self,
        encoder: Encoder,
        *,
        dim: int,
        temperature: float,
        queue_size: int,
        key_momentum: float,
        symmetric: bool = False,
        bn_groups: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if bn_groups > 1 and not group_batch_norms(encoder, bn_groups):
            raise UsageError(
                f"bn_groups: given {bn_groups}, but the backbone has no BatchNorm2d to group. Use --bn-groups 1."
            )
        self.online = encoder
        self.slow = slow_copy(self.online)
        self.queue = KeyQueue(queue_size, dim, generator=generator)
        self.temperature = temperature
        self.key_momentum = key_momentum
        self.symmetric = symmetric
        self.bn_groups = bn_groups

    @property
    def backbone(self) -> nn.Module:
        return self.online.backbone

    def order_of_keys(self, n: int, generator: torch.Generator) -> Tensor | None:
        """(directions, N) on the CPU: in which order each direction's keys are encoded; None where it cannot matter."""
        if self.bn_groups == 1:
            return None
        return torch.stack([torch.randperm(n, generator=generator) for _ in range(1 + self.symmetric)])

    def forward(self, views: Sequence[Tensor], order: Tensor | None = None) -> Step:
        """views: two tensors (N, C, H, W); order: of `order_of_keys`, on their device."""
        first, second = views
        asked, answered = ([first, second], [second, first]) if self.symmetric else ([first], [second])
        queries = [self.online(view) for view in asked]
        with torch.no_grad():
            follow(self.slow, self.online, self.key_momentum)
            orders = [None] * len(answered) if order is None else list(order)
            keys = [self.encode_keys(view, order) for view, order in zip(answered, orders, strict=True)]
        losses = [
            info_nce(query, key, self.queue.keys, temperature=self.temperature)
            for query, key in zip(queries, keys, strict=True)
        ]
        loss = torch.stack(losses).sum()
        health = self.health(queries[0].detach(), keys[0]) | {"loss": loss.detach() / len(losses)}
        return Step(loss, health, queries[0].detach(), torch.cat(keys))

    def finish(self, step: Step) -> None:
        """After the optimiser: the keys enter the queue. (The backward pass has read it by now: no copy needed.)"""
        self.queue.push(step.keys)

    def encode_keys(self, images: Tensor, order: Tensor | None) -> Tensor:
        """Keys (N, dim) of the images, encoded in the given order and put back into their own."""
        if order is None:
            return self.slow(images)
        return self.slow(images[order])[torch.argsort(order)]

    @torch.no_grad()
    def health(self, query: Tensor, key: Tensor) -> dict[str, Tensor]:
        """Label-free signs of health, on a few queries; scores in float32, as in the loss."""
        query, key = query[:HEALTH_QUERIES], key[:HEALTH_QUERIES]
        with torch.autocast(query.device.type, enabled=False):
            positive = (query * key).sum(dim=1)
            negative = query @ self.queue.keys.T
        return {
            "positive_similarity": positive.mean(),
            "negative_similarity": negative.mean(),
            "contrastive_accuracy": (positive > negative.amax(dim=1)).float().mean(),
            "queue_fill": self.queue.fill,
        }

    @property
    def chance_loss(self) -> float:
        """log(1 + K): the loss of an encoder that cannot tell the key from the negatives."""
        return math.log(1 + len(self.queue))
