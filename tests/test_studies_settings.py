"""The settings of the studies against the papers' texts and the authors' released configurations."""

from itertools import pairwise

import pytest
from test_studies_papers import NAMED, papers, table
from torch import nn

from unitsphere.evaluation.recipes import LINEAR_RECIPES
from unitsphere.modules.heads import projection_head
from unitsphere.studies import STUDIES, find
from unitsphere.studies.study import Table


def each(id, **at):
    return [s for place, _, _, s in papers(id) if at.items() <= place.items()]


def rate(settings):
    """Absolute, at the run's batch."""
    return settings["lr"] or settings["base_lr"] * settings["batch_size"] / 256


ON_IMAGENET = ("table-2", "table-3", "table-4", "table-8", "figure-1", "figure-2", "figure-3a", "figure-4")


@pytest.mark.parametrize("id", [f"eqco/{name}" for name in ON_IMAGENET])
def test_eqco_trains_as_mocos_authors_and_judges_as_they_do(id):
    """2.3 and 3: MoCo v2's settings; N 256, 128-d, ResNet-50, 200 epochs; linear as MoCo."""
    for s in each(id):
        assert rate(s) == pytest.approx(0.03) and s["batch_size"] == 256 and s["weight_decay"] == 1e-4
        assert s["optimizer"] == "sgd" and s["momentum"] == 0.9 and s["temperature"] == 0.2 and s["dim"] == 128
        assert s["lr_schedule"] == "cosine" and s["views"] == "moco-v2" and s["key_momentum"] == 0.999
        assert s["epochs"] in (200, 800) and s["zero_init_residual"] is True
        assert s["backbone"].startswith("resnet50") and s["bn_groups"] == (1 if s["method"] == "simo" else 8)
        if s["evaluate.protocol"] == "linear":
            assert s["evaluate.recipe"] == "moco"


def test_simo_is_what_section_3_says():
    """BN after each layer of the head, the warm-up, no queue; alpha 256 where nothing else is said; sync BN."""
    for id in ("eqco/table-3", "eqco/table-6", "eqco/table-8", "eqco/figure-4"):
        for s in each(id):
            assert (s["head"], s["negatives_from"], s["bn_groups"]) == ("mlp-bn-bn", "batch", 1)
            assert (s["warmup_epochs"], s["warmup_kind"], s["lr_update"]) == (10, "times", "step")
    assert {s["alpha"] for s in each("eqco/table-6") + each("eqco/table-7")} == {256}
    assert {s["negatives"] for s in each("eqco/table-3")} == {None}


def test_simos_head_ends_in_a_norm_and_begins_small():
    """The released head: no biases, N(0, 0.01). 128 x 2048 draws: their deviation is known to 0.2 %."""
    (kind,) = {s["head"] for s in each("eqco/table-3")}
    first, norm, act, last, end = projection_head(kind, 2048, 128)
    assert isinstance(norm, nn.BatchNorm1d) and isinstance(end, nn.BatchNorm1d) and isinstance(act, nn.ReLU)
    for layer in (first, last):
        assert layer.bias is None and float(layer.weight.std()) == pytest.approx(0.01, rel=0.02)


def test_simclr_in_figure_3b_differs_from_its_paper_by_the_optimiser_alone():
    """ "The only difference is SGD for LARS": 0.3 per 256 images and a decay of 1e-6, at N 256; linear evaluation by
    the released configuration. K are drawn for each query independently."""
    for s in each("eqco/figure-3b"):
        assert (s["optimizer"], s["base_lr"], s["weight_decay"], s["batch_size"]) == ("sgd", 0.3, 1e-6, 256)
        assert (s["temperature"], s["head"], s["bn_groups"], s["epochs"]) == (0.1, "mlp-bn-bn", 1, 200)
        assert s["key_encoder"] == "online" and not s.get("shared_draw", False) and s["evaluate.recipe"] == "simclr"
    row = LINEAR_RECIPES["simclr"]
    assert (row.lr, row.weight_decay, row.epochs, row.drops) == ((0.1,), 1e-6, 90, (60, 80))


@pytest.mark.parametrize("id", ["eqco/figure-3a", "eqco/figure-3a-v1"])
def test_few_negatives_are_drawn_once_as_written_and_for_each_query(id):
    for k in (16, 64):
        for alpha in ("K", 65536):
            assert [s["shared_draw"] for s in each(id, k=k, alpha=alpha)] == [True, False]
    assert all("shared_draw" not in s and s["queue_size"] == k for k in (256, 4096) for s in each(id, k=k))


def test_simos_few_negatives_are_drawn_once_as_released():
    (settings,) = each("eqco/table-2", k=16)
    assert settings["shared_draw"] is True
    assert [s["shared_draw"] for s in each("eqco/figure-4", k=16, alpha=256)] == [True, False]


def test_published_grids_keep_the_settings_that_they_were_measured_with():
    """Whatever becomes of the methods' own: SimCLR's head without its last norm, zeros at first in SiMo alone."""
    for id in ("eqco/cifar10", "jcl/cifar10", "mochi/cifar10", "msbreg/cifar10", "msbreg/elsewhere"):
        for (_, _, _, s), cell in zip(papers(id), find(id).cells, strict=True):
            stated = {**find(id).runner.base, **cell.given}
            assert stated["zero_init_residual"] is (s["method"] == "simo") is s["zero_init_residual"]
            assert s["method"] != "simclr" or stated["head"] == s["head"] == "mlp-bn"


def test_at_16_negatives_moco_v2_may_degrade():
    """Section 4: "if K <= 16 MoCo v2 starts to degrade significantly even with EqCo"."""
    study = find("eqco/figure-3a")
    values = [{"0": 60.0 if cell.at["k"] == 16 else 67.0} for cell in study.cells]
    assert {claim.judge(Table(study.cells, values))["verdict"] for claim in study.claims} == {"seen once"}


def test_simo_outperforms_and_equality_is_not_enough():
    for id in ("eqco/table-2", "eqco/table-3"):
        study = find(id)
        flat = Table(study.cells, [{"0": 68.0} for _ in study.cells])
        assert {claim.judge(flat)["verdict"] for claim in study.claims} == {"not seen"}


MOCHI_ON_100 = [f"mochi/{name}" for name in ("table-1a", "table-3", "figure-2a", "figure-2b", "figure-2c", "figure-3a",
                                             "figure-3b", "figure-3c", "figure-4", "appendix-b2")]  # fmt: skip


@pytest.mark.parametrize("id", MOCHI_ON_100)
def test_mochi_trains_on_4_cards_at_the_rate_of_its_appendix(id):
    """C.1 and 5: 0.03 at a batch of 128, a cosine, K = 16k, 10 epochs without mixtures, 4 GPUs."""
    for s in each(id):
        if s["method"] == "supervised":
            continue
        assert rate(s) == pytest.approx(0.03) and s["batch_size"] == 128 and s["bn_groups"] == 4
        assert s["queue_size"] in ((16384, 4096, 1024) if id == "mochi/table-3" else (16384,))
        assert s.get("mixing_warmup", 10) == 10 and s["weight_decay"] == 1e-4
        if s["method"] != "moco-v1":
            assert (s["lr_schedule"], s["temperature"], s["head"]) == ("cosine", 0.2, "mlp")
        if s["evaluate.protocol"] == "linear":
            row = LINEAR_RECIPES[s["evaluate.recipe"]]
            assert (row.lr, row.epochs, row.batch_size, row.drops) == ((10.0,), 60, 128, (30, 40, 50))
    if id == "mochi/figure-2b":
        assert {s["temperature"] for s in each(id) if s["method"] == "moco-v1"} == {0.07}
    if id == "mochi/figure-4":
        assert {s["temperature"] for s in each(id)} == {0.2}


def test_jcls_table_1():
    for letter, row in zip("abc", table("jcl", "Table 1")[-3:], strict=True):
        for name, stated in zip(("keys", "variance_weight", "temperature"), row[1:], strict=True):
            found = {s.get(name) for s in each(f"jcl/figure-2{letter}") if s["method"] == "jcl" and s["keys"] > 1}
            assert len(found) > 2 if stated == "/" else found == {float(stated)}
    for s in each("jcl/figure-3"):
        assert (s["evaluate.images"], s["evaluate.augmentations"], s["backbone"]) == (32_768, 32, "resnet18")
    assert {s["keys"] for s in each("jcl/figure-3")} == {1, 9}
    literal = {s["keys"]: s.get("positives") for s in each("jcl/memory") if s["method"] == "jcl-vanilla"}
    assert set(literal.values()) == {"repeated"} and all(b > a for a, b in pairwise(literal))


def test_studies_name_the_papers_words_of_settings_that_there_are():
    for id in NAMED:
        study = STUDIES[id]
        names = {name for cell in study.cells for name, _, _ in study.runner.explain({**cell.given, "seed": 0})}
        assert study.words and names & study.words.keys(), id


# Grids of ours


def test_the_grids_on_cifar10_have_the_tuned_rate():
    for name in ("eqco/cifar10", "jcl/cifar10", "mochi/cifar10", "msbreg/elsewhere"):
        study = STUDIES[name]
        assert {study.job(cell, {}, 0).settings["base_lr"] for cell in study.cells} == {0.24}


def test_the_forces_are_all_that_is_added_to_other_methods():
    study = STUDIES["msbreg/elsewhere"]
    weights = {"singular_weight": 0.0, "brownian_weight": 0.0}
    found: dict[tuple[str, str], list[dict]] = {}
    for cell in study.cells:
        settings = study.job(cell, {}, 0).settings
        assert all((settings[name] == 0) == (cell.at["forces"] == "none") for name in weights)
        settings = {
            name: value
            for name, value in settings.items()
            if name not in ("singular_form", "brownian_per_view", *weights)
        }
        found.setdefault((cell.at["method"], cell.at["judge"]), []).append(settings)
    assert len(found) == 8 and all(others == [first] * 2 for first, *others in found.values())
