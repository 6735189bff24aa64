"""Studies whose cells are pre-training runs that a protocol judges."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from unitsphere.analysis.analyse import ANALYSES
from unitsphere.analysis.request import AnalysisRequest
from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.evaluation.evaluate import evaluate
from unitsphere.runs.run import Run
from unitsphere.studies.pretraining import Pretraining, edge_of
from unitsphere.studies.run import run_study
from unitsphere.studies.study import Cell, Claim, Study

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


SMALL = {"backbone": "resnet-tiny", "image_size": 16, "batch_size": 32, "epochs": 1, "tensorboard": False}


def shapes_study() -> Study:
    base = {**SMALL, "method": "moco-v2", "data": "shapes=128x16", "base_lr": 0.1}
    runner = Pretraining(base, {"protocol": "knn", "k": [5]}, read="k=5")
    cells = tuple(Cell({"k": k}, patch={"queue_size": k}) for k in (32, 64))
    claims = (Claim("better than nothing", lambda table: (min(table.row()) > 0, f"{table.row()}")),)
    return Study("test/shapes", "K", "nobody", "a CPU", "k-NN accuracy, %", "k", runner, cells, claims)


def test_a_pretraining_study_trains_judges_and_resumes(tmp_path):
    results = run_study(shapes_study(), tmp_path, device="cpu")
    values = [cell["value"] for cell in results["cells"]]
    assert len(list((tmp_path / "runs").iterdir())) == 2 and results["claims"][0]["verdict"] == "seen once"
    first = results["cells"][0]
    assert first["settings"]["queue_size"] == 32 and first["settings"]["evaluate.protocol"] == "knn"
    path = tmp_path / "cells" / f"{first['addresses'][0]}.json"
    kept = json.loads(path.read_text())
    assert kept["result"]["value"]["k=5"] == first["value"]

    # Killed before its first checkpoint, it starts again; killed before it was judged, it is only judged.
    (checkpoint,) = (tmp_path / "runs" / kept["run"] / "checkpoints").iterdir()
    path.unlink()
    checkpoint.unlink()
    assert run_study(shapes_study(), tmp_path, device="cpu")["cells"][0]["value"] == first["value"]
    path.unlink()
    written = checkpoint.stat().st_mtime_ns
    results = run_study(shapes_study(), tmp_path, device="cpu")
    assert [cell["value"] for cell in results["cells"]] == values and checkpoint.stat().st_mtime_ns == written


def test_what_is_wrong_with_the_data_says_how_a_study_is_given_it(tmp_path, monkeypatch):
    monkeypatch.setenv("UNITSPHERE_DATA", str(tmp_path / "file"))  # where nothing can be fetched into
    (tmp_path / "file").write_text("")
    for cell in ({"data": "cifar10"}, {"evaluate.data": "cifar10"}):
        store = tmp_path / "store"
        with pytest.raises(UsageError, match=r"give --data cifar10=FOLDER.*\n.*--set data=NAME=PATH.*evaluate\.data="):
            run_study(of_shapes(cell), store, device="cpu")
        left = [path.name for path in store.iterdir()] if store.exists() else []
        assert left == (["runs"] if "evaluate.data" in cell else [])  # the run that could not be judged


def test_a_run_is_named_before_it_is_trained(tmp_path, monkeypatch):
    told = []

    def train(fields, *_):
        told.append(fields["queue_size"])
        return "a run"

    monkeypatch.setattr("unitsphere.studies.pretraining.trained", train)
    monkeypatch.setattr("unitsphere.studies.pretraining.judge", lambda *_: {"value": {"k=5": 50.0}})
    monkeypatch.setattr("unitsphere.studies.pretraining.speed_of", lambda _: {})
    cells = [
        Cell({"queue": q, "read": k}, patch={"queue_size": q, "evaluate.k": [5, k]}) for q in (32, 64) for k in (6, 7)
    ]
    study = replace(shapes_study(), cells=tuple(cells))
    run_study(study, tmp_path, device="cpu", seeds=[3], say=told.append)
    assert told[1:] == [
        "run 1 of 2: queue 32, seed 3",
        32,
        "1/4  queue 32, read 6: 50.00",
        "2/4  queue 32, read 7: 50.00",
        "run 2 of 2: queue 64, seed 3",
        64,
        "3/4  queue 64, read 6: 50.00",
        "4/4  queue 64, read 7: 50.00",
    ]
    told.clear()
    run_study(study, tmp_path, device="cpu", seeds=[4], only={"read": ["7"]}, say=told.append)
    assert told[1] == "run 1 of 2: queue 32, read 7, seed 4"  # all that is asked of it


def test_a_run_that_diverges_is_a_result_and_the_others_go_on(tmp_path):
    said = []
    runner = Pretraining({**SMALL, "method": "moco-v2", "data": "shapes=128x16"}, {"protocol": "knn"}, read="k=5")
    cells = tuple(
        Cell({"rate": rate, "k": k}, patch={"base_lr": rate, "evaluate.k": [5, k]})
        for rate in (1e30, 0.1) for k in (6, 7)
    )  # fmt: skip
    study = Study("test/rates", "rates", "nobody", "a CPU", "k-NN accuracy, %", "k", runner, cells, ())
    lost, lost_too, *found = run_study(study, tmp_path, device="cpu", say=said.append)["cells"]
    assert lost["value"] is None and lost_too["value"] is None and "the loss became" in lost["told"]["0"]["failure"]
    assert sum("the loss became" in line for line in said) == 2
    assert all(cell["value"] > 0 and cell["told"]["0"]["images_per_second"] > 0 for cell in found)
    assert (tmp_path / "runs" / found[0]["told"]["0"]["run"] / "config.json").is_file()
    said.clear()
    run_study(study, tmp_path, device="cpu", say=said.append)
    assert said[0].startswith("4 of 4 cells are finished")


def test_the_address_of_a_run_knows_what_matters():
    study = shapes_study()
    cell = study.cells[0]
    plain = study.job(cell, {}, 0)
    for given in ({"device": "cuda"}, {"workers": 3, "log_every": 7}):
        assert study.job(cell, given, 0).address == plain.address
    here, there = (study.job(cell, {"data": f"cifar10=/{place}"}, 0).address for place in ("here", "there"))
    assert here == there != plain.address
    elsewhere = [f"{source}/{place}" for source in ("parquet=", "tar=", "/data/lr=0.1", "lr=0.1") for place in "ab"]
    apart = {study.job(cell, {"data": data}, 0).address for data in [*elsewhere, "cifar10", "/data/lr"]}
    assert len(apart) == 10 and here in apart
    other = [{"epochs": 2}, {"lr": 0.5}, {"evaluate.k": [6]}, {"data": "shapes=64x16"}]
    addresses = {study.job(cell, given, 0).address for given in other} | {study.job(cell, {}, 1).address}
    assert len(addresses) == 5 and plain.address not in addresses
    with pytest.raises(UsageError, match=r"Did you mean evaluate\.temperature"):
        study.job(cell, {"evaluate.temprature": 1}, 0)
    with pytest.raises(UsageError, match="Did you mean epochs"):
        study.job(cell, {"epoch": 1}, 0)


def of_shapes(*patches, **base) -> Study:
    """A study with one cell for each patch, on tiny runs."""
    fields = {**SMALL, "method": "moco-v2", "data": "shapes=128x16", "base_lr": 0.1, "log_every": 1, **base}
    runner = Pretraining(fields, {"protocol": "knn", "k": [5]}, read="k=5")
    cells = tuple(Cell({"cell": number}, patch=patch) for number, patch in enumerate(patches))
    return Study("test/of-shapes", "", "nobody", "a CPU", "k-NN accuracy, %", "cell", runner, cells, ())


def kept_of(folder, results, cell):
    """What is kept of a cell, and the folder of its run."""
    kept = json.loads((folder / "cells" / f"{results['cells'][cell]['addresses'][0]}.json").read_text())
    return kept, folder / "runs" / kept["run"]


def rates_of(run):
    return [json.loads(line)["lr"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_cell_can_be_the_checkpoint_of_an_earlier_epoch_of_a_run(tmp_path):
    study = of_shapes({"evaluate.epoch": 1}, {}, epochs=3, keep_epochs=[1])
    results = run_study(study, tmp_path, device="cpu")
    (early, run), (late, same) = kept_of(tmp_path, results, 0), kept_of(tmp_path, results, 1)
    assert run == same and (early["result"]["epoch"], late["result"]["epoch"]) == (1, 3)
    (first, *_) = sorted((run / "checkpoints").iterdir())
    assert evaluate(first, protocol="knn", data="shapes=128x16", k=[5], device="cpu")["value"]["k=5"] == early["value"]

    other = of_shapes({"evaluate.epoch": 2}, epochs=3, keep_epochs=[1])
    with pytest.raises(UnitsphereError, match="no checkpoint of epoch 2"):
        run_study(other, tmp_path / "other", store=tmp_path, device="cpu")


def test_a_run_can_be_the_continuation_of_a_shorter_one(tmp_path):
    study = of_shapes({"epochs": 2}, {"epochs": 5, "continued_at": 2})
    results = run_study(study, tmp_path, device="cpu")
    (_, short), (_, longer) = (kept_of(tmp_path, results, cell) for cell in range(2))
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {short.name, longer.name}
    # a cosine over 2 epochs, then from the third on one over 5: the rate rises again
    peak = 0.1 * 32 / 256
    expected = [peak * (1 + math.cos(math.pi * e / total)) / 2 for e, total in ((0, 2), (1, 2), (2, 5), (3, 5), (4, 5))]
    rates = rates_of(longer)
    assert rates[:: len(rates) // 5] == pytest.approx(expected) and expected[2] > expected[1]
    assert rates_of(short) == rates[: 2 * len(rates) // 5]
    assert "continued_at" not in results["cells"][0]["settings"]
    assert results["cells"][1]["settings"]["continued_at"] == 2


def write_stl10(root):
    """24 images of each split in the files of STL-10."""
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    for number, part in enumerate(("train", "test")):
        pixels = np.random.default_rng(number).integers(0, 256, (24, 3, 96, 96), np.uint8)
        pixels.tofile(folder / f"{part}_X.bin")
        (1 + np.arange(24, dtype=np.uint8) % 3).tofile(folder / f"{part}_y.bin")
    (folder / "class_names.txt").write_text("airplane\nbird\ncar\n")


def test_a_finished_run_is_judged_wherever_its_data_lies_now(tmp_path):
    write_stl10(tmp_path / "here")
    fields = {"data": f"stl10={tmp_path / 'here'}", "batch_size": 8, "queue_size": 16, "bn_groups": 1}
    looked_at = {"evaluate.protocol": "geometry", "evaluate.read": "uniformity"}
    study = of_shapes({"evaluate.protocol": "knn", "evaluate.k": [5]}, looked_at, **fields)
    study = replace(study, runner=replace(study.runner, protocol={}))
    first = run_study(study, tmp_path / "one", store=tmp_path, device="cpu")
    (tmp_path / "here").rename(tmp_path / "there")
    shutil.rmtree(tmp_path / "cells")
    given = {"data": f"stl10={tmp_path / 'there'}"}
    again = run_study(study, tmp_path / "two", store=tmp_path, device="cpu", given=given)
    assert [cell["value"] for cell in again["cells"]] == [cell["value"] for cell in first["cells"]]
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_the_part_of_a_cell_is_that_of_the_run_it_begins_with():
    study = of_shapes({"epochs": 2}, {"epochs": 5, "continued_at": 2}, {"epochs": 2, "evaluate.k": [3]}, {"epochs": 5})
    short, longer, other_k, alone = (study.runner.run_of(study.job(cell, {}, 0).given) for cell in study.cells)
    assert short == longer == other_k != alone


def test_a_run_that_was_begun_goes_on_as_it_was_begun(tmp_path):
    first = run_study(of_shapes({}), tmp_path, device="cpu")
    kept, _ = kept_of(tmp_path, first, 0)
    again = of_shapes({}, log_every=7, keep_epochs=[1])
    (tmp_path / "cells" / f"{first['cells'][0]['addresses'][0]}.json").unlink()
    assert run_study(again, tmp_path)["cells"][0]["value"] == kept["value"]
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_cell_can_be_a_number_of_an_analysis(tmp_path):
    geometry = {"evaluate.protocol": "geometry", "evaluate.k": None, "evaluate.positives": "views"}
    similarity = {"evaluate.protocol": "similarity", "evaluate.augmentations": 4, "evaluate.read": "similarity.mean"}
    study = of_shapes({**geometry, "evaluate.read": "uniformity"}, similarity, epochs=2, keep_epochs=[1])
    study = replace(study, runner=replace(study.runner, protocol={}))
    with pytest.raises(UsageError, match=r"evaluate\.k"):  # what an analysis does not take
        run_study(study, tmp_path, device="cpu")
    del geometry["evaluate.k"]
    study = replace(of_shapes({**geometry, "evaluate.read": "uniformity"}, similarity), runner=study.runner)
    results = run_study(study, tmp_path, device="cpu")
    (_, run), (_, same) = kept_of(tmp_path, results, 0), kept_of(tmp_path, results, 1)
    assert run == same
    ask = AnalysisRequest("shapes=128x16", CPU)
    asked = ANALYSES["geometry"].measure(Run.open(run), ask, positives="views")
    assert results["cells"][0]["value"] == asked["checkpoints"][-1]["uniformity"] < 0
    alike = ANALYSES["similarity"].measure(Run.open(run), ask, augmentations=4)
    assert 0 < results["cells"][1]["value"] == alike["similarity"]["mean"] <= 1
    kept, _ = kept_of(tmp_path, results, 0)
    assert [checkpoint["epoch"] for checkpoint in kept["result"]["checkpoints"]] == [2]  # the last, and no other
    wrong = replace(of_shapes({**geometry, "evaluate.read": "evenness"}), runner=study.runner)
    with pytest.raises(UnitsphereError, match="but the study reads evenness"):
        run_study(wrong, tmp_path / "wrong", store=tmp_path, device="cpu")


def test_a_cell_can_be_a_number_of_an_earlier_epoch_or_what_the_run_logged(tmp_path):
    """Figures over epochs: an analysis of the checkpoint of that epoch, and the mean of an epoch's lines."""
    hardness = {"evaluate.protocol": "hardness", "evaluate.images": 32, "evaluate.read": "matching.3"}
    gradient = {"evaluate.protocol": "gradient", "evaluate.images": 32, "evaluate.negatives": [16, 64],
                "evaluate.read": "plain.1.gradient_norm"}  # fmt: skip
    logged = {"evaluate.protocol": "training", "evaluate.read": "mutual_information_bound"}
    study = of_shapes(
        {**hardness, "evaluate.epoch": 0}, {**hardness, "evaluate.epoch": 2}, {**hardness, "evaluate.read": "proxy"},
        {**gradient, "evaluate.epoch": 2}, {**logged, "evaluate.epoch": 1}, logged,
        epochs=2, keep_epochs=[0], queue_size=64, bn_groups=1,
    )  # fmt: skip
    study = replace(study, runner=replace(study.runner, protocol={}))
    results = run_study(study, tmp_path, device="cpu")
    runs = {kept_of(tmp_path, results, cell)[1] for cell in range(6)}
    (run,) = runs
    ask = AnalysisRequest("shapes=128x16", CPU)
    first, last = ANALYSES["hardness"].measure(Run.open(run), ask, images=32)["checkpoints"]
    found = [cell["value"] for cell in results["cells"]]
    assert (first["epoch"], last["epoch"]) == (0, 2)
    assert found[:3] == [first["matching"][3], last["matching"][3], last["proxy"]]
    of_gradient = ANALYSES["gradient"].measure(Run.open(run), ask, images=32, negatives=[16, 64])["checkpoints"][-1]
    assert [row["gradient_norm"] for row in of_gradient["plain"] if row["negatives"] == 64] == [found[3]]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for epoch, value in ((1, found[4]), (2, found[5])):
        own = [line["mutual_information_bound"] for line in lines if line["epoch"] == epoch]
        assert own and value == pytest.approx(sum(own) / len(own))
    study = of_shapes({**logged, "evaluate.read": "nothing"}, epochs=2, keep_epochs=[0], queue_size=64, bn_groups=1)
    study = replace(study, runner=replace(study.runner, protocol={}))
    (cell,) = run_study(study, tmp_path / "wrong", store=tmp_path, device="cpu")["cells"]
    assert cell["value"] is None and "but the study reads nothing" in cell["told"]["0"]["failure"]


def test_a_rate_at_the_edge_of_the_scan_is_told():
    def told(chosen, *tried):
        return edge_of({"constants": {"lr": list(tried), "chosen_lr": chosen}})

    assert told(10.0, 0.3, 1.0, 10.0) == {"edge": 10.0} and told(0.3, 0.3, 1.0, 10.0) == {"edge": 0.3}
    assert told(1.0, 0.3, 1.0, 10.0) == told(30.0, 30.0) == edge_of({"value": {}}) == {}
