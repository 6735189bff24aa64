"""What stands before and behind the first convolution of a ResNet, as kernels: blocks of pixels, and max-pool.

torch's max-pool keeps the place of each maximum as an int64, four times as much as the maxima themselves, and adds up
its gradient at the slowest. Here a place is one byte, and each pixel gathers its gradient from the windows it is in.
This module needs Triton; it is imported only where the kernels run. (TRITON_INTERPRET=1 runs them on a CPU.)
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor


@triton.jit
def _blocks(  # type: ignore[no-untyped-def]
    images, out, count, height, width, stride_n, stride_c, stride_h, stride_w, C: tl.constexpr, WIDE: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    across = width // 2 + BEFORE + AFTER
    down = height // 2 + BEFORE + AFTER
    column = place % across - BEFORE
    row = place // across % down - BEFORE
    image = (place // (across * down)).to(tl.int64)
    within = (place < count) & (row >= 0) & (row < height // 2) & (column >= 0) & (column < width // 2)
    channel = tl.arange(0, WIDE)
    y = 2 * row[:, None] + channel[None, :] % 4 // 2
    x = 2 * column[:, None] + channel[None, :] % 2
    at = (image * stride_n)[:, None] + y * stride_h + x * stride_w + channel[None, :] // 4 * stride_c
    found = tl.load(images + at, mask=within[:, None] & (channel < 4 * C)[None, :], other=0.0)
    to = out + place.to(tl.int64)[:, None] * WIDE + channel[None, :]
    tl.store(to, found.to(out.dtype.element_ty), mask=(place < count)[:, None])


def pixel_blocks(images: Tensor, dtype: torch.dtype, before: int, after: int) -> Tensor:
    """Each block of 2x2 pixels as one pixel, with zeros around: (N, C, H, W) to (N, W4, H / 2 + before + after, ...) in
    channels-last, where W4 is 4 C made 8 or a higher power of two by zeros. As `pixel_unshuffle` and two pads; no
    gradient."""
    n, channels, height, width = images.shape
    wide = max(8, triton.next_power_of_2(4 * channels))
    shape = n, wide, height // 2 + before + after, width // 2 + before + after
    out = torch.empty(shape, dtype=dtype, device=images.device, memory_format=torch.channels_last)
    count, block = out.numel() // wide, 128
    with torch.cuda.device_of(images):
        _blocks[triton.cdiv(count, block),](
            images, out, count, height, width, *images.stride(), C=channels, WIDE=wide, BEFORE=before, AFTER=after,
            BLOCK=block,
        )  # fmt: skip
    return out


@triton.jit
def _pool(  # type: ignore[no-untyped-def]
    x, out, places, count, height, width, C, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr
):
    """The largest of each 3x3 window at stride 2, and which of its 9 it is: the first of equals, or the last NaN."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    across, down = (width + 1) // 2, (height + 1) // 2
    column, row = place % across, place // across % down
    image = (place // (across * down)).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    best = tl.full((BLOCK, BLOCK_C), float("-inf"), tl.float32)
    which = tl.zeros((BLOCK, BLOCK_C), tl.int32)
    for tap in tl.static_range(9):
        y, across_x = 2 * row - 1 + tap // 3, 2 * column - 1 + tap % 3
        within = (place < count) & (y >= 0) & (y < height) & (across_x >= 0) & (across_x < width)
        at = ((image * height + y) * width + across_x)[:, None] * C + channel
        value = tl.load(x + at, mask=within[:, None] & (channel < C), other=float("-inf")).to(tl.float32)
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        which = tl.where(better, tap, which)
    to = place.to(tl.int64)[:, None] * C + channel
    held = (place < count)[:, None] & (channel < C)
    tl.store(out + to, best.to(out.dtype.element_ty), mask=held)
    if places is not None:
        tl.store(places + to, which.to(tl.uint8), mask=held)


@triton.jit
def _unpool(  # type: ignore[no-untyped-def]
    gradient, places, into, count, height, width, C, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr
):
    """The gradient of each pixel: from the up to four windows that it is in, of those whose maximum it is."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    across, down = (width + 1) // 2, (height + 1) // 2
    x, y = place % width, place // width % height
    image = (place // (width * height)).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    total = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    for window in tl.static_range(4):
        row, column = (y + 1) // 2 - window // 2, (x + 1) // 2 - window % 2
        tap_y, tap_x = y + 1 - 2 * row, x + 1 - 2 * column
        within = (place < count) & (row >= 0) & (row < down) & (column >= 0) & (column < across)
        within &= (tap_y < 3) & (tap_x < 3)
        at = ((image * down + row) * across + column)[:, None] * C + channel
        held = within[:, None] & (channel < C)
        which = tl.load(places + at, mask=held, other=255).to(tl.int32)
        given = tl.load(gradient + at, mask=held, other=0.0).to(tl.float32)
        total += tl.where(which == (3 * tap_y + tap_x)[:, None], given, 0.0)
    to = place.to(tl.int64)[:, None] * C + channel
    tl.store(into + to, total.to(into.dtype.element_ty), mask=(place < count)[:, None] & (channel < C))


def grid_of(pixels: int, channels: int) -> tuple[tuple[int, int], dict[str, int]]:
    block_c = max(8, min(64, triton.next_power_of_2(channels)))
    block = 2048 // block_c
    return (triton.cdiv(pixels, block), triton.cdiv(channels, block_c)), {"BLOCK": block, "BLOCK_C": block_c}


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        n, channels, height, width = x.shape
        shape = n, channels, (height + 1) // 2, (width + 1) // 2
        out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        places = torch.empty_like(out, dtype=torch.uint8) if ctx.needs_input_grad[0] else None
        pixels = out.numel() // channels
        grid, tile = grid_of(pixels, channels)
        with torch.cuda.device_of(x):
            _pool[grid](x, out, places, pixels, height, width, channels, **tile)
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (places,) = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        _, channels, height, width = ctx.shape
        into = torch.empty(ctx.shape, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last)
        pixels = into.numel() // channels
        grid, tile = grid_of(pixels, channels)
        with torch.cuda.device_of(gradient):
            _unpool[grid](gradient, places, into, pixels, height, width, channels, **tile)
        return into


def max_pool(x: Tensor) -> Tensor:
    """Max-pool over 3x3 windows at stride 2, padded by 1: (N, C, H, W) in float32 or half precision, to channels-last.
    As torch's, to the last bit, but that the sums of up to four gradients are rounded once."""
    return _MaxPool.apply(x)
