"""What the analyses compute, on vectors whose answer is known by another way."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import gammaln, ive, softmax
from torch.nn.functional import normalize

from unitsphere.analysis import figures, training
from unitsphere.analysis.geometry import class_alignment
from unitsphere.analysis.gradient import bound_of, loss_and_gradient, powers_to
from unitsphere.analysis.hardness import false_negatives, matching
from unitsphere.analysis.request import AnalysisRequest
from unitsphere.analysis.similarity import similarity_and_variance
from unitsphere.analysis.tsne import synthetic
from unitsphere.common.errors import UsageError
from unitsphere.objectives.geometry import uniformity
from unitsphere.runs.run import Run


def sphere(*shape: int, seed: int = 0) -> torch.Tensor:
    return normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=-1)


def test_similarity_and_variance_are_those_of_numpy():
    features = np.random.default_rng(0).normal(1.0, 0.5, (32, 5, 7))  # augmentations, images, dimensions
    similarity, diagonal = similarity_and_variance(torch.from_numpy(each) for each in features)
    unit = features / np.linalg.norm(features, axis=2, keepdims=True)
    for n in range(5):
        cosines = unit[:, n] @ unit[:, n].T
        assert similarity[n].item() == pytest.approx(cosines.mean(), rel=1e-12)
        covariance = np.cov(unit[:, n].T, bias=True)
        np.testing.assert_allclose(diagonal[n].numpy(), np.diag(covariance), rtol=1e-10)


@pytest.mark.parametrize("augmentations", [1, 2, 32])
def test_variance_is_one_less_similarity_over_the_dimensions(augmentations):
    views = [torch.randn(9, 40, generator=torch.Generator().manual_seed(n)) + 1 for n in range(augmentations)]
    similarity, diagonal = similarity_and_variance(views)
    torch.testing.assert_close(diagonal.mean(1), (1 - similarity) / 40, rtol=0, atol=1e-15)


@pytest.mark.parametrize("alpha", [None, 512.0])
def test_the_gradient_is_that_of_equation_13(alpha):
    query, key, negatives, tau = sphere(6, 8), sphere(6, 8, seed=1), sphere(20, 8, seed=2), 0.2
    met = torch.rand(6, 20, generator=torch.Generator().manual_seed(3)) < 0.6
    loss, norm = loss_and_gradient(query, key, negatives, tau, alpha, met)
    for n in range(6):
        some = negatives[met[n]]
        weight = 1.0 if alpha is None else alpha / len(some)
        s0, s = (query[n] @ key[n] / tau).exp(), (some @ query[n] / tau).exp()
        z = s0 + weight * s.sum()
        expected = -(1 - s0 / z) * key[n] / tau + weight / tau * (s / z) @ some
        assert norm[n].item() == pytest.approx(expected.norm().item(), rel=1e-12)
        assert loss[n].item() == pytest.approx(-(s0 / z).log().item(), rel=1e-12)


@pytest.mark.parametrize("k", [4, 32, 256])
def test_theorem_2_bounds_the_mean_gradient_over_draws_of_negatives(k):
    query, key, world, tau, alpha = sphere(5, 16), sphere(5, 16, seed=1), sphere(4000, 16, seed=2), 0.2, 256.0
    generator = torch.Generator().manual_seed(k)
    total = torch.zeros(5, dtype=torch.float64)
    for _ in range(200):
        drawn = world[torch.randint(4000, (k,), generator=generator)]
        total += loss_and_gradient(query, key, drawn, tau, alpha)[1]
    bound = bound_of(query, key, world, tau, torch.tensor(alpha))
    assert (total / 200 <= bound).all()
    e0, e = np.exp((query * key).sum(1).numpy() / tau), np.exp((query @ world.T).numpy() / tau).mean(1)
    np.testing.assert_allclose(bound.numpy(), 2 / tau * (1 - e0 / (e0 + alpha * e)), rtol=1e-10)


def test_the_bound_is_over_the_allowed_negatives_alone():
    query, key, world = sphere(3, 8), sphere(3, 8, seed=1), sphere(30, 8, seed=2)
    allowed = torch.arange(30).expand(3, 30) < 20
    some = bound_of(query, key, world, 0.2, torch.tensor(64.0), allowed)
    torch.testing.assert_close(some, bound_of(query, key, world[:20], 0.2, torch.tensor(64.0)))


def test_numbers_of_negatives_end_at_the_queue():
    assert powers_to(1024) == [16, 64, 256, 1024]
    assert powers_to(100) == [16, 64, 100] and powers_to(8) == [8]


def test_class_alignment_is_the_mean_over_all_pairs_of_a_class():
    x, labels = 3 * sphere(40, 6), torch.randint(4, (40,), generator=torch.Generator().manual_seed(1))
    unit = normalize(x, dim=1)
    pairs = [(i, j) for i in range(40) for j in range(i) if labels[i] == labels[j]]
    expected = np.mean([(unit[i] - unit[j]).square().sum().item() for i, j in pairs])
    assert class_alignment(x, labels).item() == pytest.approx(expected, rel=1e-12)


def test_class_alignment_of_points_at_two_poles():
    """m copies of e and m of -e. As one class: m^2 of the m(2m - 1) pairs are at squared distance 4; as two: none."""
    m = 5
    x = torch.eye(3, dtype=torch.float64)[:1].repeat(2 * m, 1) * torch.tensor([1.0] * m + [-1.0] * m)[:, None]
    assert class_alignment(x, torch.zeros(2 * m)).item() == pytest.approx(4 * m / (2 * m - 1))
    assert class_alignment(x, x[:, 0]).item() == pytest.approx(0, abs=1e-15)
    with pytest.raises(UsageError, match="no class has two images"):
        class_alignment(x, torch.arange(2 * m))


@pytest.mark.parametrize("dim", [3, 10, 32])
def test_uniformity_of_an_even_sphere_is_its_integral(dim):
    """The cosine of two points has density (1 - c^2)^((D-3)/2) up to a constant, and |x - y|^2 = 2 - 2c."""
    weight, _ = quad(lambda c: (1 - c * c) ** ((dim - 3) / 2), -1, 1)
    integral, _ = quad(lambda c: (1 - c * c) ** ((dim - 3) / 2) * math.exp(-2 * (2 - 2 * c)) / weight, -1, 1)
    nu = dim / 2 - 1
    bessel = math.exp(gammaln(dim / 2) - nu * math.log(2)) * ive(nu, 4)  # exp(-4) I_nu(4) of the closed form
    assert bessel == pytest.approx(integral, rel=1e-8)
    # 4.5e6 pairs of 3000 points: the mean is known to well under one percent for each D here
    assert uniformity(sphere(3000, dim)).item() == pytest.approx(math.log(integral), abs=0.01)


def test_matching_probabilities_are_a_softmax_over_the_key_and_the_negatives_met():
    query, key, negatives, tau = sphere(7, 8), sphere(7, 8, seed=1), sphere(30, 8, seed=2), 0.1
    met = torch.rand(7, 30, generator=torch.Generator().manual_seed(4)) < 0.7
    probabilities, above = matching(query, key, negatives, met, temperature=tau, top=12)
    for n in range(7):
        logits = np.array([query[n] @ key[n], *(negatives[met[n]] @ query[n])]) / tau
        expected = np.sort(softmax(logits)[1:])[::-1]
        np.testing.assert_allclose(probabilities[n].numpy(), expected[:12], rtol=1e-10)
        assert above[n] == (logits[0] > logits[1:].max())


def test_false_negatives_are_counted_among_the_nearest_of_other_images():
    query, negatives = sphere(6, 4), sphere(25, 4, seed=1)
    generator = torch.Generator().manual_seed(2)
    same, others = torch.rand(6, 25, generator=generator) < 0.4, torch.rand(6, 25, generator=generator) < 0.9
    share, chance = false_negatives(query, negatives, same, others, top=8)
    for n in range(6):
        left = [j for j in (negatives @ query[n]).argsort(descending=True).tolist() if others[n, j]]
        assert share[n].item() == pytest.approx(np.mean([same[n, j].item() for j in left[:8]]))
        assert chance[n].item() == pytest.approx(np.mean([same[n, j].item() for j in left]))


def test_curves_are_means_over_steps_of_an_epoch(tmp_path: Path):
    lines = [
        {"step": 8, "epoch": 1, "loss": 5.0, "gradient_norm": 1.0},
        {"step": 10, "epoch": 1, "loss": 4.0, "gradient_norm": 2.0},  # of two steps
        {"step": 20, "epoch": 2, "loss": 3.0, "gradient_norm": 3.0, "knn": 50.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3')
    curves = training.measure(Run(tmp_path), AnalysisRequest())["curves"]
    assert curves["loss"] == {"epochs": [1, 2], "values": [4.8, 3.0]}
    assert curves["knn"] == {"epochs": [2], "values": [50.0]}
    with pytest.raises(UsageError, match="no line"):
        training.measure(Run(tmp_path / "nothing"), AnalysisRequest())


def test_the_particles_of_a_regression_are_drawn(tmp_path: Path):
    line = {"alignment": 0.5, "centroid_distance": 0.1, "uniformity": -2.0, "effective_rank": 9.0, "evenness": 0.1}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 8, "epoch": 1, "loss": 1.0, **line}) + "\n")
    figure = training.draw([training.measure(Run(tmp_path), AnalysisRequest()) | {"name": "BYOL"}])
    drawn = {axes.get_ylabel(): [float(x.get_ydata()[0]) for x in axes.lines] for axes in figure.axes}
    assert drawn == {
        "squared distance": [0.5, 0.1],
        "uniformity of embeddings": [-2.0],
        "effective rank of embeddings": [9.0],
        "smallest over largest singular value": [0.1],
        "loss": [1.0],
    }


MANY = [["MoCo v2"], ["K 64"] * 8, [f"BYOL + L_b + L_s ({n})" for n in range(5)], ["W" * 20] * 2]


@pytest.mark.parametrize("names", MANY)
@pytest.mark.parametrize("count", [1, 3])
def test_the_names_of_runs_lie_within_the_figure(count: int, names: list[str]):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with figures.style():
        figure, _ = figures.panels(count)
        figures.name_runs(figure, names)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        box = figure.legends[0].get_window_extent(canvas.get_renderer())
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_mixed_points_lie_on_the_arcs_between_their_parents():
    query, hardest = sphere(8), sphere(2, 8, seed=1)
    pairs, with_query = synthetic(query, hardest, 20, 20, torch.Generator().manual_seed(0))
    for points, ends in ((pairs, hardest), (with_query[:, :], None)):
        torch.testing.assert_close(points.norm(dim=1), torch.ones(20, dtype=torch.float64))
        if ends is not None:  # in the plane of the two, and between them
            weights = torch.linalg.lstsq(ends.T, points.T).solution
            torch.testing.assert_close(ends.T @ weights, points.T)
            assert (weights > 0).all()
    nearer = (with_query @ hardest.T).amax(1)
    assert (nearer >= with_query @ query - 1e-12).all()  # the query's share is below a half
