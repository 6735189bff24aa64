"""What the machinery of studies keeps, skips, compares and refuses."""

import json
import math

import pytest
import torch

import unitsphere
from unitsphere.cli import main
from unitsphere.cli.study import print_table
from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.runs.account import commit
from unitsphere.studies import STUDIES
from unitsphere.studies.figure import draw
from unitsphere.studies.run import altered, cells_alike, minutes_left, refuse_axes, run_study
from unitsphere.studies.study import Begun, Cell, Claim, Measured, Study


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


class Sums:
    """Adds a, b and the seed, and remembers what it was asked to add."""

    name = "sums"

    def __init__(self):
        self.asked = []

    def resolve(self, given):
        return {"a": given["a"], "b": given.get("b", 0), "seed": given["seed"]}

    def settled(self, settings):
        return self.resolve(settings)

    def takes(self, given, name):
        return True

    def run_of(self, given):
        return str(self.resolve(given))

    def data(self, given, store):
        return ()

    def run(self, jobs, store, device):
        for job in jobs:
            self.asked.append(dict(job.settings))
            if job.settings["a"] == 13:
                raise UnitsphereError("unlucky")
            yield Measured(job, float(sum(job.settings.values())))


def rises(table):
    values = table.row(b=0)
    return values == sorted(values), f"{values}"


def sums(cells=None) -> Study:
    cells = cells or tuple(Cell({"a": a, "b": b}, paper=a + b) for a in (1, 2, 3) for b in (0, 10))
    claims = (Claim("it rises with a", rises),)
    return Study("test/sums", "sums", "nobody", "nothing", "a sum", "b", Sums(), cells, claims)


def test_a_study_writes_cells_and_claims(tmp_path):
    results = run_study(sums(), tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == results
    first = results["cells"][0]
    assert first["settings"] == {"a": 1, "b": 0} and first["value"] == 1.0 and first["paper"] == 1
    assert results["claims"] == [
        {"statement": "it rises with a", "verdict": "seen once", "evidence": "[1.0, 2.0, 3.0]"}
    ]
    kept = json.loads((tmp_path / "cells" / f"{first['addresses'][0]}.json").read_text())
    assert kept["settings"] == {"a": 1, "b": 0, "seed": 0} and kept["value"] == 1.0


def test_finished_cells_are_not_computed_again(tmp_path):
    said = []
    run_study(sums(), tmp_path)
    again = sums()
    results = run_study(again, tmp_path, say=said.append)
    assert again.runner.asked == [] and said == ["6 of 6 cells are finished already, 0 are to be computed"]
    assert [cell["value"] for cell in results["cells"]] == [1, 11, 2, 12, 3, 13]


def test_what_was_computed_before_a_failure_is_kept(tmp_path):
    cells = tuple(Cell({"a": a, "b": 0}) for a in (1, 2, 13, 4))
    with pytest.raises(UnitsphereError, match="unlucky"):
        run_study(sums(cells), tmp_path)
    again = sums(cells[:2] + cells[3:])
    run_study(again, tmp_path)
    assert [job["a"] for job in again.runner.asked] == [4]


def test_parts_are_disjoint_and_together_whole(tmp_path):
    parts = [sums() for _ in range(4)]
    for number, study in enumerate(parts, 1):
        results = run_study(study, tmp_path, part=(number, 4))
        assert (results["claims"][0]["verdict"] == "not measured") == (number < 4)
    asked = [tuple(job.values()) for study in parts for job in study.runner.asked]
    assert len(asked) == len(set(asked)) == 6 and all(study.runner.asked for study in parts)
    assert all(cell["value"] is not None for cell in results["cells"])


def test_cells_of_one_run_are_never_in_two_parts(tmp_path):
    parts = [sums() for _ in range(2)]
    for number, study in enumerate(parts, 1):
        study.runner.run_of = lambda given: str(given["a"])  # three runs, of two cells each
        run_study(study, tmp_path, part=(number, 2))
    first, second = ({job["a"] for job in study.runner.asked} for study in parts)
    assert first == {1} and second == {2, 3} and [len(study.runner.asked) for study in parts] == [2, 4]


def test_what_made_a_cell_is_kept_and_told_when_it_was_not_the_same(tmp_path):
    said = []
    first = run_study(sums(), tmp_path, say=said.append)
    made_by = [cell["made_by"]["0"] for cell in first["cells"]]
    assert made_by[0] == {"unitsphere": unitsphere.__version__, "commit": commit()} and len(said) == 7
    path = tmp_path / "cells" / f"{first['cells'][2]['addresses'][0]}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"unitsphere": "0.0.1", "commit": None}))
    again = run_study(sums(), tmp_path, say=said.append)
    assert again["cells"][2]["made_by"]["0"] == {"unitsphere": "0.0.1", "commit": None}
    assert "2 versions of unitsphere: 0.0.1, " in said[-1] and unitsphere.__version__ in said[-1]
    missing = run_study(sums(), tmp_path, seeds=[1], part=(1, 6))["cells"]
    assert missing[0]["made_by"]["1"] == made_by[0] and missing[1]["made_by"] == {"1": None}


def test_a_cell_was_made_by_the_commit_that_the_study_began_with(tmp_path, monkeypatch):
    """A checkout may move on while a study runs for hours: the code in memory does not."""
    commits = iter(["the first", "a later one", "another"])
    monkeypatch.setattr("unitsphere.runs.account.commit", lambda: next(commits))
    made = {cell["made_by"]["0"]["commit"] for cell in run_study(sums(), tmp_path)["cells"]}
    assert made == {"the first"}


def test_cells_with_the_same_settings_are_computed_once_and_shared_between_studies(tmp_path):
    twice = sums((Cell({"row": "x", "b": 0}, patch={"a": 5}), Cell({"row": "y", "b": 0}, patch={"a": 5, "b": 0})))
    results = run_study(twice, tmp_path / "one", store=tmp_path)
    assert len(twice.runner.asked) == 1 and [cell["value"] for cell in results["cells"]] == [5, 5]
    other = sums((Cell({"a": 5, "b": 0}), Cell({"a": 6, "b": 0})))
    run_study(other, tmp_path / "two", store=tmp_path)
    assert [job["a"] for job in other.runner.asked] == [6]


def test_the_value_of_a_cell_is_the_mean_over_its_seeds(tmp_path):
    run_study(sums(), tmp_path, seeds=[1])
    study = sums()
    results = run_study(study, tmp_path, seeds=[1, 2, 6, 1])
    assert len(study.runner.asked) == 12
    assert results["cells"][0]["values"] == {"1": 2.0, "2": 3.0, "6": 7.0} and results["cells"][0]["value"] == 4.0
    assert results["cells"][0]["deviation"] == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert run_study(sums(), tmp_path, seeds=[1])["cells"][0]["deviation"] is None


def test_a_cell_that_has_not_all_seeds_yet_is_the_mean_of_those_it_has(tmp_path):
    study = sums()
    run_study(study, tmp_path, seeds=[1, 3], only={"b": ["0"]})
    results = run_study(study, tmp_path, seeds=[1], only={"a": ["1"]})
    assert results["cells"][1]["value"] == 12.0
    first, second, third, *_ = run_study(study, tmp_path, seeds=[1, 3], only={"a": ["2"], "b": ["0"]})["cells"]
    assert (first["value"], first["values"]) == (3.0, {"1": 2.0, "3": 4.0})
    assert (second["value"], second["deviation"], second["values"]) == (12.0, None, {"1": 12.0, "3": None})
    assert third["deviation"] == pytest.approx(math.sqrt(2))


def test_only_chooses_by_place_and_a_setting_holds_for_all_cells(tmp_path):
    study = sums(tuple(Cell({"a": a, "b": 0}, patch={"a": a}) for a in (1, 2, 3)))
    run_study(study, tmp_path, only={"a": ["2", "3"]}, given={"b": 100})
    assert study.runner.asked == [{"a": 2, "b": 100, "seed": 0}, {"a": 3, "b": 100, "seed": 0}]
    assert study.choose({"a": ["2.0", "3e0"]}) == study.choose({"a": ["2", "3"]})
    with pytest.raises(UsageError, match="only a: '4' is not known"):
        run_study(study, tmp_path, only={"a": ["4"]})
    with pytest.raises(UsageError, match="a is what the study varies: it is 1 at a 1, b 0; 2 at a 2"):
        run_study(study, tmp_path, given={"a": 2})
    with pytest.raises(UsageError, match="--seeds"):
        run_study(study, tmp_path, given={"seed": 2})


def test_a_setting_that_the_chosen_cells_have_in_common_can_be_given(tmp_path):
    twice = {"a": 1, "b": 7}
    study = sums(tuple(Cell({"row": r, "b": 0}, patch=p) for r, p in (("x", {"a": 1}), ("y", {"a": 5}), ("z", twice))))
    with pytest.raises(UsageError, match=r"b is .* varies: it is 0 at row x, b 0 and 1 more; 7 at row z, b 0\."):
        run_study(study, tmp_path, given={"b": 100})
    given = {"a": 1, "b": 100}
    found = {}
    for row in "xz":
        results = run_study(study, tmp_path, only={"row": [row]}, given=given)
        found[row] = [cell["value"] for cell in results["cells"]]
        assert results["altered"] == ["b"]  # a is 1 in both
    # x and z become the same cell, and y is another one: none of them has the value of what was chosen
    assert found == {"x": [101, None, None], "z": [None, None, 101]} and len(study.runner.asked) == 1
    assert (results["cells"][0]["settings"], results["cells"][0]["addresses"]) == ({}, [])
    for id, only, cells in (
        ("msbreg/cifar10", {"method": ["BYOL"]}, 6 * 4),  # of 16 methods, 10 are trained for 12 or 6 epochs
        ("mochi/table-1a", {"epochs": ["200"]}, 8),  # which some cells say and some leave to the study
    ):
        chosen = STUDIES[id].choose(only)
        refuse_axes(STUDIES[id], chosen, {"epochs": 1})
        alike = cells_alike(STUDIES[id], chosen, {"epochs": 1})
        assert len(alike) == cells and {cell.label for cell in alike} >= {cell.label for cell in chosen}


def test_how_runs_are_judged_is_said_of_the_cells_whose_protocol_knows_it():
    study = STUDIES["msbreg/table-3"]
    refuse_axes(study, study.cells, {"evaluate.epochs": 2})
    for cell in study.cells:
        settings = study.job(cell, {"evaluate.epochs": 2}, 0).settings
        assert settings.get("evaluate.epochs") == (2 if cell.at["judge"] == "linear" else None)
    grid = STUDIES["eqco/cifar10"]
    refuse_axes(grid, grid.cells, {"evaluate.epochs": 2})  # the same in all cells that have it: not varied
    with pytest.raises(UsageError, match="read is what the study varies"):
        refuse_axes(study, study.cells, {"evaluate.read": "top1"})
    with pytest.raises(UsageError, match="alpha is what the study varies"):
        refuse_axes(grid, grid.cells, {"alpha": 1})
    with pytest.raises(UsageError, match="nothing' is not known"):
        study.job(study.cells[0], {"evaluate.nothing": 1}, 0)


def test_a_study_with_other_settings_does_not_pass_for_the_papers(tmp_path, monkeypatch, capsys):
    study = STUDIES["eqco/table-3"]
    assert altered(study, study.cells, {"data": "imagenet=/data/imagenet", "workers": 3}) == []
    assert altered(study, study.cells, {"data": "shapes", "epochs": 1, "device": "cpu"}) == ["data", "epochs"]
    quick = "--only k=64 --only mutual_information=2 --set steps=2 --set evaluations=2".split()
    figures = []
    monkeypatch.setattr("unitsphere.studies.figure.draw", lambda *given: figures.append(draw(*given)) or figures[-1])
    assert main(["study", "run", "eqco/table-5", "--out", str(tmp_path), *quick]) == 0
    said = "Not the study's own settings, and not the paper's: steps=2, evaluations=2"
    assert said in capsys.readouterr().out and figures[0].get_suptitle() == said


def test_what_is_refused_leaves_no_folder(tmp_path):
    with pytest.raises(UsageError):
        run_study(sums(), tmp_path / "out", only={"a": ["4"]})
    for cells in ((Cell({"a": 13, "b": 0}),), (Cell({"a": 13, "b": 0}), Cell({"a": 1, "b": 0}))):
        with pytest.raises(UnitsphereError, match="unlucky"):
            run_study(sums(cells), tmp_path / "out", store=tmp_path / "store")
    assert not list(tmp_path.iterdir())


def test_a_claim_that_fails_says_so(tmp_path):
    study = sums(tuple(Cell({"a": a, "b": 0}) for a in (3, 1)))
    (claim,) = run_study(study, tmp_path)["claims"]
    assert claim["verdict"] == "not seen" and claim["evidence"] == "[3.0, 1.0]"


def test_the_folder_of_another_study_is_refused(tmp_path):
    (tmp_path / "results.json").write_text('{"study": "eqco/table-5"}')
    with pytest.raises(UsageError, match="holds the results of eqco/table-5"):
        run_study(sums(), tmp_path)
    (tmp_path / "file").write_text("")
    study = sums()
    for out, store in ((tmp_path / "file" / "out", tmp_path), (tmp_path / "out", tmp_path / "file")):
        with pytest.raises(UsageError, match=r"(out|store): .* cannot be written: .*file is no folder"):
            run_study(study, out, store=store)
    assert study.runner.asked == []  # said before the work


def test_the_row_of_a_run_that_diverged_is_not_left_out(capsys):
    study = sums()
    told = {0: None, 1: None, 2: {"failure": "the loss became nan"}, 3: None, 4: None, 5: {}}
    cells = [{"value": 7.0 if n == 5 else None, "deviation": None, "values": {"0": 7.0 if n == 5 else None},
              "told": {"0": told[n]}} for n in range(6)]  # fmt: skip
    print_table(study, cells)
    table = capsys.readouterr().out
    assert [line.split() for line in table.splitlines()[2:]] == [
        ["2", "-", "-", "2", "12"],
        ["3", "-", "7.00", "3", "13"],
        "1 of 3 rows are left out: nothing of them is computed yet".split(),
    ]


def test_the_time_left_follows_from_the_runs_before():
    assert minutes_left(Begun(1, 10, ()), 0.0) == "" and minutes_left(Begun(2, 3, ()), 0.2) == ""
    assert minutes_left(Begun(3, 10, ()), 4.0) == ", about 16 minutes left"
