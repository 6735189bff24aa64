"""Verdicts: how sure they are, what they are of, and those that are published."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.judge import judged
from unitsphere.studies import STUDIES, find
from unitsphere.studies.claims import above, no_worse
from unitsphere.studies.run import as_run, judge_claims
from unitsphere.studies.study import Cell, Claim, Table
from unitsphere.studies.verdicts import T_95, half_width, verdict

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
CELLS = [Cell({"x": 0}), Cell({"x": 1}), Cell({"x": 2}), Cell({"x": 3})]


def compared(values, claim=None):
    return (claim or above("", {"x": 1}, {"x": 0})).judge(Table(CELLS, values))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 12])
def test_an_interval_holds_the_expectation_19_times_in_20(count):
    """By drawing: 200,000 means of so many normal numbers. A share of 0.95 is known to 0.0005 then."""
    draws = np.random.default_rng(count).normal(size=(200_000, count))
    half = T_95[count - 2] * draws.std(1, ddof=1) / math.sqrt(count)
    assert (np.abs(draws.mean(1)) < half).mean() == pytest.approx(0.95, abs=0.002)
    assert half_width(list(draws[0])) == pytest.approx(half[0])


def test_the_quantiles_are_those_that_are_used_for_few_seeds():
    assert T_95[:4] == (12.71, 4.30, 3.18, 2.78) and list(T_95) == sorted(T_95, reverse=True)


def test_three_seeds_decide_what_is_4_30_standard_errors_away_and_not_what_is_two():
    """Gaps of deviation 1, so a standard error of 0.577: 2.48 is the border."""
    for gap, found in ((2.4, "undecided"), (2.6, "holds"), (-2.6, "does not hold")):
        values = [dict.fromkeys("012", 60.0), {"0": 59.0 + gap, "1": 60.0 + gap, "2": 61.0 + gap}, {}, {}]
        judged = compared(values)
        assert judged["verdict"] == found
        assert judged["evidence"].endswith(f"margin {gap:+.3g} ± 2.48 (95 %) over 3 seeds")


def test_two_cells_are_compared_seed_by_seed_with_the_seeds_that_both_have():
    values = [{"0": 60.0, "1": 70.0, "2": 10.0}, {"0": 61.0, "1": 71.01}, {"2": 10.1, "3": 0.0}, {}]
    judged = compared(values)  # gaps 1 and 1.01: of the means over all seeds it would be 19.3
    assert judged["verdict"] == "holds" and judged["evidence"].startswith("66.00 and 65.00; margin +1")
    alone = compared(values, above("", {"x": 2}, {"x": 0}))
    assert alone == {"statement": "", "verdict": "seen once", "evidence": "10.10 and 10.00"}
    assert compared(values, above("", {"x": 0}, {"x": 2}))["verdict"] == "not seen"
    for claim, reason in (
        (above("", {"x": 2}, {"x": 1}), "no seed has all the cells that it compares"),
        (above("", {"x": 3}, {"x": 0}), "x 3 has no value"),
        (above("", {"x": 0}, {"x": 3}), "x 3 has no value"),
    ):
        assert compared(values, claim) == {"statement": "", "verdict": "not measured", "evidence": reason}


def test_a_margin_shifts_the_border_and_is_named_as_ours():
    wide = [{"0": 60.0, "1": 70.0}, {"0": 61.0, "1": 71.02}, {}, {}]  # 1.01 ± 0.13
    for claim, found in (
        (above("", {"x": 1}, {"x": 0}, 0.8), "holds"),
        (above("", {"x": 1}, {"x": 0}, 1.0), "undecided"),
        (above("", {"x": 1}, {"x": 0}, 1.2), "does not hold"),
        (no_worse("", {"x": 0}, {"x": 1}, 1.2), "holds"),
    ):
        assert compared(wide, claim)["verdict"] == found
    assert above("a", {}, {}, 2.0).told == "a (the margin of 2 is ours)" and above("a", {}, {}).told == "a"
    assert above("a", {}, {}, 10.0, papers=True).told == "a"


def test_a_claim_of_another_kind_is_judged_seed_by_seed_too():
    claim = Claim("within 1", lambda table: (1.0 - (max(table.row()) - min(table.row())), "so"), "1")
    two = [Cell({"x": 0}), Cell({"x": 1})]
    near = Table(two, [{"0": 5.0, "1": 9.0}, {"0": 5.1, "1": 9.1}])
    assert claim.judge(near)["verdict"] == "holds"
    assert claim.judge(Table(two, [{"0": 5.0, "1": 9.0}, {"0": 5.1, "1": 12.0}]))["verdict"] == "undecided"
    assert verdict([0.5, None, 0.5]) == ("undecided", "")


NUMBERS = ("within", "at most", "at least", "less than", "more than", "point", "2 points", "collapses", "prevented")


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_every_margin_is_the_papers_or_named_as_ours(study):
    papers = {"drawn by a softmax (tau' 0.05): at least 10 points below as proposed",
              "drawn by a softmax (tau' 0.2): at least 10 points below as proposed"}  # fmt: skip
    for claim in study.claims:
        if claim.statement not in papers and any(words in claim.statement for words in NUMBERS):
            assert claim.ours and "ours" in claim.told, claim.statement


# What a study is of


def all_values(study):
    return [{"at": dict(cell.at), "values": {"0": float(number)}} for number, cell in enumerate(study.cells)]


def test_a_study_with_other_settings_gives_no_verdict_on_the_paper():
    study = find("eqco/table-3")
    (as_it_is,) = judge_claims(study, all_values(study), {}, [])
    (changed,) = judge_claims(study, all_values(study), {"data": "shapes", "epochs": 1}, ["data", "epochs"])
    assert as_it_is["verdict"] == "seen once" and changed["verdict"] == "not comparable with the paper"
    assert changed["evidence"].startswith("seen once with data=shapes, epochs=1: ")
    missing = [{**cell, "values": {}} for cell in all_values(study)]
    assert judge_claims(study, missing, {"epochs": 1}, ["epochs"])[0]["verdict"] == "not measured"
    shown = as_run(study, {"data": "shapes", "epochs": 1}, ["data", "epochs"])
    assert (
        shown.title.endswith("[run with data=shapes, epochs=1]")
        and shown.quantity == "top-1 of a linear classifier, % [on shapes]"
    )
    assert as_run(study, {}, []) is study


def test_a_study_may_declare_that_a_change_does_not_matter():
    study = find("jcl/cifar10")
    given = {"data": "cifar10.pack", "recipe": "cifar10"}
    assert set(given) == set(study.harmless)
    verdicts = {claim["verdict"] for claim in judge_claims(study, all_values(study), given, list(given))}
    assert verdicts <= {"seen once", "not seen"}
    given |= {"epochs": 1}
    verdicts = {claim["verdict"] for claim in judge_claims(study, all_values(study), given, list(given))}
    assert verdicts == {"not comparable with the paper"}


# What is published


STORED = ("eqco-table-5", "eqco-cifar10", "jcl-cifar10", "mochi-cifar10", "msbreg-cifar10", "msbreg-elsewhere")


@pytest.mark.parametrize("name", STORED)
def test_published_verdicts_are_those_of_the_published_numbers(name):
    """Judged again by today's claims, from the cells alone."""
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    assert stored["claims"] == judged(stored)
