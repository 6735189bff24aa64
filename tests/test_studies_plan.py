"""What is said before a study starts, and what tells its runs apart."""

import json
import time
from pathlib import Path

import pytest
from conftest import command

from unitsphere.cli import main
from unitsphere.common.errors import UsageError
from unitsphere.studies import STUDIES, find
from unitsphere.studies.costs import hours, missing
from unitsphere.studies.kept import Kept
from unitsphere.studies.plan import plan, settings_of
from unitsphere.studies.pretraining import configured, folder_of_run, former_name_of_run, name_of_run
from unitsphere.studies.run import run_study
from unitsphere.studies.study import address

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
QUEUE = {"method": "moco-v2", "data": "imagenet", "queue_size": 4096}
BATCH = {"method": "simo", "data": "imagenet", "alpha": 256}


# Addresses


@pytest.mark.parametrize(
    "one, other",
    [
        (QUEUE, {**QUEUE, "negatives": 4096}),
        (QUEUE, {**QUEUE, "negatives": 5000, "shared_draw": True}),
        (QUEUE, {**QUEUE, "singular_form": "gram", "mix_detach": False, "lr_drops": "10,20"}),
        (QUEUE, {**QUEUE, "variance_weight": 4.0, "positives": "each"}),  # of one key
        (BATCH, {**BATCH, "queue_size": 1024}),
        (BATCH, {**BATCH, "negatives": 256}),  # 255 others: all of them
    ],
)
def test_what_has_no_effect_is_no_part_of_an_address(one, other):
    assert name_of_run(one) == name_of_run(other) and former_name_of_run(one) != former_name_of_run(other)


@pytest.mark.parametrize(
    "one, other",
    [
        (QUEUE, {**QUEUE, "negatives": 4095}),
        (QUEUE, {**QUEUE, "queue_size": 2048}),
        (QUEUE, {**QUEUE, "alpha": 65536.0}),
        (BATCH, {**BATCH, "negatives": 254}),
        ({**BATCH, "negatives": 16}, {**BATCH, "negatives": 16, "shared_draw": False}),
        (QUEUE, {**QUEUE, "keys": 2}),
    ],
)
def test_what_has_one_is(one, other):
    assert name_of_run(one) != name_of_run(other)


def test_the_same_run_of_two_studies_is_trained_once():
    """Runs of 200 epochs of ResNet-50 that were trained twice: table 4 and figure 3a, tables 2 and 3 and figure 4."""

    def run_of(id, **at):
        study = find(id)
        (cell,) = [cell for cell in study.cells if at.items() <= cell.at.items()]
        return study.runner.row_of({**cell.given, "seed": 0})

    for k in (256, 1024, 4096, 16384):
        assert run_of("eqco/table-4", k=k) == run_of("eqco/figure-3a", k=k, alpha="K")
    whole = {run_of("eqco/table-4", k=65536), run_of("eqco/figure-3a", k=65536), run_of("eqco/table-1", n=256),
             run_of("eqco/table-2", method="MoCo v2", epochs=200)}  # fmt: skip
    assert len(whole) == 1
    simo = {
        run_of("eqco/table-2", k=256, alpha=256, epochs=200),
        run_of("eqco/table-3", alpha=256),
        run_of("eqco/figure-4", k=256, alpha=256),
        run_of("eqco/table-8", architecture="ResNet-50", alpha=256),
    }
    assert len(simo) == 1
    assert run_of("jcl/figure-3", method="MoCo v2", what="variance") == run_of("jcl/figure-2a", method="JCL", keys=1)


def test_cells_of_an_older_scheme_of_addresses_are_found_by_their_settings(tmp_path):
    """Those of benchmarks/results, whose addresses knew what had no effect."""
    stored = json.loads((RESULTS / "jcl-cifar10.json").read_text())
    study, folder = find("jcl/cifar10"), tmp_path / "cells"
    folder.mkdir()
    for cell in stored["cells"]:
        for seed, old in zip(stored["seeds"], cell["addresses"], strict=True):
            if cell["values"][str(seed)] is not None:
                settings = {**cell["settings"], "seed": seed, "evaluate.seed": seed}
                kept = {"runner": "pretraining", "settings": settings, "value": cell["values"][str(seed)]}
                (folder / f"{old}.json").write_text(json.dumps(kept))
    count = len(list(folder.iterdir()))
    (folder / "gone.json").write_text(json.dumps({"runner": "pretraining", "settings": {"no_such_field": 1}}))
    store, found = Kept(folder, study.runner), 0
    for cell, before in zip(study.cells, stored["cells"], strict=True):
        for seed in stored["seeds"]:
            job = study.job(cell, stored["given"], seed)
            kept = store.find(job)
            assert (kept and kept["value"]) == before["values"][str(seed)], cell.label
            found += kept is not None
    assert found == count > 30 and store.unreadable == 1


def test_a_run_of_an_older_scheme_is_not_trained_again(tmp_path):
    fields = {"method": "moco-v2", "data": "shapes=64x16"}
    assert folder_of_run(fields, tmp_path).name == name_of_run(fields)
    old = tmp_path / former_name_of_run(fields)
    old.mkdir()
    assert folder_of_run(fields, tmp_path) == old
    (tmp_path / name_of_run(fields)).mkdir()
    assert folder_of_run(fields, tmp_path).name == name_of_run(fields)


def test_the_former_name_is_that_of_all_settings():
    resolved, own = configured(QUEUE)
    values = resolved.config.model_dump(mode="json")
    assert "hardest" in values and own == {}  # what is no part of the name now
    assert former_name_of_run(QUEUE) != address("pretrain", values)  # nor how a run is carried out


# Settings


def lines_of(id, **at):
    study = find(id)
    cells = [cell for cell in study.cells if at.items() <= cell.at.items()]
    return {name: (value, origin) for name, value, origin in settings_of(study, cells, {})}


def test_settings_say_where_each_comes_from():
    found = lines_of("mochi/table-3", pairs=1024, with_query=128, hardest=1024, queue=16384, oracle=False, epochs=200)
    assert found["base_lr"] == ("0.06 (0.03 at a batch of 128)", "recipe imagenet100")
    assert found["bn_groups"] == ("4", "the study") and found["pairs"] == ("1024", "this cell")
    assert found["temperature"] == ("0.2", "method mochi") and found["dim"] == ("128", "default")
    assert found["evaluate.lr"] == ("10", "recipe mochi-imagenet100")
    assert found["evaluate.drops"] == ("30,40,50", "recipe mochi-imagenet100")
    assert "singular_form" not in found  # without effect
    several = lines_of("eqco/table-1")
    assert several["batch_size"][0] == "256 | 512 | 1024" and "0.06 at a batch of 512" in several["base_lr"][0]


def test_the_command_prints_a_line_a_setting_within_seconds():
    began = time.monotonic()
    done = command("study", "show", "eqco/figure-3b", "--settings", "--only", "k=16", "--only", "alpha=256")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines()}
    assert lines["weight_decay"].split() == ["1e-06", "the", "study"] and lines["negatives"].startswith("16 ")
    assert len(lines) == len(done.stdout.splitlines()) > 40
    assert time.monotonic() - began < 30  # on a busy machine


# Before it starts


def test_a_dry_run_names_runs_hours_and_missing_data_and_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["study", "run", "eqco/table-8", "--dry-run", "--seeds", "0,1"]) == 0
    printed = capsys.readouterr().out
    assert "missing data: imagenet: say where it lies: --set data=imagenet=PATH" in printed
    assert "12 runs, 12 cells, of which 0 are finished" in printed and "hours of one NVIDIA H200" in printed
    assert "backbone resnet50x4" in printed and '"We use ResNet-50 as the default network' in printed
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match=r"data: imagenet: say where it lies"):
        run_study(find("eqco/table-8"), tmp_path / "out")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match=r"imagenet=/nowhere: there is no /nowhere"):
        run_study(find("eqco/table-8"), tmp_path / "out", given={"data": "imagenet=/nowhere"})


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_every_study_can_be_planned_without_its_data(study, tmp_path):
    planned = plan(study, tmp_path, seeds=[0], given={}, only={})
    assert planned.cells == len(study.cells) == sum(row.cells for row in planned.rows) and planned.finished == 0
    if "ImageNet" in study.needs:
        assert planned.missing and planned.hours is not None and planned.hours > 1
    assert all(name not in row.settings for row in planned.rows for name, _, _ in planned.common)


def test_a_plan_counts_what_is_finished(tmp_path):
    study = find("mochi/figure-1")
    quick = {"queries": 2}
    run_study(study, tmp_path, given=quick, only={"kind": ["pairs"]})
    planned = plan(study, tmp_path, seeds=[0, 1], given=quick, only={})
    assert (planned.finished, planned.cells, len(planned.rows)) == (1, 8, 4)
    assert planned.missing == [] and planned.hours is None


def test_hours_follow_the_work_of_a_run():
    def took(**fields):
        resolved, _ = configured({"method": "moco-v2", "data": "imagenet", "epochs": 200, **fields})
        return hours(resolved.config, resolved.config.epochs)

    # 200 epochs of 1,281,167 images at the 5,240 a second that were measured on the card
    assert took() == pytest.approx(200 * 1_281_167 / 5240 / 3600, rel=0.01)
    assert took(epochs=100) == pytest.approx(took() / 2)
    assert took(method="jcl", keys=5) == pytest.approx(took() * 8 / 4)  # a gradient through one view, five keys
    assert took(method="jcl-vanilla", keys=5, positives="repeated") == pytest.approx(took() * 20 / 4)
    assert took(method="simclr") == pytest.approx(took(method="simclr", epochs=400) / 2)
    assert took(data="somewhere/photos", recipe="imagenet") is None


def test_missing_data_are_named_with_what_to_do(tmp_path):
    (tmp_path / "photos").mkdir()
    assert missing(["cifar10", "shapes=64x16", str(tmp_path / "photos"), f"imagenet={tmp_path}"]) == []
    assert missing([f"tar={tmp_path}/part-{{000..002}}.tar"]) == []
    assert missing(["imagenet", "imagenet"]) == [
        "imagenet: say where it lies: --set data=imagenet=PATH (evaluate.data for the judge's)."
    ]
    assert missing(["no/such/folder"]) == ["no/such/folder: there is no such file, folder or named data set."]


# What is new of a cell: numbers of earlier epochs, and of what a run logged


def test_the_points_on_the_sphere_are_as_hard_as_figure_1_shows(tmp_path):
    study = find("mochi/figure-1")
    results = run_study(study, tmp_path, given={"queries": 64})
    memory, hardest, pairs, mixed = (cell["value"] for cell in results["cells"])
    # in 32 dimensions a cosine deviates by 1/sqrt(32); the mean over 64 times 500 of them is near 0
    assert abs(memory) < 0.02 and hardest < pairs < mixed
    assert {claim["verdict"] for claim in results["claims"]} == {"not comparable with the paper"}
    assert all("seen once with queries=64" in claim["evidence"] for claim in results["claims"])
