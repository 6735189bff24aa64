"""Symmetric MoCo on CIFAR-10 from lightly's blocks and transforms, as in its own CIFAR-10 benchmark.

Its ResNet-18 with split batch norms, its head, memory bank, momentum update and transform, fed by a DataLoader with a
worker for each core. Kinder to it than that benchmark: the images are decoded beforehand, the workers persist, the
networks run in bfloat16 on a GPU, and the k-NN reads its images from the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightly.loss import NTXentLoss
from lightly.models import ResNetGenerator
from lightly.models.modules import MoCoProjectionHead
from lightly.models.utils import batch_shuffle, batch_unshuffle, deactivate_requires_grad, update_momentum
from lightly.transforms import MoCoV2Transform
from lightly.transforms.utils import IMAGENET_NORMALIZE
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Views(Dataset[list[Tensor]]):
    """Two views of image i, from decoded images (N, H, W, 3) uint8. Without blur, as for CIFAR-10."""

    def __init__(self, images: np.ndarray) -> None:
        self.images = images
        self.transform = MoCoV2Transform(input_size=images.shape[1], gaussian_blur=0.0)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> list[Tensor]:
        views: list[Tensor] = self.transform(Image.fromarray(self.images[index]))
        return views


class LightlyMoCo(nn.Module):
    def __init__(self, *, queue_size: int, temperature: float, momentum: float, splits: int) -> None:
        super().__init__()
        self.momentum = momentum
        layers = list(ResNetGenerator("resnet-18", num_splits=splits).children())[:-1]
        self.backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = MoCoProjectionHead(512, 512, 128)
        self.slow_backbone, self.slow_head = copy.deepcopy(self.backbone), copy.deepcopy(self.head)
        deactivate_requires_grad(self.slow_backbone)
        deactivate_requires_grad(self.slow_head)
        self.criterion = NTXentLoss(temperature=temperature, memory_bank_size=(queue_size, 128))

    def one_direction(self, query_images: Tensor, key_images: Tensor) -> Tensor:
        shuffled, order = batch_shuffle(key_images)
        query = self.head(self.backbone(query_images))
        key = batch_unshuffle(self.slow_head(self.slow_backbone(shuffled)), order)
        loss: Tensor = self.criterion(query, key)
        return loss

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        update_momentum(self.backbone, self.slow_backbone, m=self.momentum)
        update_momentum(self.head, self.slow_head, m=self.momentum)
        return 0.5 * (self.one_direction(first, second) + self.one_direction(second, first))


def pretrain(
    images: np.ndarray,
    *,
    epochs: int,
    batch_size: int,
    workers: int,
    device: torch.device,
    lr: float,
    weight_decay: float,
    after_epoch: Callable[[nn.Module], None],
    **method: Any,
) -> None:
    """Train on decoded images (N, H, W, 3) uint8; after_epoch is given the backbone in evaluation mode."""
    model = LightlyMoCo(**method).to(device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=weight_decay)
    loader = DataLoader(
        Views(images),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=True,
    )
    for _ in range(epochs):
        for views in loader:
            first, second = (view.to(device, non_blocking=True) for view in views)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(first, second)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        after_epoch(model.backbone)
        model.train()


@torch.no_grad()
def features(backbone: nn.Module, images: Tensor) -> Tensor:
    """(N, 512) of decoded images (N, H, W, 3) uint8 on the backbone's device."""
    mean, std = (
        torch.tensor(IMAGENET_NORMALIZE[name], device=images.device)[:, None, None] for name in ("mean", "std")
    )
    parts = []
    for part in images.split(512):
        pixels = (part.permute(0, 3, 1, 2) / 255 - mean) / std
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
            parts.append(backbone(pixels).float())
    return torch.cat(parts)
