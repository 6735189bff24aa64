"""MoCHi through the configuration and the method: that what is asked for is what a step does."""

from dataclasses import fields, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unitsphere
from unitsphere.config.layers import Layer
from unitsphere.methods.build import build_learner
from unitsphere.methods.learners import contrastive
from unitsphere.methods.learners.learner import Moment
from unitsphere.methods.resolve import resolve
from unitsphere.objectives.contrastive import NOTHING
from unitsphere.objectives.mixing import Mixing, synthesise
from unitsphere.optimisation.optimisers import build_optimizer
from unitsphere.training.step import PlainStep
from unitsphere.weights.files import load_tensors
from unitsphere.weights.names import part

N = 72  # more than the 64 queries of which signs of health are taken
SMALL = {"image_size": 8, "batch_size": N, "queue_size": 40, "dim": 6, "bn_groups": 1, "epochs": 20, "mixing_warmup": 0}


def resolved(**given):
    return resolve(Layer("test", {"data": "./photos", **SMALL, **given}))


def built(**given):
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return build_learner(resolved(**given).config, backbone)


def photos(seed=0, noise=0.5):
    """Two views of each of N images."""
    draw = torch.Generator().manual_seed(seed)
    image = torch.randn(N, 3, 8, 8, generator=draw)
    return [image + noise * torch.randn(N, 3, 8, 8, generator=draw) for _ in range(2)]


def inputs(method, step=0):
    drawn = method.inputs(N, Moment(step, 100, 0, 20), torch.Generator().manual_seed(step))
    return drawn | ({"labels": torch.arange(N) % 3} if method.labels else {})


@pytest.fixture
def made(monkeypatch):
    """All that is synthesised within the methods."""
    found = []
    monkeypatch.setattr(contrastive, "synthesise", lambda *of, **how: found.append(synthesise(*of, **how)) or found[-1])
    return found


def filled(method):
    """With keys of other images in its queue; some have no class."""
    with torch.no_grad():
        method.queue.push(method.slow(photos(seed=9)[0])[:40], torch.arange(40) % 4 - 1)
    return method


EVERY_FIELD = {
    "hardest": 7, "pairs": 5, "with_query": 5, "mix_detach": False, "mix_distinct": False, "mix_rank_by": "key",
    "mix_in": "key", "mix_weigh": True, "mix_temperature": 0.3, "mix_until": 0.4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (EVERY_FIELD, Mixing(7, 5, 5, False, False, "key", "key", True, 0.3, 0.4)),
        ({"pairs": 5, "with_query": 3, "mix_rank_by": "key"}, Mixing(1024, 5, 3, rank_by="key")),
        ({"mix_in": "key", "mix_detach": False}, Mixing(mix_in="key", detach=False)),
        ({"hardest": None, "mix_weigh": True}, Mixing(None, weigh=True)),
        ({"mix_distinct": False}, Mixing(distinct=False)),
    ],
)
def test_every_field_reaches_the_mixing(given, expected):
    assert built(method="mochi", **given).mixing == expected
    if given is EVERY_FIELD:
        assert all(getattr(expected, field.name) != field.default for field in fields(Mixing))


def test_the_warm_up_and_what_alpha_is_on_reach_the_method():
    method = built(method="mochi", mixing_warmup=4, alpha=50.0, alpha_on="real")
    assert (method.mixing_warmup, method.loss.alpha, method.loss.alpha_on) == (4, 50.0, "real")
    plain = built(method="moco-v2")
    assert (plain.mixing, plain.mixing_warmup, plain.loss.alpha_on) == (None, 0, "all")


@pytest.mark.parametrize("hardest", [None, 20])
@pytest.mark.parametrize("source", ["queue", "batch"])
def test_no_parent_is_of_the_query_s_class_with_the_oracle(made, source, hardest):
    name = "mochi" if source == "queue" else "simo"
    method = built(method=name, oracle=True, hardest=hardest, pairs=60, with_query=60)
    if source == "queue":
        filled(method)
    given = inputs(method)
    of_negatives = method.queue.labels if source == "queue" else given["labels"]
    method(photos(), given)
    assert made
    for each in made:
        for places in (each.parents.first, each.parents.second, each.parents.partner):
            assert (of_negatives[places] != given["labels"][:, None]).all()


def test_the_query_s_own_key_is_never_mixed_in_the_batch(made):
    method = built(method="simo", hardest=None, pairs=400, with_query=400)
    method(photos(), inputs(method))
    for each in made:
        for places in (each.parents.first, each.parents.second, each.parents.partner):
            assert (places != torch.arange(N)[:, None]).all() and places[0].unique().numel() > N // 2
    assert made


def test_only_negatives_that_a_query_meets_are_mixed(made):
    method = built(method="mochi", negatives=5, hardest=None, pairs=60, with_query=60)
    given = inputs(method)
    (comparison,), _ = method.compare(method.queries(photos()), method.slow_keys(photos(), given), given)
    method(photos(), given)
    (each,) = made
    for places in (each.parents.first, each.parents.second, each.parents.partner):
        assert comparison.mask.gather(1, places).all()
        assert all(row.unique().numel() == 5 for row in places)


def test_mochi_of_nothing_trains_as_moco_v2_bit_for_bit(tmp_path):
    tiny = {"backbone": "resnet-tiny", "image_size": 16, "batch_size": 16, "queue_size": 64, "bn_groups": 2, "dim": 16}
    tiny |= {"device": "cpu", "tensorboard": False, "epochs": 1, "data": "shapes=40x16"}
    moco = unitsphere.pretrain("moco-v2", out=tmp_path / "moco", **tiny)
    nothing = unitsphere.pretrain("mochi", out=tmp_path / "mochi", pairs=0, with_query=0, **tiny)
    (one, meta), (other, _) = (load_tensors(run.checkpoints()[-1][1]) for run in (moco, nothing))
    one, other = part(one, "method."), part(other, "method.")
    assert meta["step"] >= 2 and one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("source", ["queue", "batch"])
def test_steps_that_mix_nothing_are_those_of_the_method_without_mixing(source):
    """As above, with the mixing in its place and asked for nothing; and what it does once it is asked for some."""
    name = "moco-v2" if source == "queue" else "simo"
    weights = []
    for mixing in (None, Mixing(8, 0, 0), Mixing(8, 4, 0)):
        config = resolved(method=name, seed=3).config
        method = built(method=name, seed=3)
        method.mixing = mixing
        take = PlainStep(method, build_optimizer(config, method))
        for number in range(2):
            take(photos(number), inputs(method, number), 0.1)
        weights.append(method.state_dict())
    moco, nothing, some = weights
    assert all(torch.equal(moco[name], nothing[name]) for name in moco)
    assert not all(torch.equal(moco[name], some[name]) for name in moco)


@pytest.mark.parametrize(
    ("given", "at_hand"),
    [
        ({"method": "mochi"}, 40),
        ({"method": "mochi", "negatives": 30}, 30),
        ({"method": "simo", "pairs": 4}, N - 1),
    ],
)
def test_more_hardest_than_there_are_negatives_is_said(given, at_hand):
    note = f"hardest is {at_hand + 1}, but a query has {at_hand} negatives: all are taken."
    assert note in resolved(**given, hardest=at_hand + 1).notes
    assert not any(each.startswith("hardest") for each in resolved(**given, hardest=at_hand).notes)
    assert not any(each.startswith("hardest") for each in resolved(**given, hardest=None).notes)


@pytest.mark.parametrize("oracle", [False, True])
def test_the_signs_of_a_step_are_those_of_explicit_vectors(made, oracle):
    method = filled(built(method="mochi", hardest=10, pairs=6, with_query=5, oracle=oracle, temperature=0.3))
    given, views = inputs(method), photos()
    (comparison,), _ = method.compare(method.queries(views), method.slow_keys(views, given), given)
    negatives = comparison.negatives.clone().double()
    method.key_encoder = replace(method.key_encoder, momentum=1.0)  # the slow copy has made the step's move already
    health = method(views, given).health
    (synthetic,) = made
    parents = synthetic.parents
    highest = {"highest_negative": [], "highest_pair": [], "highest_with_query": []}
    above_all = []
    for n in range(64):
        q, key = comparison.query[n].detach().double(), comparison.keys[n, 0].double()
        met = negatives if not oracle else negatives[method.queue.labels != given["labels"][n]]
        a, b = parents.a[n, :, None].double(), parents.b[n, :, None].double()
        h = a * negatives[parents.first[n]] + (1 - a) * negatives[parents.second[n]]
        h_prime = b * q + (1 - b) * negatives[parents.partner[n]]
        scores = [met @ q, F.normalize(h, dim=1) @ q, F.normalize(h_prime, dim=1) @ q]
        for values, found in zip(highest.values(), scores, strict=True):
            values.append(found.max().item() / 0.3)
        above_all.append(all((q @ key > found).all() for found in scores))
    for name, values in highest.items():
        assert health[name].item() == pytest.approx(sum(values) / 64, abs=1e-5), name  # float32
    assert health["accuracy_among_synthetic"].item() == pytest.approx(sum(above_all) / 64)
    assert 0 < health["accuracy_among_synthetic"] < health["contrastive_accuracy"] < 1
    assert synthetic.scores.min() > NOTHING  # so every query has all of them
