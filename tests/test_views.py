"""Views against torchvision's v2 functions, image by image, with the same row of the table."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from conftest import EVERYTHING
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from unitsphere.common.errors import UsageError
from unitsphere.common.randomness import generator
from unitsphere.images.canvas import Canvas
from unitsphere.views import apply as apply_module
from unitsphere.views.apply import apply, crop_boxes, crop_numbers, parameters
from unitsphere.views.draw import BRIGHTNESS, CONTRAST, HUE, SATURATION, Table, draw
from unitsphere.views.policies import POLICIES, Policy
from unitsphere.views.render import Frame, blur, grey, render, shift_hue
from unitsphere.views.views import standard_views

# float32 on values up to 1. The largest error is that of a resize weight: the centre of an output pixel
# near input pixel 50 is rounded by up to 2e-6, and the colour factors magnify it up to threefold.
# Against torchvision in float64 we stay below 7e-6; torchvision in float32 does not come closer.
TOLERANCE = 1e-5

RAGGED = [(40, 57), (33, 21), (64, 64), (7, 90), (81, 5), (1, 1), (16, 130)]
PLAIN = ((0.0,) * 3, (1.0,) * 3)


def noise(sizes: list[tuple[int, int]], channels: int = 3, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (h, w, channels), dtype=np.uint8) for h, w in sizes]


def as_float(image: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
    """(C, H, W) in [0, 1], as torchvision's own ToDtype(scale=True) would give."""
    scale = 65535 if image.dtype == np.uint16 else 255
    return torch.from_numpy(image.astype(np.int32)).permute(2, 0, 1).to(dtype) / scale


def crop(canvas: Canvas, boxes: Tensor, flip: Tensor, size: int) -> Tensor:
    numbers = parameters(canvas, draw(Policy(), len(canvas), generator(0, "views")), size)
    numbers[:, :10] = crop_numbers(canvas, boxes, flip, size)
    height, width = int(canvas.heights.max()), int(canvas.widths.max())
    return render(canvas.pixels, numbers, Frame(Policy(), size, height, width, canvas.full_scale, *PLAIN))


def only(**operations: float) -> Policy:
    """The whole picture, with these operations of EVERYTHING and no others."""
    nothing = dict.fromkeys(("jitter", "grey", "blur", "solarise", "flip"), 0.0)
    return replace(EVERYTHING, crop_scale=None, **{**nothing, **operations})


def noise_batch(n: int, size: int, channels: int = 3) -> Tensor:
    return torch.rand(n, channels, size, size, generator=generator(0, "noise", n, size))


def torchvision_jitter(x: Tensor, order: list[int], factors: list[float]) -> Tensor:
    functions = {
        BRIGHTNESS: F.adjust_brightness,
        CONTRAST: F.adjust_contrast,
        SATURATION: F.adjust_saturation,
        HUE: F.adjust_hue,
    }
    for operation in order:
        x = functions[operation](x, factors[operation])
    return x


def torchvision_view(image: np.ndarray, row: Table, size: int, dtype: torch.dtype) -> Tensor:
    """One view by torchvision, operation after operation, the flip last. row: a table of length 1."""
    top, left, height, width = crop_boxes(row, torch.tensor([image.shape[0]]), torch.tensor([image.shape[1]]))[
        0
    ].tolist()
    x = F.resized_crop(as_float(image, dtype), top, left, height, width, [size, size], antialias=True)
    if row.policy.grey_first and row.grey:
        x = F.rgb_to_grayscale(x, num_output_channels=3)
    if row.jitter:
        x = torchvision_jitter(x, row.order[0].tolist(), row.factors[0].tolist())
    if not row.policy.grey_first and row.grey:
        x = F.rgb_to_grayscale(x, num_output_channels=3)
    if row.blur:
        x = F.gaussian_blur(x, [max(3, 2 * (size // 20) + 1)] * 2, [float(row.sigma)])
    if row.solarise:
        x = F.solarize(x, row.policy.solarise_threshold)
    return F.horizontal_flip(x) if row.flip else x


@pytest.mark.parametrize("policy", [*POLICIES.values(), EVERYTHING], ids=[*POLICIES, "everything"])
@pytest.mark.parametrize("size", [32, 45])
# torchvision's own float32 error adds to ours: observed up to 1.4e-5.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, TOLERANCE), (torch.float32, 3e-5)])
def test_whole_chain_equals_torchvision_on_a_ragged_batch(
    policy: Policy, size: int, dtype: torch.dtype, tolerance: float
) -> None:
    images = noise(RAGGED * 6)
    table = draw(policy, len(images), generator(1, "views"))
    mean, std = (0.4, 0.5, 0.6), (1.0, 1.0, 1.0)
    views = apply(Canvas.of(images), table, size=size, mean=mean, std=std)
    for n, image in enumerate(images):
        expected = F.normalize(torchvision_view(image, table.slice(n, n + 1), size, dtype), mean, std)
        torch.testing.assert_close(views[n].to(dtype), expected, atol=tolerance, rtol=0)


def test_views_are_normalised_as_by_torchvision() -> None:
    image, table = noise([(16, 16)])[0], draw(POLICIES["none"], 1, generator(0, "views"))
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    found = apply(Canvas.of([image]), table, size=16, mean=mean, std=std)[0]
    torch.testing.assert_close(found, F.normalize(as_float(image), mean, std), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("size", [1, 8, 31, 100])
def test_crop_equals_torchvision_for_boxes_of_every_kind(size: int) -> None:
    image = noise([(60, 47)])[0]
    boxes = [
        (0, 0, 60, 47),  # the whole
        (0, 0, 20, 10),  # each corner
        (0, 37, 20, 10),
        (40, 0, 20, 10),
        (40, 37, 20, 10),
        (13, 9, 31, 31),
        (59, 46, 1, 1),  # one pixel
        (5, 0, 1, 47),  # one row
        (0, 7, 60, 1),  # one column
        (30, 20, 2, 3),
    ]
    flip = torch.tensor([False, True]).repeat(len(boxes))
    doubled = torch.tensor(boxes).repeat_interleave(2, dim=0)
    found = crop(Canvas.of([image] * len(flip)), doubled, flip, size)
    for n, (top, left, height, width) in enumerate(doubled.tolist()):
        expected = F.resized_crop(as_float(image), top, left, height, width, [size, size], antialias=True)
        expected = F.horizontal_flip(expected) if flip[n] else expected
        torch.testing.assert_close(found[n], expected, atol=TOLERANCE, rtol=0)


def test_crop_at_the_image_s_own_size_is_exact() -> None:
    image = noise([(32, 32)])[0]
    found = crop(Canvas.of([image]), torch.tensor([[0, 0, 32, 32]]), torch.tensor([False]), 32)
    assert torch.equal(found[0], as_float(image))


def test_crop_of_a_large_photo_equals_torchvision() -> None:
    image = noise([(1500, 2001)])[0]
    boxes = torch.tensor([[101, 203, 1200, 1700], [1400, 1890, 100, 111]])
    found = crop(Canvas.of([image, image]), boxes, torch.tensor([False, True]), 64)
    for n, (top, left, height, width) in enumerate(boxes.tolist()):
        expected = F.resized_crop(as_float(image), top, left, height, width, [64, 64], antialias=True)
        expected = F.horizontal_flip(expected) if n == 1 else expected
        torch.testing.assert_close(found[n], expected, atol=TOLERANCE, rtol=0)


def test_memory_is_bounded_by_chunks_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    canvas = Canvas.of(noise(RAGGED))
    table = draw(EVERYTHING, len(RAGGED), generator(2, "views"))
    whole = apply(canvas, table, size=24, mean=PLAIN[0], std=PLAIN[1])
    monkeypatch.setattr(apply_module, "CHUNK_BYTES", 3 * 4 * 81 * 130 * 2)  # two padded images
    torch.testing.assert_close(apply(canvas, table, size=24, mean=PLAIN[0], std=PLAIN[1]), whole)


@pytest.mark.parametrize("size", [8, 33, 64, 224])
def test_blur_equals_torchvision(size: int) -> None:
    x = noise_batch(6, size)
    sigma = torch.tensor([0.1, 0.3, 0.7, 1.1, 1.6, 2.0])
    kernel = max(3, round((size / 10 - 1) / 2) * 2 + 1)  # the odd number nearest to a tenth
    found = blur(x, sigma)
    for n in range(len(x)):
        expected = F.gaussian_blur(x[n], [kernel, kernel], [float(sigma[n])])
        torch.testing.assert_close(found[n], expected, atol=TOLERANCE, rtol=0)


def test_jitter_equals_torchvision_in_all_24_orders() -> None:
    orders = torch.tensor(list(permutations(range(4))))
    n = len(orders)
    table = replace(draw(only(jitter=1.0), n, generator(3, "views")), order=orders)
    images = noise([(16, 16)] * n)
    found = apply(Canvas.of(images), table, size=16, mean=PLAIN[0], std=PLAIN[1])
    for i in range(n):
        expected = torchvision_jitter(as_float(images[i]), orders[i].tolist(), table.factors[i].tolist())
        torch.testing.assert_close(found[i], expected, atol=TOLERANCE, rtol=0)


def test_images_without_jitter_stay_bit_for_bit() -> None:
    table = draw(only(jitter=0.5), 64, generator(4, "views"))
    images = noise([(8, 8)] * 64)
    found = apply(Canvas.of(images), table, size=8, mean=PLAIN[0], std=PLAIN[1])
    same = (found == torch.stack([as_float(image) for image in images])).flatten(1).all(dim=1)
    assert torch.equal(same, ~table.jitter)


def test_hue_equals_torchvision_with_grey_black_white_and_pure_pixels() -> None:
    special = torch.tensor([[0, 0, 0], [1, 1, 1], [0.5, 0.5, 0.5], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
    special = torch.cat([special, torch.tensor([[1.0, 1, 0], [0, 1, 1], [1, 0, 1]])])
    x = torch.cat([special, torch.rand(55, 3, generator=generator(0, "pixels"))]).T.reshape(1, 3, 8, 8)
    for shift in (-0.5, -0.37, -0.1, 0.0, 1e-3, 0.25, 1 / 3, 0.5):
        found = shift_hue(x, torch.tensor([shift]))
        torch.testing.assert_close(found, F.adjust_hue(x, shift), atol=TOLERANCE, rtol=0)


def test_grey_and_solarise_equal_torchvision() -> None:
    x = noise_batch(3, 9)
    torch.testing.assert_close(grey(x), F.rgb_to_grayscale(x), atol=0, rtol=0)
    image = noise([(9, 9)])[0]
    table = draw(replace(only(solarise=1.0), solarise_threshold=0.3), 1, generator(0, "views"))
    found = apply(Canvas.of([image]), table, size=9, mean=PLAIN[0], std=PLAIN[1])[0]
    torch.testing.assert_close(found, F.solarize(as_float(image), 0.3), atol=0, rtol=0)


def test_an_image_s_view_does_not_depend_on_its_neighbours() -> None:
    images = noise(RAGGED)
    table = draw(EVERYTHING, len(images), generator(5, "views"))
    together = apply(Canvas.of(images), table, size=20, mean=PLAIN[0], std=PLAIN[1])
    for n, image in enumerate(images):
        for poison in (0, 255):
            others = [np.full((150, 140, 3), poison, np.uint8) for _ in images]
            others[n] = image
            view = apply(Canvas.of(others), table, size=20, mean=PLAIN[0], std=PLAIN[1])[n]
            # Matrices of another padded size may be summed in another order.
            torch.testing.assert_close(view, together[n], atol=TOLERANCE, rtol=0)


def test_equal_inputs_give_equal_views_and_the_canvas_is_left_alone() -> None:
    canvas = Canvas.of(noise(RAGGED))
    before = canvas.pixels.clone()
    views = [
        apply(canvas, draw(EVERYTHING, 7, generator(6, "views", 3)), size=16, mean=PLAIN[0], std=PLAIN[1])
        for _ in range(2)
    ]
    assert torch.equal(views[0], views[1])
    assert torch.equal(canvas.pixels, before)


@pytest.mark.parametrize("channels", [1, 5])
def test_images_without_colour_get_brightness_and_contrast_only(channels: int) -> None:
    images = noise(RAGGED, channels)
    table = draw(EVERYTHING, len(images), generator(7, "views"))
    always = torch.ones(len(images), dtype=torch.bool)
    table = replace(table, jitter=always, grey=always)
    views = apply(Canvas.of(images), table, size=20, mean=(0.0,) * channels, std=(1.0,) * channels)
    boxes = crop_boxes(table, *torch.tensor([image.shape[:2] for image in images]).unbind(1))
    for n, image in enumerate(images):
        x = F.resized_crop(as_float(image), *boxes[n].tolist(), [20, 20], antialias=True)
        for operation in table.order[n].tolist():
            factor = float(table.factors[n, operation])
            if operation == BRIGHTNESS:
                x = (factor * x).clamp(0, 1)
            elif operation == CONTRAST:
                x = (factor * x + (1 - factor) * x.mean()).clamp(0, 1)
        x = F.gaussian_blur(x, [3, 3], [float(table.sigma[n])]) if table.blur[n] else x
        x = F.solarize(x, 0.5) if table.solarise[n] else x
        x = F.horizontal_flip(x) if table.flip[n] else x
        torch.testing.assert_close(views[n], x, atol=TOLERANCE, rtol=0)


def test_sixteen_bits_keep_their_depth() -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 65536, (h, w, 1), dtype=np.uint16) for h, w in RAGGED]
    table = draw(POLICIES["none"], len(images), generator(8, "views"))
    views = apply(Canvas.of(images), table, size=24, mean=(0.0,), std=(1.0,))
    for n, image in enumerate(images):
        expected = F.resize(as_float(image), [24, 24], antialias=True)
        torch.testing.assert_close(views[n], expected, atol=TOLERANCE, rtol=0)
    fine = np.arange(1024, 1024 + 16, dtype=np.uint16).reshape(4, 4, 1)  # all one level of 8 bits
    view = apply(Canvas.of([fine]), table.slice(0, 1), size=4, mean=(0.0,), std=(1.0,))
    assert len(view.unique()) == 16


def test_autocast_around_the_views_does_not_coarsen_them() -> None:
    canvas = Canvas.of(noise(RAGGED))
    table = draw(EVERYTHING, len(RAGGED), generator(9, "views"))
    plain = apply(canvas, table, size=16, mean=PLAIN[0], std=PLAIN[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = apply(canvas, table, size=16, mean=PLAIN[0], std=PLAIN[1])
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, plain, atol=TOLERANCE, rtol=0)


def test_a_mean_of_the_wrong_length_is_refused() -> None:
    canvas = Canvas.of(noise([(8, 8)], channels=1))
    with pytest.raises(UsageError, match=r"1 channels .* mean of 3"):
        apply(canvas, draw(Policy(), 1, generator(0, "views")), size=8, mean=PLAIN[0], std=PLAIN[1])


def test_all_views_of_a_step_are_those_of_their_own_tables() -> None:
    canvas, policies = Canvas.of(noise(RAGGED)), [EVERYTHING, POLICIES["moco-v1"]]
    look = {"size": 16, "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.25, 0.3)}
    found = standard_views(policies, 3, seed=5, **look)(canvas, "views", 8, rank=1, ranks=2)
    n = len(canvas)
    for view, policy in enumerate([policies[0], policies[1], policies[0]]):  # they take turns
        table = draw(policy, 2 * n, generator(5, "views", 8, view)).slice(n, 2 * n)
        assert torch.equal(found[view], apply(canvas, table, **look))
    assert len(found) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_and_cpu_agree() -> None:
    canvas = Canvas.of(noise(RAGGED * 4))
    table = draw(EVERYTHING, len(canvas), generator(10, "views"))
    on_cpu = apply(canvas, table, size=48, mean=(0.5,) * 3, std=(0.25,) * 3)
    on_cuda = apply(canvas.to("cuda"), table, size=48, mean=(0.5,) * 3, std=(0.25,) * 3)
    assert on_cuda.device.type == "cuda"
    torch.testing.assert_close(on_cuda.cpu(), on_cpu, atol=1e-4, rtol=0)
