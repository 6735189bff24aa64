from __future__ import annotations

import math

import pytest
import torch
from scipy.special import gammaln, ive
from torch.nn.functional import normalize

from unitsphere.objectives.geometry import alignment, effective_rank, feature_deviation, uniformity


def sphere(n: int, dim: int, seed: int = 0) -> torch.Tensor:
    return normalize(torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=1)


def test_alignment_is_twice_one_minus_cosine() -> None:
    x, y = torch.randn(2, 50, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    cosine = torch.nn.functional.cosine_similarity(x, y)
    assert alignment(3 * x, y).item() == pytest.approx((2 - 2 * cosine).mean().item(), rel=1e-12)


def test_alignment_is_zero_for_equal_directions_and_four_for_unitspheres() -> None:
    x = sphere(20, 5)
    assert alignment(x, 2 * x).item() == pytest.approx(0, abs=1e-12)
    assert alignment(x, -x).item() == pytest.approx(4)


def test_uniformity_of_two_points_is_their_one_pair() -> None:
    x = torch.tensor([[3.0, 0.0], [0.0, 0.5]], dtype=torch.float64)  # |x - y|^2 = 2 on the sphere
    assert uniformity(x, t=2).item() == pytest.approx(-4)


def test_uniformity_of_a_two_point_distribution() -> None:
    """m copies of e and m of -e: m(m-1) ordered pairs at distance 0, m^2 at squared distance 4."""
    m, t = 6, 0.7
    x = torch.cat(
        [
            torch.eye(3, dtype=torch.float64)[:1].repeat(m, 1),
            -torch.eye(3, dtype=torch.float64)[:1].repeat(m, 1),
        ]
    )
    expected = math.log((2 * m * (m - 1) + 2 * m * m * math.exp(-4 * t)) / (2 * m * (2 * m - 1)))
    assert uniformity(x, t=t).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dim", [2, 8, 64])
def test_uniformity_of_the_uniform_sphere_is_the_bessel_closed_form(dim: int) -> None:
    """E exp(-t |x-y|^2) = e^-2t Gamma(D/2) t^(1-D/2) I_{D/2-1}(2t): the von Mises-Fisher normaliser at 2t."""
    t, nu = 2.0, dim / 2 - 1
    expected = float(gammaln(dim / 2)) - nu * math.log(t) + math.log(ive(nu, 2 * t))
    # 1.1e7 pairs of 4800 points: the error of the mean is below 0.002 in relative terms for each D here
    assert uniformity(sphere(4800, dim), t=t).item() == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize("chunk", [1, 2, 7, 33, 34, 100])
def test_uniformity_does_not_depend_on_the_chunk(chunk: int) -> None:
    x = sphere(34, 5)
    squares = torch.pdist(x).square()
    expected = (-2 * squares).exp().mean().log().item()
    assert uniformity(x, chunk=chunk).item() == pytest.approx(expected, rel=1e-10)
    several = uniformity(torch.stack([sphere(34, 5, seed=1), x, x[:1].expand(34, 5)]), chunk=chunk)
    assert several[1:].tolist() == pytest.approx([expected, 0], rel=1e-10, abs=1e-12) and several[0] != several[1]


def test_uniformity_keeps_float32_scores_under_autocast() -> None:
    x = sphere(64, 16).float()
    expected = uniformity(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(uniformity(x), expected)


def test_uniformity_has_the_gradient_of_the_naive_form() -> None:
    x = sphere(9, 4).requires_grad_()
    (naive,) = torch.autograd.grad((-2 * torch.pdist(normalize(x)).square()).exp().mean().log(), x)
    (ours,) = torch.autograd.grad(uniformity(x, chunk=4), x)
    assert torch.allclose(ours, naive, atol=1e-12)


@pytest.mark.parametrize(("rows", "dim", "rank"), [(500, 40, 6), (20, 60, 6), (64, 64, 1)])
def test_effective_rank_of_r_equal_singular_values_is_r(rows: int, dim: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(2)
    left = torch.randn(rows, rank, generator=generator, dtype=torch.float64)
    left = torch.linalg.qr(left - left.mean(0)).Q  # orthonormal columns of mean zero
    right = torch.linalg.qr(torch.randn(dim, rank, generator=generator, dtype=torch.float64)).Q
    x = 5 * left @ right.T + torch.randn(dim, generator=generator)  # the mean does not count
    assert effective_rank(x).item() == pytest.approx(rank, rel=1e-5)


def test_effective_rank_is_the_entropy_of_the_singular_values() -> None:
    x = torch.randn(80, 12, generator=torch.Generator().manual_seed(3)) * torch.arange(1, 13)
    singular = torch.linalg.svdvals((x - x.mean(0)).double())
    share = singular / singular.sum()
    assert effective_rank(x).item() == pytest.approx((-(share * share.log()).sum()).exp().item(), rel=1e-5)


def test_effective_rank_of_a_gaussian_of_rank_r_stays_below_r_and_near_it() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(20000, 5, generator=generator) @ torch.linalg.qr(torch.randn(30, 5, generator=generator)).Q.T
    # float32 rounding of x fills the other 25 directions with singular values of about 3e-8 of the first
    assert 4.99 < effective_rank(x).item() < 5.001


def test_effective_rank_of_identical_rows_is_zero_and_of_nan_is_nan() -> None:
    row = torch.randn(1, 33, generator=torch.Generator().manual_seed(5))
    assert effective_rank(row.repeat(77, 1)).item() == 0
    assert effective_rank(torch.full((8, 4), math.nan)).isnan()


def test_feature_deviation_is_one_for_an_even_spread_and_zero_for_collapse() -> None:
    # the deviation of each of 64 dimensions is known to 1/sqrt(2N), their mean far better
    assert feature_deviation(7 * sphere(4000, 64)).item() == pytest.approx(1, abs=0.002)
    assert feature_deviation(torch.eye(6).repeat(3, 1) - 1 / 6).item() == pytest.approx(1, abs=1e-6)
    assert feature_deviation(torch.ones(40, 8) * torch.arange(1, 41)[:, None]).item() == pytest.approx(0, abs=1e-6)


def test_feature_deviation_is_bounded_by_the_mean_direction() -> None:
    x = sphere(300, 10) * torch.arange(1, 11) + 0.2
    mean = normalize(x, dim=1).mean(0)
    assert feature_deviation(x).item() <= math.sqrt(1 - mean.square().sum().item())
