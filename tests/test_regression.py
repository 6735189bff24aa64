"""Regression onto centroids, the forces that spread, BYOL's step: against closed forms and the papers' rules."""

import copy
import json
import math
import os
import signal

import numpy as np
import pytest
import torch
from test_ranks import on_two_ranks
from torch import nn
from torch.nn import functional as F

import unitsphere
from unitsphere.common.distributed import average, averaging_gradients, gather, mine
from unitsphere.common.randomness import generator
from unitsphere.config.images import policies
from unitsphere.config.layers import Layer
from unitsphere.methods.build import build_learner
from unitsphere.methods.learners.dispersion import Dispersion, brownian_directions
from unitsphere.methods.learners.learner import Moment
from unitsphere.methods.resolve import resolve
from unitsphere.modules.heads import projection_head
from unitsphere.modules.slow_copy import follow, momentum_at
from unitsphere.objectives.geometry import alignment, effective_rank, evenness, uniformity
from unitsphere.objectives.regression import (
    SINGULAR_LOSSES,
    brownian_loss,
    centroid_distance,
    centroid_loss,
    correlation_loss,
    gram_loss,
    image_spread,
    nuclear_loss,
    pair_distance,
    square_roots,
)
from unitsphere.optimisation.optimisers import build_optimizer
from unitsphere.training.loop import Stopped
from unitsphere.training.step import PlainStep


def unit(*shape, seed=0):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=-1)


# The losses


def test_two_views_are_byol_exactly():
    q, t = unit(7, 2, 5), unit(7, 2, 5, seed=1)
    cosine = torch.nn.CosineSimilarity(dim=1)
    byol = (2 - 2 * cosine(q[:, 0], t[:, 1])).mean() + (2 - 2 * cosine(q[:, 1], t[:, 0])).mean()
    assert float(centroid_loss(q, t)) == pytest.approx(float(byol), abs=1e-10)
    assert float(centroid_loss(q, t, "split")) == pytest.approx(float(byol), abs=1e-10)


@pytest.mark.parametrize("views", [2, 3, 5, 8])
def test_centroids_meet_as_the_loops_say(views):
    q, t = unit(4, views, 6), unit(4, views, 6, seed=1)
    half = math.ceil(views / 2)
    split = others = everything = 0.0
    for i in range(4):
        split += float((q[i, :half].mean(0) - t[i, half:].mean(0)).square().sum()) / 4
        split += float((q[i, half:].mean(0) - t[i, :half].mean(0)).square().sum()) / 4
        everything += 2 * float((q[i].mean(0) - t[i].mean(0)).square().sum()) / 4
        for k in range(views):
            rest = torch.stack([t[i, j] for j in range(views) if j != k]).mean(0)
            others += 2 * float((q[i, k] - rest).square().sum()) / (4 * views)
    assert float(centroid_loss(q, t, "split")) == pytest.approx(split, rel=1e-12)
    assert float(centroid_loss(q, t, "others")) == pytest.approx(others, rel=1e-12)
    assert float(centroid_loss(q, t, "all")) == pytest.approx(everything, rel=1e-12)
    assert 2 * float(centroid_distance(q, t)) == pytest.approx(everything, rel=1e-12)


@pytest.mark.parametrize("form", ["split", "others", "all"])
def test_gradients_of_the_centroids_are_those_of_finite_differences(form):
    t = unit(3, 3, 4, seed=1)
    assert torch.autograd.gradcheck(lambda q: centroid_loss(q, t, form), unit(3, 3, 4).requires_grad_())


@pytest.mark.parametrize("form", SINGULAR_LOSSES)
def test_gradients_of_the_singular_value_losses_are_those_of_finite_differences(form):
    assert torch.autograd.gradcheck(SINGULAR_LOSSES[form], unit(9, 4).requires_grad_())


def test_the_gram_form_is_a_mean_over_singular_values():
    z = unit(11, 4)
    squares = torch.linalg.svdvals(z).square()
    assert float(squares.sum()) == pytest.approx(11)
    assert float(gram_loss(z)) == pytest.approx(float((squares * 4 / 11 - 1).square().mean()), rel=1e-12)


@pytest.mark.parametrize(("rows", "dim"), [(12, 4), (4, 4), (3, 7)])
def test_gram_and_nuclear_are_least_exactly_where_the_singular_values_are_equal(rows, dim):
    rotation = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64))[0]
    even = rotation[:rows].repeat(math.ceil(rows / dim), 1)[:rows]
    assert torch.linalg.svdvals(even).std(correction=0) < 1e-12
    least = max(0, dim - rows) + min(rows, dim) * (dim / min(rows, dim) - 1) ** 2
    assert float(gram_loss(even)) == pytest.approx(least / dim, abs=1e-10)
    values = [math.sqrt(rows / min(rows, dim))] * min(rows, dim) + [0.0] * (dim - min(rows, dim))
    smoothed = -sum(math.sqrt(value**2 + 1e-4 * rows / dim) for value in values)
    assert float(nuclear_loss(even)) == pytest.approx(smoothed, rel=1e-12)
    assert float(nuclear_loss(even, smooth=1e-14)) == pytest.approx(-math.sqrt(rows * min(rows, dim)))
    for seed in range(20):
        near = F.normalize(even + 0.05 * torch.randn(rows, dim, dtype=torch.float64), dim=1)
        for z in (near, unit(rows, dim, seed=seed)):
            assert gram_loss(z) > gram_loss(even) and nuclear_loss(z) > nuclear_loss(even)
    collapsed = torch.eye(1, dim, dtype=torch.float64).expand(rows, dim)
    assert float(gram_loss(collapsed)) == pytest.approx(dim - 1)


@pytest.mark.parametrize(
    ("rows", "dim", "spread"), [(300, 24, 1.0), (300, 24, 1e-3), (20, 48, 1.0), (7, 1, 1.0), (64, 128, 0.0)]
)
def test_the_nuclear_form_is_that_of_a_decomposition(rows, dim, spread):
    """Value and gradient, where singular values are alike, where all but one nearly vanish, where rows are too few."""
    z = F.normalize(spread * unit(rows, dim) + unit(1, dim, seed=1), dim=1).requires_grad_()

    def decomposed(z, smooth=1e-4):
        values = F.pad(torch.linalg.svdvals(z), (0, max(0, dim - rows)))
        return -(values.square() + smooth * rows / dim).sqrt().sum()

    found, expected = nuclear_loss(z), decomposed(z)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(found, z)
    if spread:  # that of svdvals is not defined where singular values are the same
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, z)[0], rtol=1e-9, atol=1e-10)
    exact = torch.linalg.svdvals(z.detach()).sum().item()
    assert nuclear_loss(z.detach(), smooth=1e-12).item() == pytest.approx(-exact, rel=1e-4)
    single = z.detach().float().requires_grad_()
    (of_single,) = torch.autograd.grad(nuclear_loss(single), single)
    assert float((of_single - gradient).norm()) < 3e-4 * float(gradient.norm())


def test_the_nuclear_form_pushes_as_the_sum_of_singular_values_where_they_are_as_uneven_as_in_training():
    """Smoothing must leave the gradient of a spectrum such as BYOL's on CIFAR-10: effective rank 11 to 15 of 128, the
    smallest singular value 3e-4 to 5e-4 of the largest."""
    z = F.normalize(unit(1024, 128) * torch.arange(1.0, 129.0, dtype=torch.float64) ** -1.7, dim=1).requires_grad_()
    assert 11 < effective_rank(z.detach()) < 15 and 3e-4 < evenness(z.detach()) < 5e-4
    exact = -torch.linalg.svdvals(z).sum()
    found, expected = (torch.autograd.grad(loss, z)[0] for loss in (nuclear_loss(z), exact))
    along = [(g - (g * z).sum(1, keepdim=True) * z).flatten() for g in (found, expected)]  # what turns a unit vector
    assert F.cosine_similarity(*along, dim=0) > 0.95
    assert along[0].norm() > 0.75 * along[1].norm()


def test_square_roots_are_those_of_the_eigenvalues():
    basis = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64))[0]
    values = torch.logspace(-3, 2, 40, dtype=torch.float64)
    root, inverse = square_roots(basis * values @ basis.T, 1e-3, 100.0)
    torch.testing.assert_close(root, basis * values.sqrt() @ basis.T, rtol=0, atol=1e-11)
    torch.testing.assert_close(inverse, basis * values.rsqrt() @ basis.T, rtol=0, atol=1e-8)
    with pytest.raises(ValueError, match="above 0"):
        square_roots(torch.eye(2), 0.0, 1.0)


def test_correlations_are_numpys():
    z = unit(40, 5)
    expected = np.corrcoef(z.numpy(), rowvar=False)
    expected = ((expected**2).sum() - 5) / 5
    assert float(correlation_loss(z, eps=0.0)) == pytest.approx(expected, rel=1e-10)
    assert float(correlation_loss(z)) == pytest.approx(expected, rel=1e-4)


def test_evenness_is_the_inverse_of_the_condition_number():
    for z in (unit(30, 6), unit(4, 6)):
        assert float(evenness(3 * z)) == pytest.approx(1 / np.linalg.cond(z.numpy()), rel=1e-6)
    assert float(evenness(torch.ones(5, 3))) == pytest.approx(0, abs=1e-7)
    assert math.isnan(evenness(torch.full((3, 2), torch.nan)))


def test_spread_and_distance_of_views_are_those_of_all_pairs():
    z = unit(5, 4, 3)
    pairs = [alignment(z[:, k], z[:, j]) for k in range(4) for j in range(4) if j != k]
    assert float(pair_distance(z)) == pytest.approx(float(torch.stack(pairs).mean()), rel=1e-10)
    assert float(image_spread(z)) == pytest.approx(float(1 - z.mean(1).square().sum(1).mean()), rel=1e-10)


# The random force


def test_brownian_forces_have_mean_zero_unit_length_and_an_even_spread():
    count, dim = 20_000, 8
    n = brownian_directions(torch.tensor(123456789), torch.empty(count, 2, dim))[:, 0].double()
    torch.testing.assert_close(n.norm(dim=1), torch.ones(count, dtype=torch.float64), rtol=1e-5, atol=0)
    # five deviations of a mean over the sample: 1/sqrt(D count) for a coordinate, about 1/(D sqrt(count)) for a product
    assert n.mean(0).abs().max() < 5 / math.sqrt(dim * count)
    covariance = n.T @ n / count
    assert (covariance - torch.eye(dim) / dim).abs().max() < 5 * math.sqrt(2) / (dim * math.sqrt(count))
    assert (n[1:] * n[:-1]).sum(1).mean().abs() < 5 / math.sqrt(dim * count)  # one image's tells nothing of the next's


def test_a_force_pushes_along_its_direction_and_is_one_for_all_views_unless_asked():
    z = unit(6, 3, 4).requires_grad_()
    for per_view in (False, True):
        n = brownian_directions(torch.tensor(5), z, per_view=per_view)
        assert n.shape == (6, 3 if per_view else 1, 4)
        (force,) = torch.autograd.grad(brownian_loss(z, n), z)
        torch.testing.assert_close(force, n.expand(6, 3, 4) / 18)
    again, other = (brownian_directions(torch.tensor(seed), z) for seed in (5, 6))
    assert torch.equal(again, brownian_directions(torch.tensor(5), z)) and not torch.equal(again, other)


def test_a_dispersion_weighs_its_losses_and_leaves_out_what_weighs_nothing():
    z = unit(6, 3, 4)
    assert Dispersion()(z, {}) == {} and Dispersion().inputs(generator(0, "t")) == {}
    force = Dispersion(singular_weight=2.0, brownian_weight=3.0, uniformity_weight=0.5)
    inputs = force.inputs(generator(0, "t"))
    losses = force(z, inputs)
    n = brownian_directions(inputs["brownian_seed"], z)
    expected = {
        "brownian_loss": 3 * (z * n).sum(2).mean(),
        "singular_loss": 2 * nuclear_loss(z.reshape(18, 4)),
        "uniformity_loss": 0.5 * (uniformity(z[:, 0]) + uniformity(z[:, 1]) + uniformity(z[:, 2])) / 3,
    }
    assert losses.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(losses[name], value)


def test_forces_attach_to_a_contrastive_method_and_not_to_its_reported_loss():
    found = {}
    for weight in (0.0, 0.25):
        _, method = small("moco-v2", singular_weight=weight, queue_size=64, symmetric=True)
        views = views_of(2)
        step = method(views, method.inputs(16, Moment(0, 10, 0, 1), generator(0, "t")))
        queries = torch.stack([copy.deepcopy(method.online)(view) for view in views], 1).detach()
        found[weight] = step.loss.item(), step.health["loss"]
    assert found[0.25][1] == found[0.0][1]
    added = found[0.25][0] - found[0.0][0]
    assert added == pytest.approx(0.25 * float(nuclear_loss(queries.flatten(0, 1))), rel=1e-4)


# The step


def small(method, **fields):
    usual = {"method": method, "data": "shapes", "batch_size": 16, "image_size": 16, "warmup_epochs": 0}
    config = resolve(Layer("test", usual | fields)).config
    return config, build_learner(config)


def views_of(count, seed=0, n=16):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 3, 16, 16, generator=random) for _ in range(count)]


def test_byols_heads_are_those_of_its_code():
    layers = "Linear BatchNorm1d ReLU Linear"
    assert " ".join(type(part).__name__ for part in projection_head("byol", 8, 4, 16)) == layers
    _, method = small("byol", hidden=4096, dim=256)
    for first, _, _, last in (method.online.head, method.predictor):
        assert first.bias is not None and last.bias is None
        assert (first.out_features, last.in_features, last.out_features) == (4096, 4096, 256)
    assert method.predictor[0].in_features == 256
    assert not any(parameter.requires_grad for parameter in method.slow.parameters())


def test_the_loss_of_byol_is_what_its_networks_give_by_hand():
    _, method = small("byol")
    online, predictor, slow = (copy.deepcopy(part) for part in (method.online, method.predictor, method.slow))
    first, second = views_of(2)
    step = method([first, second], method.inputs(16, Moment(0, 10, 0, 1), generator(0, "t")))
    expected = torch.zeros(())
    for asked, answered in ((first, second), (second, first)):
        with torch.no_grad():  # each view in a pass of its own: its own batch statistics
            prediction = F.normalize(predictor(online(asked)), dim=1)
            target = F.normalize(slow(answered), dim=1)
        expected = expected + (prediction - target).square().sum(1).mean()
    torch.testing.assert_close(step.loss.detach(), expected, rtol=1e-5, atol=1e-6)
    step.loss.backward()
    assert all(p.grad is not None for part in (method.online, method.predictor) for p in part.parameters())


def test_joint_statistics_are_those_of_all_views_together():
    _, method = small("byol", joint_statistics=True)
    online, predictor = copy.deepcopy(method.online), copy.deepcopy(method.predictor)
    views = views_of(2)
    step = method(views, method.inputs(16, Moment(0, 10, 0, 1), generator(0, "t")))
    with torch.no_grad():
        together = F.normalize(predictor(online(torch.cat(views))), dim=1)[:16]
    torch.testing.assert_close(step.embedding, together, rtol=1e-5, atol=1e-6)


def test_the_target_follows_after_the_optimiser_and_its_statistics_are_its_own():
    config, method = small("byol", lr=0.1)
    before = copy.deepcopy(method.slow)
    inputs = method.inputs(16, Moment(5, 10, 0, 1), generator(0, "t"))
    step = PlainStep(method, build_optimizer(config, method))
    step(views_of(2), inputs, 0.1)
    momentum = 1 - (1 - 0.99) * (math.cos(math.pi / 2) + 1) / 2  # at half the run
    moved = 0.0
    for old, now, online in zip(before.parameters(), method.slow.parameters(), method.online.parameters(), strict=True):
        torch.testing.assert_close(now, momentum * old + (1 - momentum) * online)
        moved += float((now - old).abs().sum())
    assert moved > 0
    step(views_of(2), inputs, 0.1)
    slow, online = dict(method.slow.named_buffers()), dict(method.online.named_buffers())
    assert not torch.equal(slow["head.1.running_mean"], online["head.1.running_mean"])


def test_the_momentum_grows_from_its_base_to_one():
    steps = 1000
    values = [momentum_at(step, steps, 0.99, "cosine") for step in range(steps + 1)]
    assert values[0] == pytest.approx(0.99) and values[-1] == pytest.approx(1.0)
    assert values[steps // 2] == pytest.approx(0.995) and values == sorted(values)
    assert momentum_at(7, 10, 0.9, "constant") == 0.9


def test_following_by_a_tensor_is_following_by_its_number():
    nets = [nn.Linear(5, 3) for _ in range(2)]
    for kind in (float, torch.tensor):
        slow = copy.deepcopy(nets[0])
        follow(slow, nets[1], kind(0.75))
        torch.testing.assert_close(slow.weight, 0.75 * nets[0].weight + 0.25 * nets[1].weight)


def test_msbreg_takes_k_views_and_at_two_without_forces_it_is_byol():
    same = {"hidden": 64, "dim": 16}
    _, byol = small("byol", **same)
    _, other = small("msbreg", view_count=2, singular_weight=0, brownian_weight=0, **same)
    losses = [m(views_of(2), m.inputs(16, Moment(0, 10, 0, 1), generator(0, "t"))).loss for m in (byol, other)]
    assert torch.equal(*losses)
    _, five = small("msbreg", view_count=5, **same)
    step = five(views_of(5), five.inputs(16, Moment(0, 10, 0, 1), generator(0, "t")))
    parts = sum(step.health[name] for name in ("loss", "singular_loss", "brownian_loss"))
    torch.testing.assert_close(step.loss.detach(), parts)
    assert torch.equal(step.health["total_loss"], step.loss.detach())


@pytest.mark.parametrize("norm", ["layer", "group", "standardised"])
def test_backbone_and_heads_can_do_without_batch_statistics(norm):
    _, method = small("byol", norm=norm, head_norm=norm)
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in method.modules())
    views = views_of(2)
    inputs = method.inputs(16, Moment(0, 10, 0, 1), generator(0, "t"))
    few = method([view[:3] for view in views], inputs)  # the other images of the batch do not matter
    torch.testing.assert_close(method(views, inputs).embedding[:3], few.embedding, rtol=1e-4, atol=1e-5)


# The settings


def test_rates_follow_the_papers_rules():
    def rate(method, data, **fields):
        return resolve(Layer("test", {"method": method, "data": f"{data}=x"} | fields)).config.learning_rate

    assert rate("byol", "imagenet") == pytest.approx(0.3 * 4096 / 256)
    assert rate("msbreg", "imagenet100") == pytest.approx(0.4 * 512 / 256 * 4)
    assert rate("msbreg", "imagenet100", view_count=8) == pytest.approx(0.4 * 512 / 256 * 8)
    assert rate("msbreg", "stl10", view_count=2) == pytest.approx(0.5 * 512 / 256 * 2)
    assert rate("msbreg", "imagenet", batch_size=256) == pytest.approx(0.15 * 4)
    assert rate("msbreg", "imagenet", lr=0.7) == 0.7


def test_byols_views_are_not_made_alike():
    first, second = policies(resolve(Layer("test", {"method": "byol", "data": "imagenet=x"})).config)
    assert ((first.blur, first.solarise), (second.blur, second.solarise)) == ((1.0, 0.0), (0.1, 0.2))
    changed = policies(resolve(Layer("test", {"method": "byol", "data": "imagenet=x", "grey": 0.5})).config)
    assert [policy.grey for policy in changed] == [0.5, 0.5]


# Two ranks, whole runs


def train_two_steps(method, fields):
    config, built = small(method, **fields)
    forward, losses = averaging_gradients(built), []
    optimizer = build_optimizer(config, built)
    for number in range(2):
        random = generator(0, "test", number)
        views = [mine(torch.randn(16, 3, 16, 16, generator=random)) for _ in range(built.views)]
        step = forward(views, built.inputs(16, Moment(number, 10, 0, 1), random))
        optimizer.zero_grad()
        step.loss.backward()
        optimizer.step()
        built.finish(step)
        losses.append(gather(step.loss.detach()[None]).mean())
    average(built.buffers())
    return {**built.state_dict(), "losses": torch.stack(losses)}


SPREADING = {"singular_weight": 0.02, "brownian_weight": 2.0, "uniformity_weight": 0.5}
RANKED = {
    "byol": ("byol", {"optimizer": "lars", "lr": 0.5}),
    "msbreg": ("msbreg", {"view_count": 3, "lr": 0.05, **SPREADING}),
    "msbreg, gram": ("msbreg", {"view_count": 2, "lr": 0.05, **SPREADING, "singular_form": "gram"}),
    "msbreg, correlation": ("msbreg", {"view_count": 2, "lr": 0.05, **SPREADING, "singular_form": "correlation"}),
    "msbreg, a force for each view": ("msbreg", {"view_count": 3, "lr": 0.05, "brownian_per_view": True}),
    "simclr, spread": ("simclr", {"lr": 0.05, **SPREADING}),
}


def train_ranked():
    return {name: train_two_steps(*settings) for name, settings in RANKED.items()}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return on_two_ranks(tmp_path_factory.mktemp("regression"), train_ranked)


@pytest.mark.parametrize("name", RANKED)
def test_two_ranks_are_one(name, two_ranks):
    for part, tensor in train_two_steps(*RANKED[name]).items():
        # float32 summed in another order; a wrong scale or a missing gradient is off by far more
        torch.testing.assert_close(two_ranks[name][part], tensor, rtol=2e-3, atol=5e-5, msg=lambda m, p=part: p + m)


SMALL_RUN = {"backbone": "resnet-tiny", "image_size": 16, "batch_size": 16, "epochs": 3, "device": "cpu"}
SMALL_RUN |= {"tensorboard": False, "save_every": 1, "warmup_epochs": 1}


class NoisyView:
    """A view of the user's own that asks the process to stop at its so-many-th call."""

    def __init__(self, stop_at=None):
        self.calls, self.stop_at = 0, stop_at

    def __call__(self, image):
        self.calls += 1
        if self.calls == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return image[:, :16, :16] / 255 + 0.1 * torch.randn(3, 16, 16)


@pytest.mark.parametrize("method", ["byol", "msbreg"])
def test_stopped_and_resumed_equals_never_stopped(method, tmp_path):
    pictures = np.random.default_rng(0).integers(0, 255, (64, 20, 18, 3), dtype=np.uint8)
    fields = SMALL_RUN | {"hidden": 32, "dim": 16, "data": pictures}
    whole = unitsphere.pretrain(method, out=tmp_path / "whole", views=NoisyView(), **fields)
    views = 4 if method == "msbreg" else 2
    with pytest.raises(Stopped):  # in the fourth of nine steps, in the middle of an epoch
        unitsphere.pretrain(method, out=tmp_path / "parts", views=NoisyView(16 * views * 3 + 5), **fields)
    parts = unitsphere.pretrain(out=tmp_path / "parts", data=pictures, views=NoisyView(), resume=True)
    ours, theirs = parts.latest()[0], whole.latest()[0]
    assert ours.keys() == theirs.keys() and any(name.startswith("method.predictor.") for name in ours)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_a_run_of_byol_is_judged_and_loaded_like_any_other(tmp_path):
    run = unitsphere.pretrain("byol", data="shapes=120x16", out=tmp_path / "run", **SMALL_RUN)
    assert {"alignment", "centroid_distance", "effective_rank", "evenness"} <= set(last_line(run))
    assert unitsphere.evaluate(run, protocol="knn", data="shapes=60x16", k=[3], device="cpu")["value"]
    embedded = unitsphere.embed(run, data="shapes=40x16", device="cpu", features="embedding").features
    assert embedded.shape[1] == run.config.dim


def last_line(run):
    return json.loads(run.metrics_file.read_text().splitlines()[-1])
