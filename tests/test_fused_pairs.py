"""The products of pairs of rows against float64: on a GPU, or interpreted on a CPU."""

import os

import pytest
import torch
from conftest import interpret_kernels

from unitsphere.objectives import mixing

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
USABLE = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs CUDA or TRITON_INTERPRET=1")


@pytest.mark.gpu
@USABLE
@pytest.mark.parametrize(
    ("rows", "dim", "shape"),
    [(50, 128, (7, 33)), (300, 100, (1, 1)), (9, 1, (2, 5)), (40, 2048, (3, 11)), (8, 16, (4, 0))],
)
def test_products_of_pairs(rows, dim, shape):
    from unitsphere.objectives.fused_pairs import dots_of_pairs

    draw = torch.Generator().manual_seed(rows)
    vectors = torch.randn(dim, rows, generator=draw).T  # rows that do not lie one after another
    first, second = (torch.randint(rows, shape, generator=draw) for _ in range(2))
    found = dots_of_pairs(*(tensor.to(DEVICE) for tensor in (vectors, first, second))).cpu()
    expected = (vectors.double()[first] * vectors.double()[second]).sum(-1)
    size = vectors.double().norm(dim=1)
    assert found.shape == expected.shape and found.dtype == torch.float32
    assert bool(((found - expected).abs() <= 1e-6 * size[first] * size[second]).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_mixing_takes_the_kernel_and_gives_the_same_scores(monkeypatch):
    from unitsphere.objectives import fused_pairs

    draw = torch.Generator().manual_seed(0)
    query, negatives = (torch.nn.functional.normalize(torch.randn(n, 128, generator=draw)).cuda() for n in (64, 4096))
    how = {"temperature": 0.2, "draw_seed": torch.tensor(5).cuda(), "rows": torch.arange(64).cuda()}
    kernel, taken = fused_pairs.dots_of_pairs, []
    monkeypatch.setattr(fused_pairs, "dots_of_pairs", lambda *given: taken.append(given) or kernel(*given))

    def scores(dtype):
        leaf = query.to(dtype, copy=True).requires_grad_()
        found = mixing.synthesise(leaf, negatives.to(dtype), mixing.Mixing(256, 512, 64), **how).scores
        found[:, ::16].square().sum().backward()  # of all, a gradient's entries cancel down to float32's rounding
        return found.detach(), leaf.grad

    plain = scores(torch.float64)
    assert not taken
    for fused, exact in zip(scores(torch.float32), plain, strict=True):
        torch.testing.assert_close(fused.double(), exact, rtol=1e-5, atol=1e-5)
        assert bool(((fused - exact).norm(dim=1) < 5e-7 * exact.norm(dim=1)).all())
    assert taken


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here: pytest -m gpu")
def test_the_kernel_is_right_when_interpreted():
    interpret_kernels(__file__)
