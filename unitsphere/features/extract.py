"""What a frozen backbone says about images: features, cached once or of fresh views in every epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from unitsphere.common.errors import UsageError
from unitsphere.common.randomness import generator
from unitsphere.data.loader import Loader
from unitsphere.images.canvas import Canvas
from unitsphere.views.apply import apply
from unitsphere.views.draw import draw
from unitsphere.views.evaluation import Preprocess
from unitsphere.views.policies import POLICIES, Policy

__all__ = ["extract"]

BATCH = 256
PIXELS_AT_ONCE = 1024 * 32**2
VALUES_WAITING = 2**26  # features that stay on the device before they are fetched
LINEAR_VIEWS = POLICIES["supervised"]  # the linear protocols' RandomResizedCrop and flip


def extract(
    backbone: nn.Module,
    loader: Loader,
    preprocess: Callable[[Canvas], Tensor],
    *,
    batch_size: int | None = None,
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
    keep_on: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Features (N, F) of all images or of `indices`, in that order and not augmented, on the device `keep_on`.

    The row of a broken image is NaN (the loader delivers another in its place, which must not pass for it):
    `usable_rows` gives the others. The backbone is moved to `device`; its training mode and its statistics
    are left as they were. batch_size: None chooses. precision: "fp32" or "bf16" (autocast). dtype: how the features
    are kept; bfloat16 holds what a backbone gives under "bf16" in half the memory. progress is called with the images
    begun.
    """
    wanted = torch.arange(loader.count) if indices is None else indices.cpu()
    parts = wanted.split(batch_size or images_at_once(preprocess, torch.device(device)))
    features = torch.empty(0, 0)
    missing = torch.zeros(len(wanted), dtype=torch.bool)
    waiting: list[Tensor] = []  # on the device: fetching each batch would make the host wait for it
    begun = done = 0
    with frozen(backbone.to(device)):
        for part, (delivered, canvas) in zip(parts, loader.batches(parts), strict=True):
            waiting.append(forward(backbone, preprocess(canvas).to(device), precision).to(dtype))
            missing[begun : begun + len(part)] = delivered != part
            begun += len(part)
            if not len(features):  # only now is F known
                features = torch.empty(len(wanted), waiting[0].shape[1], dtype=dtype, device=keep_on)
            if begun == len(wanted) or (begun - done) * features.shape[1] >= VALUES_WAITING:
                features[done:begun] = torch.cat(waiting)
                done = begun
                waiting.clear()
            if progress:
                progress(begun)
    features[missing.to(keep_on)] = torch.nan
    return features


def images_at_once(preprocess: Callable[[Canvas], Tensor], device: torch.device) -> int:
    """On a GPU so many small images that a batch takes the host less time than the device."""
    if device.type != "cuda" or not isinstance(preprocess, Preprocess):
        return BATCH
    return max(BATCH, PIXELS_AT_ONCE // preprocess.size**2)


@contextmanager
def frozen(backbone: nn.Module) -> Iterator[None]:
    """In evaluation mode within; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in backbone.modules()]
    backbone.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@torch.inference_mode()
def forward(backbone: nn.Module, images: Tensor, precision: str) -> Tensor:
    """`encode`, without a gradient."""
    return encode(backbone, images, precision)


def encode(backbone: nn.Module, images: Tensor, precision: str) -> Tensor:
    """(N, F) float32. A map (N, F, H, W) is averaged over its places."""
    if images.is_cuda:
        images = images.contiguous(memory_format=torch.channels_last)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bf16"):
        features = backbone(images).float()
    if features.dim() == 4:
        features = features.mean((2, 3))
    if features.dim() != 2:
        raise UsageError(
            f"backbone: it gives {tuple(features.shape)} for {len(images)} images; features (N, F) or a map "
            "(N, F, H, W) are needed. Pool inside the module."
        )
    return features


class Features(Protocol):
    """Where a linear classifier's training features come from. asked_on: the device on which indices are best given."""

    @property
    def asked_on(self) -> torch.device: ...

    def still(self, indices: Tensor) -> Tensor:
        """(n, F): features of these images, not augmented."""
        ...

    def epoch(self, batches: Iterable[Tensor], seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For each batch of indices, the indices delivered (n,) and their features (n, F)."""
        ...


@dataclass(frozen=True)
class CachedFeatures:
    """The same features (N, F) in every epoch: quick, without augmentation. They stay on their device."""

    features: Tensor

    @property
    def asked_on(self) -> torch.device:
        return self.features.device

    def still(self, indices: Tensor) -> Tensor:
        return self.features[indices.to(self.features.device)]

    def epoch(self, batches: Iterable[Tensor], seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in batches:
            yield indices, self.still(indices)


@dataclass(frozen=True)
class AugmentedFeatures:
    """Features of fresh views in every epoch, as the linear protocols train: a forward pass each time."""

    backbone: nn.Module
    loader: Loader
    preprocess: Preprocess
    device: torch.device | str = "cpu"
    precision: str = "fp32"
    policy: Policy = LINEAR_VIEWS
    asked_on = torch.device("cpu")

    def still(self, indices: Tensor) -> Tensor:
        return extract(
            self.backbone,
            self.loader,
            self.preprocess,
            device=self.device,
            precision=self.precision,
            indices=indices,
        )

    def epoch(self, batches: Iterable[Tensor], seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        with frozen(self.backbone.to(self.device)):
            for indices, views in fresh_views(self.loader, batches, self.preprocess, seed, epoch, self.policy):
                yield indices, forward(self.backbone, views.to(self.device), self.precision)


def fresh_views(
    loader: Loader,
    batches: Iterable[Tensor],
    seen: Preprocess,
    seed: int,
    epoch: int,
    policy: Policy = LINEAR_VIEWS,
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each batch of indices, the indices delivered (n,) on the CPU and a view (n, C, S, S) of each image, drawn
    for this epoch."""
    for step, (indices, canvas) in enumerate(loader.batches(batches)):
        table = draw(policy, len(indices), generator(seed, "linear-views", epoch, step))
        yield indices, apply(canvas, table, size=seen.size, mean=seen.mean, std=seen.std)
