"""A batch of whole pictures of any sizes, as one flat buffer.

RandomResizedCrop must see the whole picture, so nothing is cut to a common size before the views are
made: a canvas keeps every image as decoded and knows where each one lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

__all__ = ["Canvas"]


@dataclass(frozen=True)
class Canvas:
    """N images. The pixels may live on any device; what describes them stays on the CPU, so that
    nothing has to wait for the device to know a size.

    pixels: (P, C) uint8, or int32 for 16-bit images; image n is the rows offsets[n] onwards, row-major.
    offsets, heights, widths: (N,) int64 on the CPU.
    full_scale: the pixel value that means 1.0 (255 or 65535).
    """

    pixels: Tensor
    offsets: Tensor
    heights: Tensor
    widths: Tensor
    full_scale: int = 255

    @classmethod
    def of(cls, images: Sequence[np.ndarray], *, pin: bool = False) -> Canvas:
        """From (H, W, C) arrays, all uint8 or all uint16, with the same number of channels. pin: into pinned memory,
        from which a CUDA device copies while the host does other things."""
        heights = torch.tensor([image.shape[0] for image in images], dtype=torch.int64)
        widths = torch.tensor([image.shape[1] for image in images], dtype=torch.int64)
        offsets = torch.cumsum(heights * widths, 0) - heights * widths
        deep = images[0].dtype == np.uint16
        channels = images[0].shape[2]
        rows = int((heights * widths).sum())
        pixels = torch.empty((rows, channels), dtype=torch.int32 if deep else torch.uint8, pin_memory=pin)
        flat = pixels.numpy()
        for image, offset in zip(images, offsets.tolist(), strict=True):
            size = image.shape[0] * image.shape[1]
            flat[offset : offset + size] = image.reshape(size, channels)
        return cls(pixels, offsets, heights, widths, 65535 if deep else 255)

    @classmethod
    def join(cls, parts: Sequence[Canvas]) -> Canvas:
        """All images of the parts, in order, where the parts lie."""
        starts = np.cumsum([0, *(len(part.pixels) for part in parts[:-1])]).tolist()
        return cls(
            torch.cat([part.pixels for part in parts]),
            torch.cat([part.offsets + start for part, start in zip(parts, starts, strict=True)]),
            torch.cat([part.heights for part in parts]),
            torch.cat([part.widths for part in parts]),
            parts[0].full_scale,
        )

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def channels(self) -> int:
        return self.pixels.shape[1]

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    @property
    def nbytes(self) -> int:
        return self.pixels.numel() * self.pixels.element_size()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Canvas:
        return replace(self, pixels=self.pixels.to(device, non_blocking=non_blocking))

    def select(self, indices: Tensor) -> Canvas:
        """Some of the images, sharing this canvas's pixels. indices: (n,) int64 on the CPU."""
        return replace(self, offsets=self.offsets[indices], heights=self.heights[indices], widths=self.widths[indices])

    def compact(self) -> Canvas:
        """The same images, with no pixels but theirs."""
        rows = self.heights * self.widths
        parts = [
            self.pixels[start : start + count]
            for start, count in zip(self.offsets.tolist(), rows.tolist(), strict=True)
        ]
        return replace(self, pixels=torch.cat(parts), offsets=rows.cumsum(0) - rows)

    def image(self, n: int) -> np.ndarray:
        """Image n as an (H, W, C) array."""
        height, width, start = int(self.heights[n]), int(self.widths[n]), int(self.offsets[n])
        flat = self.pixels[start : start + height * width]
        return flat.reshape(height, width, self.channels).cpu().numpy()
