"""The plain form of a view: one function in torch that makes the views of a whole batch where its pixels live.

Equal to torchvision's v2 functions on float32 in [0, 1] with the same parameters, image by image. Every operation is
done for all images and has a parameter that leaves an image as it is. So shapes never depend on what was drawn, nothing
waits for the device, and torch.compile takes the function as it is. `fused.render` does the same by Triton kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from unitsphere.views.policies import Policy

NO_BLUR = 1e-3  # a deviation so small that the kernel is exactly one pixel


class Frame(NamedTuple):
    """What is the same for the whole batch."""

    policy: Policy
    size: int
    height: int  # of the largest image; the fused form does without
    width: int
    full_scale: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


Render = Callable[[Tensor, Tensor, Frame], Tensor]


def render(pixels: Tensor, numbers: Tensor, frame: Frame) -> Tensor:
    """Make one normalised view of each image, in float32 also under autocast.

    pixels: (P, C), those of a canvas. numbers: (N, 29) float64 on the same device, see `apply.parameters`.
    frame: its height and width are at least those of every image. Returns (N, C, size, size) float32.
    """
    policy, size = frame.policy, frame.size
    with torch.autocast(pixels.device.type, enabled=False):
        # The images, each padded to the frame. What lies beyond an image gets no weight: any pixel will do there.
        offsets, widths = numbers[:, 0].long(), numbers[:, 1].long()
        rows = torch.arange(frame.height, device=pixels.device)[:, None]
        columns = torch.arange(frame.width, device=pixels.device)
        reads = offsets[:, None, None] + rows * widths[:, None, None] + columns  # (N, H, W)
        x = pixels[reads.clamp_(max=len(pixels) - 1)].permute(0, 3, 1, 2).float()
        del reads  # eight bytes a pixel

        # Crop, antialiased resize and flip are one linear map for each axis.
        down, across = weights(numbers[:, 2:6], size, frame.height), weights(numbers[:, 6:10], size, frame.width)
        x = resample(x, down, across) / frame.full_scale
        del down, across

        turns_grey = numbers[:, 26, None, None, None] != 0
        if policy.grey_first and policy.grey:
            x = torch.where(turns_grey, grey(x), x)

        if policy.jitter:
            # Brightness, contrast, saturation and hue in each image's own order. The first three are one blend.
            for turn in numbers[:, 10:26].unflatten(1, (4, 4)).to(x.dtype).unbind(1):
                keep, of_mean, of_grey, shift = turn[:, :, None, None, None].unbind(1)
                shade = grey(x)
                mean = shade.mean(dim=(1, 2, 3), keepdim=True)
                x = (keep * x + (of_grey * shade + of_mean * mean)).clamp(0, 1)
                if x.shape[1] == 3 and x.is_cpu:
                    chosen = turn[:, 3].nonzero()[:, 0]
                    x = x.index_copy(0, chosen, shift_hue(x[chosen], turn[chosen, 3]))
                elif x.shape[1] == 3:  # to choose images, the host would have to wait for the device
                    x = torch.where(shift != 0, shift_hue(x, turn[:, 3]), x)

        if policy.grey and not policy.grey_first:
            x = torch.where(turns_grey, grey(x), x)
        if policy.blur:
            x = blur(x, numbers[:, 27].float())
        if policy.solarise:
            inverted = torch.where(x >= policy.solarise_threshold, 1 - x, x)
            x = torch.where(numbers[:, 28, None, None, None] != 0, inverted, x)
        return torch.stack([(x[:, c] - frame.mean[c]) / frame.std[c] for c in range(x.shape[1])], dim=1)


def weights(axis: Tensor, size: int, extent: int) -> Tensor:
    """Compute what each output pixel takes from each input pixel along one axis.

    The triangle filter of ATen's antialiased bilinear resize: as wide as a step, or one pixel when enlarging; cut off
    at the ends of the part seen, then normalised. axis: (N, 4) float64, see `apply.parameters`.
    Returns (N, size, extent) float32.
    """
    start, length, first, step = axis.T[:, :, None, None]
    # Only the small factors are float64: an error of a far pixel's position is an error of its weight.
    centre = (first + step * torch.arange(size, device=axis.device)[:, None]).float()  # (N, size, 1)
    reach = step.abs().clamp(min=1).float()
    pixel = (torch.arange(extent, device=axis.device) - start).float()  # (N, 1, extent)
    triangle = (1 - (pixel + 0.5 - centre).abs() / reach).clamp(min=0)
    triangle = triangle * ((pixel >= 0) & (pixel < length.float()))
    return triangle / triangle.sum(dim=2, keepdim=True)


def resample(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Multiply each channel of each image by matrices of that image's own: rows x columns^T, in float32.

    x: (N, C, H, W); rows: (N, S, H); columns: (N, T, W). Returns (N, C, S, T). TF32 stays what the caller made it
    with torch.set_float32_matmul_precision: torch's default, "highest", is exact float32 on CUDA too.
    """
    # Rows first: a canvas is stored channels-last, so only the smaller, half-resized x is transposed.
    x = torch.einsum("nsh,nhwc->nswc", rows, x.permute(0, 2, 3, 1))
    return torch.einsum("nswc,ntw->ncst", x, columns)


def grey(x: Tensor) -> Tensor:
    """(N, 1, H, W): luma (ITU-R 601) of three channels, else the mean of the channels. x: (N, C, H, W)."""
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True)
    red, green, blue = x.split(1, dim=1)
    return (red * 0.2989).add(green, alpha=0.587).add(blue, alpha=0.114)


def shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue by `shift` (N,) turns and keep HSV's saturation and value. x: (N, 3, H, W).

    With V the largest and D the largest less the smallest channel, and hue h in sixths of a turn, HSV
    back to RGB is V - D clamp(min(k, 4 - k), 0, 1), k = (h + 5, 3, 1 for red, green, blue) mod 6.
    """
    red, green, blue = x.unbind(1)
    value, low = x.amax(dim=1), x.amin(dim=1)
    spread = value - low
    safe = spread.clamp(min=torch.finfo(x.dtype).tiny)  # a grey pixel has no hue: any will do
    hue = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    hue = hue + 6 * shift[:, None, None]
    channels = []
    for phase in (5.0, 3.0, 1.0):
        k = (hue + phase).remainder(6)
        channels.append(value - torch.minimum(k, 4 - k).clamp(0, 1) * spread)
    return torch.stack(channels, dim=1)


def blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Blur by a Gaussian with reflected borders. x: (N, C, S, S); sigma: (N,), in pixels."""
    size = x.shape[-1]
    reach = blur_reach(size)
    offsets = torch.arange(-reach, reach + 1, device=x.device)
    kernel = torch.softmax(-(offsets**2) / (2 * sigma[:, None] ** 2), dim=1)  # (N, K)

    pixels = torch.arange(size, device=x.device)
    reads = (pixels[:, None] + offsets).abs()  # (S, K): -1 reflects to 1 ...
    reads = (size - 1) - (size - 1 - reads).abs()  # ... and S to S - 2
    lands = (reads.T[:, :, None] == pixels).float()  # (K, S, S): tap k of pixel i falls on pixel j
    matrix = torch.einsum("nk,kij->nij", kernel, lands)
    return resample(x, matrix, matrix)


def blur_reach(size: int) -> int:
    """The kernel spans the odd number of pixels nearest to a tenth of the image, at least 3, as in SimCLR."""
    return max(1, size // 20)
