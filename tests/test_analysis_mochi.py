"""How hard the negatives of MoCHi's runs are: with the mixing that each run has, and against explicit vectors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import unitsphere
from unitsphere.analysis import hardness, training
from unitsphere.analysis.figures import colour
from unitsphere.analysis.hardness import Asked
from unitsphere.analysis.request import AnalysisRequest
from unitsphere.methods.learners.contrastive import ContrastiveLearner, LossSettings
from unitsphere.methods.learners.key_encoder import KeyEncoder
from unitsphere.methods.learners.negatives import Comparison, NegativeSource
from unitsphere.modules.encoder import Encoder
from unitsphere.objectives.mixing import Mixing, draw_parents
from unitsphere.runs.run import Run

SMALL = {"backbone": "resnet-tiny", "image_size": 16, "batch_size": 16, "queue_size": 64, "bn_groups": 1, "dim": 16}
SMALL |= {"device": "cpu", "tensorboard": False, "epochs": 3, "keep_epochs": [1, 2, 3], "log_every": 1}
SMALL |= {"hardest": 20, "pairs": 12, "with_query": 12, "mixing_warmup": 2, "data": "shapes=60x16"}
WAYS = {"mix_detach": False, "mix_distinct": False, "mix_rank_by": "key", "mix_weigh": True, "mix_temperature": 0.5}
WAYS |= {"mix_in": "key", "mix_until": 0.4}


def pretrained(folder, method="mochi", **given) -> Run:
    torch.set_num_threads(1)
    return unitsphere.pretrain(method, out=folder / "run", **(SMALL | given))


@pytest.fixture(scope="module")
def mochi(tmp_path_factory) -> Run:
    return pretrained(tmp_path_factory.mktemp("mochi"), **WAYS)


@pytest.fixture
def asked_for(monkeypatch):
    """The mixing of all that is synthesised."""
    found = []

    def spy(query, negatives, mixing, **how):
        found.append(mixing)
        return synthesise(query, negatives, mixing, **how)

    synthesise = hardness.synthesise
    monkeypatch.setattr(hardness, "synthesise", spy)
    return found


def test_a_run_is_asked_with_its_own_mixing_after_its_warm_up(mochi, asked_for):
    found = hardness.measure(mochi, AnalysisRequest(), images=32, top=8)
    own = Mixing(20, 12, 12, False, False, "key", "key", True, 0.5, 0.4)
    assert asked_for == 4 * [own]  # two batches of two checkpoints
    assert found["mixing"] == [20, 12, 12]
    assert [checkpoint["epoch"] for checkpoint in found["checkpoints"]] == [1, 2, 3]
    assert ["proxy_synthetic" in checkpoint for checkpoint in found["checkpoints"]] == [False, True, True]
    assert all("proxy" in checkpoint for checkpoint in found["checkpoints"])


def test_what_is_given_overrides_the_run_s_own_mixing_at_all_checkpoints(mochi, asked_for):
    found = hardness.measure(mochi, AnalysisRequest(), images=16, top=8, mixing=[8, 5, 0])
    assert asked_for == 3 * [Mixing(8, 5, 0)] and found["mixing"] == [8, 5, 0]
    assert all("proxy_synthetic" in checkpoint for checkpoint in found["checkpoints"])


def test_the_warm_up_is_counted_in_the_run_s_own_epochs(mochi):
    """Whatever images it is asked about."""
    found = hardness.measure(mochi, AnalysisRequest(data="shapes=600x16"), images=16, top=8)
    assert ["proxy_synthetic" in checkpoint for checkpoint in found["checkpoints"]] == [False, True, True]


@pytest.mark.parametrize("given", [{"method": "moco-v2", "pairs": 0, "with_query": 0}, {"mixing_warmup": 3}])
def test_a_run_that_did_not_mix_has_nothing_synthetic(given, tmp_path, asked_for):
    run = pretrained(tmp_path, **given)
    found = hardness.measure(run, AnalysisRequest(), images=16, top=8)
    assert not asked_for and not any("proxy_synthetic" in checkpoint for checkpoint in found["checkpoints"])
    assert (found["mixing"] is None) == (given.get("method") == "moco-v2")


@pytest.mark.parametrize("oracle", [False, True])
def test_the_oracle_s_run_mixes_no_entry_of_the_query_s_class(oracle, tmp_path):
    run = pretrained(tmp_path, oracle=oracle, mixing_warmup=0)
    for mixing in (None, [64, 50, 50]):
        for checkpoint in hardness.measure(run, AnalysisRequest(), images=48, top=16, mixing=mixing)["checkpoints"]:
            assert checkpoint["false_negatives"] > 0
            assert (checkpoint["one_false"] == 0) is (checkpoint["both_false"] == 0) is oracle


# On tensors

TAU = 0.3


def asked(queries=40, size=30, keys=1, oracle=False):
    """Queries of 10 images in 3 classes beside a queue that has some of the images, and entries of none."""
    torch.manual_seed(0)
    encoder = Encoder(torch.nn.Flatten(), torch.nn.Linear(4, 8))
    method = ContrastiveLearner(encoder, LossSettings(TAU), KeyEncoder(0.9), NegativeSource())
    query, keys, negatives = torch.randn(queries, 8), torch.randn(queries, keys, 8), torch.randn(size, 8)
    query, keys, negatives = (F.normalize(x, dim=-1) for x in (query, keys + 2 * query[:, None], negatives))
    images, owners, labels = torch.arange(queries) % 10, torch.arange(size) % 15 - 1, torch.arange(14) % 3
    negatives[:10] = F.normalize(negatives[:10] + query[:10], dim=1)
    mask = None
    if oracle:
        mask = labels[images][:, None] != labels[owners.clamp(min=0)].where(owners >= 0, -1)
    found = Comparison(query, keys, negatives, mask, torch.arange(queries))
    return found, images, owners, labels, Asked.of(found, torch.arange(queries), images, owners, labels, method)


def test_a_query_s_own_image_is_no_false_negative():
    found, images, owners, labels, of = asked()
    assert (owners == images[:, None]).any(1).all()
    nearest, chance = [], []
    for n in range(len(images)):
        others = [j for j in range(30) if owners[j] != images[n]]
        same = {j for j in others if owners[j] >= 0 and labels[owners[j]] == labels[images[n]]}
        top = sorted(others, key=lambda j: -(found.query[n] @ found.negatives[j]).item())[:12]
        nearest.append(len(same & set(top)) / 12)
        chance.append(len(same) / len(others))
    means = hardness.of_negatives(of, 12)
    assert means["false_negatives"].item() == pytest.approx(100 * sum(nearest) / 40, rel=1e-5)
    assert means["chance"].item() == pytest.approx(100 * sum(chance) / 40, rel=1e-5)
    own_too = hardness.of_negatives(of._replace(others=torch.ones_like(of.others)), 12)
    assert own_too["false_negatives"] > means["false_negatives"] + 1  # or it shows nothing


@pytest.mark.parametrize("oracle", [False, True])
@pytest.mark.parametrize("way", [{}, {"mix_in": "key"}, {"pairs": 0}, {"with_query": 0}, {"rank_by": "key"}])
def test_the_proxy_task_with_synthetic_negatives_is_that_of_explicit_vectors(way, oracle):
    found, images, owners, labels, of = asked(keys=2, oracle=oracle)
    mixing, draw_seed, rows = replace(Mixing(8, 3, 2), **way), torch.tensor(5), torch.arange(40)
    means = hardness.of_synthetic(of, mixing, draw_seed, rows)
    query, key, mean, n = (x.double() for x in (found.query, found.keys[:, 0], found.keys.mean(1), found.negatives))
    met = torch.stack([owners != image for image in images])
    if oracle:
        met &= torch.stack([(owners < 0) | (labels[owners.clamp(min=0)] != labels[image]) for image in images])
    ranking = (mean if mixing.rank_by == "key" else query) @ n.T
    parents = draw_parents(ranking, mixing, draw_seed=draw_seed, rows=rows, mask=met)
    other = mean if mixing.mix_in == "key" else query
    right, highest = 0, {"negative": [], "pair": [], "with_query": []}
    for i in range(40):
        a, b = parents.a[i, :, None], parents.b[i, :, None]
        h = F.normalize(a * n[parents.first[i]] + (1 - a) * n[parents.second[i]], dim=1)
        h_prime = F.normalize(b * other[i] + (1 - b) * n[parents.partner[i]], dim=1)
        kinds = {"negative": n[met[i]], "pair": h, "with_query": h_prime}
        right += all((query[i] @ key[i] > those @ query[i]).all() for those in kinds.values())
        for kind, those in kinds.items():
            highest[kind] += [(those @ query[i]).max().item() / TAU] if len(those) else []
    assert means["proxy_synthetic"].item() == pytest.approx(100 * right / 40)
    for kind, values in highest.items():
        assert (f"highest_{kind}" in means) == bool(values)
        if values:
            assert means[f"highest_{kind}"].item() == pytest.approx(sum(values) / 40, abs=1e-5)  # float32
    if mixing.with_query:
        assert 0 < means["proxy_synthetic"] < hardness.of_negatives(of, 8)["proxy"]


# While it trains


def test_the_curves_of_training_have_what_was_mixed(mochi):
    curves = training.measure(mochi, AnalysisRequest())["curves"]
    lines = [json.loads(line) for line in mochi.metrics_file.read_text().splitlines()]
    for name in ("accuracy_among_synthetic", "highest_negative", "highest_pair", "highest_with_query"):
        values = [line[name] for line in lines if line["epoch"] == 3]
        assert curves[name]["epochs"] == [3]
        assert curves[name]["values"][0] == pytest.approx(sum(values) / len(values), rel=1e-5)
    assert curves["contrastive_accuracy"]["epochs"] == [1, 2, 3]


def test_synthetic_negatives_are_drawn_beside_the_real_ones(mochi, tmp_path):
    plain = pretrained(tmp_path, "moco-v2", pairs=0, with_query=0, epochs=1)
    runs = [
        training.measure(run, AnalysisRequest()) | {"name": name} for run, name in ((mochi, "MoCHi"), (plain, "MoCo"))
    ]
    figure = training.draw(runs)
    panels = {axes.get_ylabel(): axes for axes in figure.axes}
    drawn = {label: [(x.get_color(), x.get_linestyle()) for x in axes.lines] for label, axes in panels.items()}
    assert drawn["share of keys above all negatives"] == [(colour(0), "-"), (colour(0), "--"), (colour(1), "-")]
    assert drawn["highest score of a query"] == [(colour(0), "-"), (colour(0), "--"), (colour(0), ":")]
    legends = {label: axes.get_legend() for label, axes in panels.items() if axes.get_legend()}
    told = {label: [x.get_text() for x in legend.texts] for label, legend in legends.items()}
    assert told == {
        "share of keys above all negatives": ["real negatives", "and synthetic ones"],
        "highest score of a query": ["real negatives", "pairs of negatives", "mixed with the query"],
    }
    (runs_named,) = figure.legends
    assert [x.get_text() for x in runs_named.texts] == ["MoCHi", "MoCo"]
    assert [x.get_color() for x in runs_named.get_lines()] == [colour(0), colour(1)]
    assert "highest score of a query" not in {axes.get_ylabel() for axes in training.draw(runs[1:]).axes}
