"""The fused kernels against the plain form: on CUDA, and on the CPU by Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so without a card the comparisons run in a process of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from conftest import EVERYTHING, interpret_kernels
from torch import Tensor

from unitsphere.common.randomness import generator
from unitsphere.images.canvas import Canvas
from unitsphere.views.apply import apply, parameters
from unitsphere.views.draw import Table, draw
from unitsphere.views.policies import POLICIES, Policy
from unitsphere.views.render import Frame, render

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

# Each form stays within 1e-5 of the exact view before it is normalised (see test_views), and a deviation of 0.2
# magnifies the error of either fivefold.
TOLERANCE = 1e-4
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)

RAGGED = [(40, 57), (33, 21), (7, 90), (81, 5), (1, 1)]
EVERY_POLICY = {**POLICIES, "everything": EVERYTHING, "everything, grey first": replace(EVERYTHING, grey_first=True)}

needs_card = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs CUDA")


def runs_kernels(test: Callable[..., None]) -> Callable[..., None]:
    can = INTERPRETED or torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(not can, reason="needs CUDA, or TRITON_INTERPRET=1")(test))


def noise(sizes: list[tuple[int, int]], dtype: type = np.uint8) -> Canvas:
    rng = np.random.default_rng(0)
    return Canvas.of([rng.integers(0, np.iinfo(dtype).max + 1, (h, w, 3), dtype=dtype) for h, w in sizes])


def frame_of(canvas: Canvas, policy: Policy, size: int) -> Frame:
    height, width = int(canvas.heights.max()), int(canvas.widths.max())
    return Frame(policy, size, height, width, canvas.full_scale, MEAN, STD)


def fused(canvas: Canvas, table: Table, size: int) -> Tensor:
    from unitsphere.views.fused import render as fused_render

    numbers = parameters(canvas, table, size).to(DEVICE)
    return fused_render(canvas.pixels.to(DEVICE), numbers, frame_of(canvas, table.policy, size))


def assert_forms_agree(canvas: Canvas, table: Table, size: int) -> None:
    expected = render(canvas.pixels, parameters(canvas, table, size), frame_of(canvas, table.policy, size))
    torch.testing.assert_close(fused(canvas, table, size).cpu(), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a card the kernels are compared on it")
def test_the_comparisons_hold_in_triton_s_interpreter() -> None:
    interpret_kernels(__file__)


@runs_kernels
@pytest.mark.parametrize("policy", EVERY_POLICY.values(), ids=EVERY_POLICY)
@pytest.mark.parametrize("size", [32, 45, pytest.param(224, marks=needs_card)])
def test_every_policy_equals_the_plain_form_on_a_ragged_batch(policy: Policy, size: int) -> None:
    canvas = noise(RAGGED if INTERPRETED else RAGGED * 10)
    assert_forms_agree(canvas, draw(policy, len(canvas), generator(1, "views")), size)


@runs_kernels
def test_contrast_sees_the_mean_at_its_turn_in_all_24_orders() -> None:
    orders = torch.tensor(list(permutations(range(4))))
    canvas = noise([(20, 20)] * len(orders))
    table = draw(EVERYTHING, len(orders), generator(2, "views"))
    assert_forms_agree(canvas, replace(table, order=orders, jitter=torch.ones(len(orders), dtype=torch.bool)), 16)


@runs_kernels
@pytest.mark.parametrize(("source", "size"), [((2, 3), 40), ((70, 61), 8), ((5, 150), 24), ((32, 32), 32)])
def test_enlarging_and_shrinking_equal_the_plain_form(source: tuple[int, int], size: int) -> None:
    canvas = noise([source] * 2)
    for policy in (POLICIES["none"], EVERYTHING):
        assert_forms_agree(canvas, draw(policy, 2, generator(3, "views")), size)


@runs_kernels
def test_sixteen_bits_equal_the_plain_form() -> None:
    canvas = noise(RAGGED, np.uint16)
    assert canvas.full_scale == 65535
    assert_forms_agree(canvas, draw(EVERYTHING, len(canvas), generator(4, "views")), 32)


@runs_kernels
def test_views_are_channels_last_and_the_same_each_time() -> None:
    canvas = noise(RAGGED)
    table = draw(EVERYTHING, len(canvas), generator(5, "views"))
    views = [fused(canvas, table, 33) for _ in range(2)]
    assert views[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(*views)


@runs_kernels
def test_grey_pictures_black_white_and_pure_colours_equal_the_plain_form() -> None:
    colours = [(0, 0, 0), (255, 255, 255), (90, 90, 90), (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]
    canvas = Canvas.of([np.tile(np.uint8(colour), (9, 9, 1)) for colour in colours])
    always = torch.ones(len(colours), dtype=torch.bool)
    table = replace(draw(EVERYTHING, len(colours), generator(6, "views")), jitter=always)
    assert_forms_agree(canvas, table, 16)


@runs_kernels
@needs_card
def test_images_far_into_a_large_canvas_are_found() -> None:
    image = noise([(40, 57)])
    rows = 2**31 // 3 + 40 * 57  # its bytes lie beyond what 32 bits count
    pixels = torch.zeros((rows, 3), dtype=torch.uint8, device=DEVICE)
    pixels[-40 * 57 :] = image.pixels.to(DEVICE)
    far = replace(image, pixels=pixels, offsets=torch.tensor([rows - 40 * 57]))
    table = draw(EVERYTHING, 1, generator(7, "views"))
    assert torch.equal(fused(far, table, 32), fused(image, table, 32))


@runs_kernels
@needs_card
def test_a_recorded_graph_follows_new_numbers() -> None:
    from unitsphere.views.fused import render as fused_render

    canvas = noise(RAGGED)
    pixels, frame = canvas.pixels.to(DEVICE), frame_of(canvas, EVERYTHING, 32)
    draws = [parameters(canvas, draw(EVERYTHING, len(canvas), generator(8, "views", n)), 32) for n in range(2)]
    numbers = draws[0].to(DEVICE)
    fused_render(pixels, numbers, frame)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        views = fused_render(pixels, numbers, frame)
    for drawn in draws:
        numbers.copy_(drawn)
        graph.replay()
        torch.testing.assert_close(views.cpu(), render(canvas.pixels, drawn, frame), atol=TOLERANCE, rtol=0)


@runs_kernels
@needs_card
@pytest.mark.parametrize("channels", [1, 3])
def test_apply_takes_the_form_that_fits_the_channels(channels: int) -> None:
    canvas = noise(RAGGED)
    canvas = replace(canvas, pixels=canvas.pixels[:, :channels].contiguous())
    table = draw(EVERYTHING, len(canvas), generator(9, "views"))
    on_cpu, on_cuda = (
        apply(at, table, size=32, mean=MEAN[:channels], std=STD[:channels]) for at in (canvas, canvas.to(DEVICE))
    )
    assert on_cuda.is_contiguous(memory_format=torch.channels_last) or channels == 1
    torch.testing.assert_close(on_cuda.cpu(), on_cpu, atol=TOLERANCE, rtol=0)
