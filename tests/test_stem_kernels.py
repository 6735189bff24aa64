"""The kernels of the stem against torch: on a GPU, or interpreted on a CPU."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import pytest
import torch
from conftest import interpret_kernels
from torch import Tensor, nn
from torch.nn import functional as F

from unitsphere.modules import fused_blocks
from unitsphere.modules.backbones import SmallStemConv, StemConv
from unitsphere.modules.fused_blocks import MaxPool

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
LAYOUTS = [torch.contiguous_format, torch.channels_last]

needs_card = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs CUDA")


def runs_kernels(test: Callable[..., None]) -> Callable[..., None]:
    can = INTERPRETED or torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(not can, reason="needs CUDA, or TRITON_INTERPRET=1")(test))


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a card the kernels are compared on it")
def test_the_kernels_are_right_when_interpreted() -> None:
    interpret_kernels(__file__)


@runs_kernels
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 8, 12), (1, 1, 6, 6), (3, 4, 4, 6), (2, 2, 2, 2)], ids=str)
def test_blocks_of_pixels_are_those_of_pixel_unshuffle(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    from unitsphere.modules.stem_kernels import pixel_blocks

    images = drawn(*shape).contiguous(memory_format=layout)
    spare = -4 * shape[1] % 8
    for dtype in (torch.float32, torch.float16):
        found = pixel_blocks(images, dtype, 2, 1)
        assert torch.equal(found, F.pad(F.pixel_unshuffle(images, 2), (2, 1, 2, 1, 0, spare)).to(dtype))
        assert found.is_contiguous(memory_format=torch.channels_last)


@runs_kernels
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [(2, 16, 7, 9), (1, 70, 8, 8), (2, 3, 5, 4), (3, 64, 1, 1)], ids=str)
def test_max_pool_and_its_gradient_are_torch_s(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    """With many equal values, of which the first counts, as behind a ReLU."""
    from unitsphere.modules.stem_kernels import max_pool

    x = drawn(*shape).relu().contiguous(memory_format=layout).requires_grad_()
    y, expected = max_pool(x), F.max_pool2d(x, 3, 2, 1)
    assert torch.equal(y, expected)
    pull = drawn(*y.shape, seed=1)
    found, true = (torch.autograd.grad(each, x, pull)[0] for each in (y, expected))
    torch.testing.assert_close(found, true, rtol=1e-6, atol=1e-6)  # up to four terms in another order
    with torch.no_grad():
        assert torch.equal(max_pool(x), expected)


@runs_kernels
def test_what_is_not_finite_is_a_maximum() -> None:
    from unitsphere.modules.stem_kernels import max_pool

    x = drawn(1, 8, 6, 6)
    x[0, 0, 2, 2], x[0, 1, 3, 3], x[0, 2] = torch.nan, torch.inf, -torch.inf
    assert torch.equal(max_pool(x).nan_to_num(nan=99), F.max_pool2d(x, 3, 2, 1).nan_to_num(nan=99))


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("stem", [StemConv, SmallStemConv])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_the_stem_in_half_precision_is_the_ordinary_convolution(
    stem: type[nn.Conv2d], channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(stem(channels), nn.BatchNorm2d(64), MaxPool(3, 2, 1)).to(DEVICE)
    images = drawn(4, channels, 32, 48).contiguous(memory_format=torch.channels_last)
    found = {}
    for kernels in ("off", "plain"):
        monkeypatch.setattr(fused_blocks, "KERNELS", kernels)
        own = copy.deepcopy(network)
        with torch.autocast("cuda", torch.bfloat16):
            y = own(images)
        y.float().square().mean().backward()
        found[kernels] = y.float(), own[0].weight.grad
    for ours, theirs in zip(found["plain"], found["off"], strict=True):
        assert (ours - theirs).norm() < 2**-6 * theirs.norm()
