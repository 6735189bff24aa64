"""Studies on one's own machine: the rule of `--scale`, and each study end to end at the tiny one."""

from dataclasses import replace

import pytest
import torch
from conftest import packed_shapes

from unitsphere.cli import main
from unitsphere.studies import STUDIES, find
from unitsphere.studies.plan import plan
from unitsphere.studies.pretraining import Pretraining
from unitsphere.studies.run import run_study
from unitsphere.studies.scale import COUNTS, SCALES, at_scale
from unitsphere.studies.study import Cell


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Runs that studies share are trained once."""
    return tmp_path_factory.mktemp("store")


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_each_study_runs_end_to_end_at_the_tiny_scale(study, store):
    """Its first cell, and the first of each other protocol."""
    tiny = at_scale(study, "tiny", str(packed_shapes(64)))
    kinds: dict[str, Cell] = {}
    for cell in tiny.cells:
        kinds.setdefault(tiny.job(cell, {}, 0).settings.get("evaluate.protocol", ""), cell)
    cells = tuple(kinds.values())
    results = run_study(
        replace(tiny, cells=cells, claims=()), store / study.id.replace("/", "-"), store=store, device="cpu"
    )
    for cell in results["cells"]:
        on_a_card_alone = cell["settings"].get("evaluate.read") == "memory_mib"
        assert (cell["value"] is None) == on_a_card_alone, cell
    assert "scale tiny" in results["title"] and results["altered"] == []


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_what_was_more_stays_more(study, scale):
    """Counts and epochs of all runs in the order that they have in the paper."""
    if not isinstance(study.runner, Pretraining):
        return
    scaled = at_scale(study, scale)
    both = [(study.job(cell, {}, 0).settings, scaled.job(cell, {}, 0).settings) for cell in study.cells]
    for name in (*COUNTS, "epochs", "batch_size", "bn_groups", "temperature", "keys", "evaluate.epoch"):
        pairs = sorted((own[name], made[name]) for own, made in both if own.get(name) and made.get(name))
        small = [made for _, made in pairs]
        assert small == sorted(small), (name, pairs)
    for own, made in both:
        rates = [s["lr"] or s["base_lr"] * s["batch_size"] / 256 for s in (own, made)]
        assert rates[0] == pytest.approx(rates[1])  # of a step
        assert own["seed"] == made["seed"] and own["method"] == made["method"]
        assert made["backbone"] != "resnet50" and made["data"].startswith("shapes=")


def test_the_small_scale_keeps_rows_apart():
    """But for epochs and ranks that are one there, and transfer, whose data are the same."""
    for id, study in STUDIES.items():
        small = at_scale(study, "small")
        addresses = {small.job(cell, {}, 0).address for cell in small.cells}
        if id not in ("eqco/figure-1", "mochi/figure-2a", "mochi/cifar10"):
            assert len(addresses) == len(small.cells), id


def test_a_verdict_at_a_scale_says_so(tmp_path, capsys):
    assert main(["study", "run", "mochi/figure-1", "--scale", "tiny", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "[scale tiny]" in printed and printed.count("seen once at scale tiny: ") == 3
    assert main(["study", "run", "eqco/table-2", "--scale", "small", "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert "backbone" in planned and "resnet-tiny" in planned and "minutes on 2 cores" in planned
    assert main(["study", "run", "eqco/table-2", "--data", "shapes"]) == 2
    assert "--scale" in capsys.readouterr().err


def test_every_study_at_the_small_scale_is_to_take_an_hour_at_most(tmp_path):
    for id, study in STUDIES.items():
        hours = plan(at_scale(study, "small"), tmp_path, seeds=[0], given={}, only={}).hours
        assert hours is None or hours < 1.0, (id, hours)


def test_other_images_are_given_by_name(tmp_path):
    study = at_scale(find("jcl/figure-2c"), "small", "cifar10=/somewhere")
    settings = study.job(study.cells[0], {}, 0).settings
    assert settings["data"] == settings["evaluate.data"] == "cifar10" and settings["queue_size"] == 512
