"""The papers' tables as data: settings, numbers, claims."""

import json
from collections import defaultdict

import pytest
from conftest import table_of

from unitsphere.studies import STUDIES, find
from unitsphere.studies.claims import above, no_worse
from unitsphere.studies.pretraining import Pretraining, name_of_run
from unitsphere.studies.study import Cell, shown


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_every_cell_of_every_study_resolves_to_settings_of_its_own(study):
    jobs = [study.job(cell, {}, 0) for cell in study.cells]
    assert len({job.address for job in jobs}) == len(jobs) == len({cell.label for cell in study.cells})
    assert all(json.loads(json.dumps(job.settings)) == job.settings for job in jobs)
    assert all(study.columns in cell.at for cell in study.cells)
    assert not any("," in shown(value) for cell in study.cells for value in cell.at.values())  # for --only


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_every_claim_can_be_judged_and_none_holds_whatever_the_numbers(study):
    """Also that the places which a claim speaks of are in the grid, one cell each."""
    ups, downs = ([sign * 50 * number for number, _ in enumerate(study.cells)] for sign in (1.0, -1.0))
    flat = [0.0 for _ in study.cells]
    for claim in study.claims:
        verdicts = {claim.judge(table_of(study.cells, values))["verdict"] for values in (ups, downs, flat)}
        allowed = {"seen once", "not seen"} | ({"undecided"} if "prevented" in claim.statement else set())
        assert verdicts <= allowed and "not seen" in verdicts, claim.statement


ALLOWS_EQUALITY = ("no worse", "no better", "within", "at most", "less than", "equal", "collapses", "does not help")


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_where_all_numbers_are_the_same_nothing_is_above_anything(study):
    """Only what is said to allow it may hold then."""
    table = table_of(study.cells, [10.0 for _ in study.cells])
    held = [claim.statement for claim in study.claims if claim.judge(table)["verdict"] == "seen once"]
    assert all(any(words in statement for words in ALLOWS_EQUALITY) for statement in held), held


@pytest.mark.parametrize("by, gap, holds", [(0.0, 0.0, False), (0.0, 0.01, True), (0.5, 0.5, True), (0.5, 0.49, False)])
def test_above_is_above_and_no_worse_may_be_equal(by, gap, holds):
    table = table_of([Cell({"x": 0}), Cell({"x": 1})], [67.5, 67.5 + gap])
    assert (above("", {"x": 1}, {"x": 0}, by).check(table)[0] > 0) is holds
    # turned round: the lower is no worse if it is within the gap, or nearer
    assert no_worse("", {"x": 0}, {"x": 1}, gap).check(table)[0] > 0
    assert no_worse("", {"x": 0}, {"x": 1}, gap - 0.001).check(table)[0] < 0


def test_studies_that_share_a_run_keep_what_any_of_them_looks_at():
    kept, looked_at = defaultdict(list), defaultdict(set)
    for study in STUDIES.values():
        for cell in study.cells if isinstance(study.runner, Pretraining) else ():
            fields, judging = study.runner.split({**cell.given, "seed": 0})
            name = name_of_run(fields)
            kept[name].append(set(fields.get("keep_epochs", ())))
            of_checkpoint = judging["protocol"] != "training" and judging.get("epoch") != fields.get("epochs", 200)
            looked_at[name] |= {judging["epoch"]} if "epoch" in judging and of_checkpoint else set()
    assert sum(map(len, looked_at.values())) > 5
    assert all(looked_at[name] <= epochs for name in kept for epochs in kept[name])


# Rounded to one decimal, the bound does not rise everywhere (below).
WHOLE = [s for s in STUDIES.values() if s.id != "eqco/table-5" and all(cell.paper is not None for cell in s.cells)]


@pytest.mark.parametrize("study", WHOLE, ids=lambda study: study.id)
def test_the_claims_hold_for_the_papers_own_numbers(study):
    papers = table_of(study.cells, [cell.paper for cell in study.cells])
    assert [claim.judge(papers)["verdict"] for claim in study.claims] == ["seen once"] * len(study.claims)


def number_of(study, **at):
    ((cell, value),) = table_of(study.cells, [cell.paper for cell in study.cells]).part(**at)
    return value, cell.deviation, study.job(cell, {}, 0).settings


def test_mochis_tables_have_the_papers_protocol():
    on_100, on_1000 = find("mochi/table-3"), find("mochi/table-4")
    best = {"hardest": 1024, "pairs": 1024, "with_query": 128, "queue": 16384}
    paper, deviation, settings = number_of(on_100, **best, oracle=False, epochs=200)
    assert (paper, deviation) == (79.0, 0.4)
    known = {"hardest": 1024, "pairs": 1024, "with_query": 128, "queue_size": 16384, "mixing_warmup": 10, "epochs": 200}
    assert known.items() <= settings.items() and settings["evaluate.recipe"] == "mochi-imagenet100"
    assert settings["base_lr"] * settings["batch_size"] / 256 == pytest.approx(0.03)  # at batches of 128
    early, _, at_100 = number_of(on_100, **best, oracle=False, epochs=100)
    assert early == 73.6 and at_100 == {**settings, "evaluate.epoch": 100}  # one run
    late, _, at_800 = number_of(on_100, **best, oracle=False, epochs=800)
    assert late == 84.5 and at_800 == {**settings, "epochs": 800, "continued_at": 200}
    long, _, oracle = number_of(on_100, **best, oracle=True, epochs=800)
    assert long == 85.2 and oracle == {**at_800, "oracle": True}
    paper, _, settings = number_of(on_1000, hardest=64, epochs=200)
    assert paper == 66.3 and settings["mixing_warmup"] == 15 and settings["evaluate.recipe"] == "mochi-imagenet"
    assert {cell.label for cell in find("mochi/table-1a").cells} < {cell.label for cell in on_100.cells}
    assert {cell.label for cell in find("mochi/table-1b").cells} < {cell.label for cell in on_1000.cells}


def test_msbregs_tables_have_the_papers_protocol():
    table_5 = find("msbreg/table-5")
    assert len(table_5.cells) == 60
    paper, _, settings = number_of(table_5, views=8, lambda_s=0.004, lambda_b=0.5)
    assert paper == 81.6 == max(cell.paper for cell in table_5.cells) and settings["epochs"] == 300
    weights = {"view_count": 8, "singular_weight": 0.004, "brownian_weight": 0.5}
    assert weights.items() <= settings.items() and settings["lr_per_view"] and settings["base_lr"] == 0.4
    paper, _, settings = number_of(find("msbreg/table-4"), method="BYOL", norm="LN", batch=1024)
    assert paper == 10.6 and settings["evaluate.data"] == "stl10" and settings["data"] == "stl10-unlabelled"
    assert settings["norm"] == settings["head_norm"] == "layer" and settings["brownian_weight"] == 0
    in_both = [number_of(find("msbreg/table-3"), method=m, judge="linear")[0] for m in ("BYOL", "MSBReg K=4")]
    assert in_both == [number_of(table_5, **at)[0] for at in (
        {"views": 2, "lambda_s": 0.0, "lambda_b": 0.0}, {"views": 4, "lambda_s": 0.004, "lambda_b": 0.5}
    )]  # fmt: skip


def test_jcls_ablations_have_the_supplements_settings():
    for study, varied in (
        ("jcl/figure-2a", "keys"),
        ("jcl/figure-2b", "variance_weight"),
        ("jcl/figure-2c", "temperature"),
    ):
        fixed = {"keys": 5, "variance_weight": 4.0, "temperature": 0.2, "backbone": "resnet18", "epochs": 100}
        del fixed[varied]
        found = [
            find(study).job(cell, {}, 0).settings for cell in find(study).cells if cell.at.get("method") != "vanilla"
        ]
        for settings in found:
            own = {"variance_weight": None} if settings["keys"] == 1 else {}  # one key has no variance
            assert {name: value for name, value in fixed.items() if name not in own}.items() <= settings.items()
        assert len({settings[varied] for settings in found}) == len(found)
        assert {settings["base_lr"] * settings["batch_size"] / 256 for settings in found} == {0.1}
