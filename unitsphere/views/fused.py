"""The fused form of `render`: the same views by Triton kernels, for three channels on CUDA.

A program makes a tile of one view and reads what it needs straight from the ragged canvas: nothing is padded to the
largest image. `_resize` cuts the crop and does the jitter up to contrast, which needs the mean of the whole view;
`_colour` does the rest; `_blur` goes over the views that are blurred, across and then down. What an image is to have
stands in its row of numbers, and what it is not to have stands there as doing nothing.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from unitsphere.views.render import NO_BLUR, Frame, blur_reach

TILE = tl.constexpr(1024)  # pixels of a program
WARPS = 8
UNBLURRED = tl.constexpr(NO_BLUR)
# Columns of the numbers, see `apply.parameters`.
OFFSET, STRIDE, DOWN, ACROSS, TURNS, GREY, SIGMA, SOLARISE, COLUMNS = (
    tl.constexpr(column) for column in (0, 1, 2, 6, 10, 26, 27, 28, 29)
)


def render(pixels: Tensor, numbers: Tensor, frame: Frame) -> Tensor:
    """(N, 3, S, S) float32, channels-last: `render.render` to rounding. The frame's height and width do not matter.

    pixels: (P, 3) uint8 or int32; numbers: (N, 29) float64 beside them. Both contiguous.
    """
    size, policy = frame.size, frame.policy
    tiles = triton.cdiv(size * size, TILE.value)
    shape = (len(numbers), 3, size, size)
    out = torch.empty(shape, dtype=torch.float32, device=pixels.device, memory_format=torch.channels_last)
    # Between kernels a view is stored channel after channel: here, or in `out` until that gets its last values.
    between = torch.empty_like(out)
    sums = out.new_empty(len(numbers), tiles)
    last = (policy.solarise_threshold, frame.mean, frame.std)
    grid = (len(numbers) * tiles,)
    common = {"SIZE": size, "TILES": tiles, "num_warps": WARPS}
    with torch.cuda.device_of(pixels):
        _resize[grid](pixels, numbers, between, sums, frame.full_scale, GREY_FIRST=policy.grey_first, **common)
        _colour[grid](between, numbers, out, sums, *last, GREY_FIRST=policy.grey_first, **common)
        if policy.blur:
            reach = blur_reach(size)
            _blur[grid](out, numbers, between, *last, REACH=reach, LAST=False, **common)
            _blur[grid](between, numbers, out, *last, REACH=reach, LAST=True, **common)
    return out


@triton.jit
def _resize(
    pixels: tl.tensor,
    numbers: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    full_scale: tl.tensor,
    GREY_FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """The crop in [0, 1] and the turns before contrast. sums: (N, TILES), of the grey that contrast will see.

    The weights are those of `render.weights`; here only the pixels within reach are visited.
    """
    image, pixel, inside, row = _tile(numbers, SIZE, TILES)
    top, height, y, reach_y, low_y = _axis(row + DOWN, pixel // SIZE)
    left, width, x, reach_x, low_x = _axis(row + ACROSS, pixel % SIZE)
    pixels += 3 * tl.load(row + OFFSET).to(tl.int64)
    stride = tl.load(row + STRIDE).to(tl.int32)

    r = tl.zeros([TILE], tl.float32)
    g = tl.zeros([TILE], tl.float32)
    b = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for i in range(tl.ceil(2 * reach_y).to(tl.int32)):
        weight_y = _triangle(low_y + i, y, reach_y, height)
        start = pixels + 3 * ((top + low_y + i) * stride + left)
        for j in range(tl.ceil(2 * reach_x).to(tl.int32)):
            weight = weight_y * _triangle(low_x + j, x, reach_x, width)
            at = start + 3 * (low_x + j)
            seen = weight > 0
            r += weight * tl.load(at, mask=seen, other=0).to(tl.float32)
            g += weight * tl.load(at + 1, mask=seen, other=0).to(tl.float32)
            b += weight * tl.load(at + 2, mask=seen, other=0).to(tl.float32)
            total += weight
    total *= full_scale
    r, g, b = r / total, g / total, b / total

    if GREY_FIRST:
        r, g, b = _grey_some(r, g, b, row)
    for k in range(_contrast(row)):
        r, g, b = _turn(r, g, b, 0.0, row + TURNS + 4 * k)
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(inside, _grey(r, g, b), 0.0), axis=0))
    _store_planes(out, image, pixel, inside, r, g, b, SIZE)


@triton.jit
def _colour(
    x: tl.tensor,
    numbers: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    threshold: tl.tensor,
    mean: tl.tensor,
    std: tl.tensor,
    GREY_FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Contrast and the turns after it; then the view is done, or waits in `out` for the blur."""
    image, pixel, inside, row = _tile(numbers, SIZE, TILES)
    tile = tl.arange(0, triton.next_power_of_2(TILES))
    grey = tl.sum(tl.load(sums + image * TILES + tile, mask=tile < TILES, other=0.0), axis=0) / (SIZE * SIZE)
    r, g, b = _load_planes(x, image, pixel, inside, SIZE)
    for k in range(_contrast(row), 4):
        r, g, b = _turn(r, g, b, grey, row + TURNS + 4 * k)
    if not GREY_FIRST:
        r, g, b = _grey_some(r, g, b, row)
    if _sigma(row) > UNBLURRED:
        _store_planes(out, image, pixel, inside, r, g, b, SIZE)
    else:
        _store_view(out, image, pixel, inside, r, g, b, row, threshold, mean, std, SIZE)


@triton.jit
def _blur(
    x: tl.tensor,
    numbers: tl.tensor,
    out: tl.tensor,
    threshold: tl.tensor,
    mean: tl.tensor,
    std: tl.tensor,
    REACH: tl.constexpr,
    LAST: tl.constexpr,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """`render.blur` along one axis, across first and down last. Only of the views that are blurred."""
    image, pixel, inside, row = _tile(numbers, SIZE, TILES)
    sigma = _sigma(row)
    if sigma > UNBLURRED:
        place = pixel // SIZE if LAST else pixel % SIZE
        r = tl.zeros([TILE], tl.float32)
        g = tl.zeros([TILE], tl.float32)
        b = tl.zeros([TILE], tl.float32)
        total = 0.0
        reach = tl.minimum(tl.ceil(6 * sigma).to(tl.int32), REACH)  # beyond, weights vanish in float32's rounding
        for offset in range(-reach, reach + 1):
            weight = tl.exp(-(offset * offset) / (2 * sigma * sigma))
            reads = tl.abs(place + offset)  # -1 reflects to 1 ...
            reads = (SIZE - 1) - tl.abs(SIZE - 1 - reads)  # ... and S to S - 2
            read = pixel + (reads - place) * (SIZE if LAST else 1)
            near_r, near_g, near_b = _load_planes(x, image, read, inside, SIZE)
            r += weight * near_r
            g += weight * near_g
            b += weight * near_b
            total += weight
        r, g, b = r / total, g / total, b / total
        if LAST:
            _store_view(out, image, pixel, inside, r, g, b, row, threshold, mean, std, SIZE)
        else:
            _store_planes(out, image, pixel, inside, r, g, b, SIZE)


@triton.jit
def _tile(numbers: tl.tensor, SIZE: tl.constexpr, TILES: tl.constexpr) -> tl.tuple:
    """Which image, which of its pixels, which of these are there, and where its numbers begin."""
    image = (tl.program_id(0) // TILES).to(tl.int64)
    pixel = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    return image, pixel, pixel < SIZE * SIZE, numbers + image * COLUMNS


@triton.jit
def _axis(axis: tl.tensor, place: tl.tensor) -> tl.tuple:
    """The part seen, the centre of each output pixel, how far the filter reaches, and the first pixel it reaches."""
    start, length = tl.load(axis).to(tl.int32), tl.load(axis + 1).to(tl.int32)
    first, step = tl.load(axis + 2), tl.load(axis + 3)
    centre = (first + step * place).to(tl.float32)  # in float64 until here, as in `render.weights`
    reach = tl.maximum(tl.abs(step), 1.0).to(tl.float32)
    return start, length, centre, reach, tl.floor(centre - 0.5 - reach).to(tl.int32) + 1


@triton.jit
def _triangle(pixel: tl.tensor, centre: tl.tensor, reach: tl.tensor, length: tl.tensor) -> tl.tensor:
    """Not yet normalised; 0 outside the part seen."""
    weight = tl.maximum(1 - tl.abs(pixel + 0.5 - centre) * (1 / reach), 0.0)  # one division before the loops
    return tl.where((pixel >= 0) & (pixel < length), weight, 0.0)


@triton.jit
def _contrast(row: tl.tensor) -> tl.tensor:
    """The turn that asks for the mean, or 4."""
    turn = tl.arange(0, 4)
    of_mean = tl.load(row + TURNS + 4 * turn + 1)
    return tl.min(tl.where(of_mean != 0, turn, 4), axis=0)


@triton.jit
def _turn(r: tl.tensor, g: tl.tensor, b: tl.tensor, mean: tl.tensor, turn: tl.tensor) -> tl.tuple:
    """One turn of jitter."""
    keep, of_mean = tl.load(turn).to(tl.float32), tl.load(turn + 1).to(tl.float32)
    of_grey, shift = tl.load(turn + 2).to(tl.float32), tl.load(turn + 3).to(tl.float32)
    rest = of_grey * _grey(r, g, b) + of_mean * mean
    r, g, b = _clamp(keep * r + rest), _clamp(keep * g + rest), _clamp(keep * b + rest)
    if shift != 0:
        r, g, b = _shift_hue(r, g, b, shift)
    return r, g, b


@triton.jit
def _shift_hue(r: tl.tensor, g: tl.tensor, b: tl.tensor, shift: tl.tensor) -> tl.tuple:
    """`render.shift_hue`."""
    value = tl.maximum(tl.maximum(r, g), b)
    spread = value - tl.minimum(tl.minimum(r, g), b)
    safe = tl.maximum(spread, 1e-37)
    hue = tl.where(value == r, (g - b) / safe, tl.where(value == g, (b - r) / safe + 2, (r - g) / safe + 4))
    hue += 6 * shift
    return _hue_to(value, spread, hue + 5), _hue_to(value, spread, hue + 3), _hue_to(value, spread, hue + 1)


@triton.jit
def _hue_to(value: tl.tensor, spread: tl.tensor, k: tl.tensor) -> tl.tensor:
    k -= 6 * tl.floor(k / 6)
    return value - _clamp(tl.minimum(k, 4 - k)) * spread


@triton.jit
def _clamp(x: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _grey(r: tl.tensor, g: tl.tensor, b: tl.tensor) -> tl.tensor:
    return 0.2989 * r + 0.587 * g + 0.114 * b


@triton.jit
def _grey_some(r: tl.tensor, g: tl.tensor, b: tl.tensor, row: tl.tensor) -> tl.tuple:
    if tl.load(row + GREY) != 0:
        shade = _grey(r, g, b)
        r, g, b = shade, shade, shade
    return r, g, b


@triton.jit
def _sigma(row: tl.tensor) -> tl.tensor:
    return tl.load(row + SIGMA).to(tl.float32)


@triton.jit
def _load_planes(x: tl.tensor, image: tl.tensor, pixel: tl.tensor, inside: tl.tensor, SIZE: tl.constexpr) -> tl.tuple:
    at = x + image * (3 * SIZE * SIZE) + pixel
    r = tl.load(at, mask=inside, other=0.0)
    g = tl.load(at + SIZE * SIZE, mask=inside, other=0.0)
    return r, g, tl.load(at + 2 * SIZE * SIZE, mask=inside, other=0.0)


@triton.jit
def _store_planes(
    out: tl.tensor,
    image: tl.tensor,
    pixel: tl.tensor,
    inside: tl.tensor,
    r: tl.tensor,
    g: tl.tensor,
    b: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    at = out + image * (3 * SIZE * SIZE) + pixel
    tl.store(at, r, mask=inside)
    tl.store(at + SIZE * SIZE, g, mask=inside)
    tl.store(at + 2 * SIZE * SIZE, b, mask=inside)


@triton.jit
def _store_view(
    out: tl.tensor,
    image: tl.tensor,
    pixel: tl.tensor,
    inside: tl.tensor,
    r: tl.tensor,
    g: tl.tensor,
    b: tl.tensor,
    row: tl.tensor,
    threshold: tl.tensor,
    mean: tl.tensor,
    std: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    """The end of a view: solarised where asked, normalised, stored channels-last."""
    if tl.load(row + SOLARISE) != 0:
        r = tl.where(r >= threshold, 1 - r, r)
        g = tl.where(g >= threshold, 1 - g, g)
        b = tl.where(b >= threshold, 1 - b, b)
    at = out + image * (3 * SIZE * SIZE) + 3 * pixel
    tl.store(at, (r - mean[0]) / std[0], mask=inside)
    tl.store(at + 1, (g - mean[1]) / std[1], mask=inside)
    tl.store(at + 2, (b - mean[2]) / std[2], mask=inside)
