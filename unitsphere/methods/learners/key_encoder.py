"""How keys are encoded: by a slow copy of the network, in permuted order, in passes, on every rank its part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from unitsphere.common.distributed import gather, mine, world
from unitsphere.methods.learners.learner import Inputs
from unitsphere.modules.norms import groups_of, one_by_one, split_groups
from unitsphere.modules.slow_copy import follow, slow_copy

Pass = tuple[Sequence[Tensor], Tensor | None]  # views, and the places of the images that this pass takes of them


@dataclass(frozen=True)
class KeyEncoder:
    """Settings of the slow copy, and how it encodes the keys of a batch. The learner holds the copy itself.

    momentum, schedule: how slowly the copy follows the network; with the cosine schedule ever more slowly.
    keys: M, how many keys an image has.
    shuffles: keys are encoded in permuted order, so that a query and its key do not share batch statistics (ShuffleBN).
    chunks: in how many passes the keys are encoded.
    at_once: both directions of a symmetric loss go through a network in one pass, which is quicker. The norms inside
    have twice as many groups, which keep the directions apart.
    """

    momentum: float
    schedule: str = "constant"
    keys: int = 1
    shuffles: bool = False
    chunks: int = 1
    at_once: bool = False
    ranks: int = field(default_factory=world, init=False)

    def copy_of(self, encoder: nn.Module) -> nn.Module:
        """Make the slow copy of a network."""
        copy = slow_copy(encoder)
        if self.chunks > 1:
            split_groups(copy, self.chunks, batches=1 + self.at_once)
        return copy

    def split(self, slow: nn.Module, parts: int) -> KeyEncoder:
        """Encode the keys of a whole batch in passes as large as one of its `parts`, where the groups allow it."""
        batches = 1 + self.at_once
        passes = math.gcd(parts, *(groups // batches for groups in groups_of(slow)))
        split_groups(slow, passes, batches=batches)
        return replace(self, chunks=self.chunks * passes)

    @torch.no_grad()
    def __call__(
        self, slow: nn.Module, online: nn.Module, sources: Sequence[Sequence[Tensor]], inputs: Inputs
    ) -> list[Tensor]:
        """Move the slow copy towards the network, and encode the keys of the whole batch over all ranks.

        sources: for each direction of the loss M views (n, C, H, W) of this rank's images.
        inputs: key_momentum, where it changes over time; order (directions, N M), where keys are shuffled.
        Returns for each direction the keys (N, M, D).
        """
        follow(slow, online, inputs.get("key_momentum", self.momentum))
        # Images are taken in order i, then m, so that gathering ranks gives what one rank would have. With an order
        # each rank encodes its part of the permuted batch, and the keys are put back.
        orders = inputs["order"].unbind() if "order" in inputs else [None] * len(sources)
        passes = list(zip(*map(self._passes, sources, orders), strict=True))
        encoded: list[list[Tensor]] = [[] for _ in sources]
        for directions in passes if len(passes) == 1 else one_by_one(slow, passes):
            images = [_images_at(views, places) for views, places in directions]
            if self.at_once and len(images) > 1:
                found = slow(torch.cat(images)).chunk(len(images))
            else:
                found = [slow(batch) for batch in images]
            del images  # before the next pass copies its own
            for of_direction, part in zip(encoded, found, strict=True):
                of_direction.append(part)
        keys = []
        for parts, order in zip(encoded, orders, strict=True):
            joined = torch.cat(parts)
            if self.ranks > 1:
                joined = gather(joined)
            keys.append((joined if order is None else joined[torch.argsort(order)]).unflatten(0, (-1, self.keys)))
        return keys

    def _passes(self, views: Sequence[Tensor], order: Tensor | None) -> list[Pass]:
        """For each pass of this rank's keys what `_images_at` makes its images of, so that no copy of all images is
        held. Only with several ranks, each of which may need any image, all images of a rank are copied."""
        if order is not None and self.ranks > 1:
            views, order = [_images_at(views, mine(order), ranks=self.ranks)], None
        if order is None:
            if len(views) == 1:
                return [([part], None) for part in views[0].chunk(self.chunks)]
            order = torch.arange(len(views) * len(views[0]), device=views[0].device)
        return [(views, places) for places in order.chunk(self.chunks)]


def _images_at(views: Sequence[Tensor], places: Tensor | None, ranks: int = 1) -> Tensor:
    """Copy the images at places (P,) among those of M views (N, C, H, W), in order i, then m: (P, C, H, W). Without
    places: all of a single view, which is not copied. With several ranks the views are this rank's part of them.

    With several views each image is written to the row that it has in the result, and an image that has no row to one
    row more, which is left out: shapes do not depend on the places, and nothing else is copied."""
    first = views[0]
    if places is None:
        return first
    if len(views) == 1:
        return (first if ranks == 1 else gather(first))[places]
    size = len(places)
    rows = torch.full((len(views) * len(first) * ranks,), size, device=places.device)
    rows[places] = torch.arange(size, device=places.device)
    channels_last = first.is_contiguous(memory_format=torch.channels_last) and not first.is_contiguous()
    images = torch.empty(
        (size + 1, *first.shape[1:]),
        dtype=first.dtype,
        device=first.device,
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )
    for m, view in enumerate(views):
        images.index_copy_(0, rows[m :: len(views)], view if ranks == 1 else gather(view))
    return images[:-1]
