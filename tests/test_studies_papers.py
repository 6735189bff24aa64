"""The studies against the papers: tables as they are printed (tests/printed), and settings as the texts have them.

The files of tests/printed are cut out of the papers' texts. Where these lie in a folder UNITSPHERE_PAPERS, a test says
that every line of ours stands in them.
"""

import os
import re
from pathlib import Path

import pytest

from unitsphere.data.imagenet100 import CLASSES
from unitsphere.studies import STUDIES, find
from unitsphere.studies.msbreg import ACCURACIES

PRINTED = Path(__file__).with_name("printed")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
MIX = re.compile(r"\((\d+), (\d+), (\d+)\)")


def table(paper, name):
    """The lines of a printed table, each a list of its columns."""
    text = (PRINTED / f"{paper}.txt").read_text()
    (part,) = [part for part in text.split("## ") if part.startswith(name + "\n")]
    return [line.split("\t") for line in part.split("\n")[1:] if line.strip()]


def numbers(text):
    return [float(found) for found in NUMBER.findall(text)]


def papers(id):
    """Of a study: (place, the paper's number, its deviation, the settings that the cell resolves to)."""
    study = find(id)
    return [(cell.at, cell.paper, cell.deviation, study.job(cell, {}, 0).settings) for cell in study.cells]


def test_what_is_printed_stands_in_the_papers():
    folder = os.environ.get("UNITSPHERE_PAPERS")
    if not folder:
        pytest.skip("UNITSPHERE_PAPERS names no folder with the papers' texts")
    known = {line for path in Path(folder).glob("*.txt") for line in path.read_text().splitlines()}
    for path in PRINTED.glob("*.txt"):
        for line in path.read_text().splitlines():
            stands = line in known or any(line in other for other in known)
            assert line.startswith("## ") or not line.strip() or stands, line


NAMED = """jcl/figure-2a jcl/figure-2b jcl/figure-2c jcl/figure-3 jcl/memory
    eqco/figure-1 eqco/figure-2 eqco/figure-3a eqco/figure-3b eqco/figure-4
    eqco/table-1 eqco/table-2 eqco/table-3 eqco/table-4 eqco/table-5 eqco/table-6 eqco/table-7 eqco/table-8
    mochi/figure-1 mochi/figure-2a mochi/figure-2b mochi/figure-2c mochi/figure-3a mochi/figure-3b mochi/figure-3c
    mochi/figure-4 mochi/table-1a mochi/table-3 msbreg/table-3 msbreg/table-4 msbreg/table-5""".split()


def test_every_table_and_figure_has_its_study():
    assert set(NAMED) <= STUDIES.keys()
    assert all(STUDIES[id].claims and STUDIES[id].cells for id in NAMED)


# Numbers


@pytest.mark.parametrize("number, axis", [(1, "n"), (3, "alpha"), (4, "k"), (6, "momentum")])
def test_eqcos_tables_of_one_row(number, axis):
    head, row = table("eqco", f"Table {number}")
    expected = {float(place): float(value) for place, value in zip(head[1:], row[1:], strict=True)}
    assert {float(at[axis]): paper for at, paper, _, _ in papers(f"eqco/table-{number}")} == expected


def test_eqcos_table_2_and_what_each_row_trains():
    rows = [row for row in table("eqco", "Table 2")[1:] if row[0].startswith(("SiMo", "MoCo v2"))]
    found = papers("eqco/table-2")
    assert len(rows) == len(found) == 7
    for name, epochs, value in rows:
        weights = tuple(numbers(name)) if name.startswith("SiMo") else None
        (match,) = [
            (paper, settings)
            for at, paper, _, settings in found
            if settings["epochs"] == int(epochs) and ((at["k"], at["alpha"]) if "k" in at else None) == weights
        ]
        paper, settings = match
        assert paper == float(value) and settings["method"] == ("simo" if weights else "moco-v2")
        if weights:
            # of 255 others in a batch of 256, 256 are all there are
            assert settings["negatives"] == (16 if weights[0] == 16 else None) and settings["alpha"] == weights[1]


def test_eqcos_table_5():
    lines = table("eqco", "Table 5")
    found = {tuple(at.values()): paper for at, paper, _, _ in papers("eqco/table-5")}
    expected, mutual_information = {}, 0.0
    for name, *values in lines:
        if "Mutual" in name:
            mutual_information = numbers(name)[0]
            continue
        objective = "EqCo" if "EqCo" in name else "InfoNCE"
        expected |= {
            (mutual_information, objective, k): float(value)
            for k, value in zip((64, 128, 256, 512), values, strict=True)
        }
    assert found == expected and len(expected) == 40


def test_eqcos_tables_7_and_8():
    found = {at["norm"]: (paper, settings["bn_groups"]) for at, paper, _, settings in papers("eqco/table-7")}
    shuffled, synchronised = map(float, table("eqco", "Table 7")[1][1:])
    assert found == {"shuffled": (shuffled, 8), "synchronised": (synchronised, 1)}
    expected = {}
    for name, _, alpha, value in table("eqco", "Table 8")[1:]:
        expected[f"resnet50x{re.search(r'([24])x', name)[1]}", float(alpha)] = float(value)
    wide = {(s["backbone"], s["alpha"]): paper for at, paper, _, s in papers("eqco/table-8")}
    assert {place: paper for place, paper in wide.items() if place[0] != "resnet50"} == expected
    assert {alpha: paper for (name, alpha), paper in wide.items() if name == "resnet50"} == {256: 68.0, 65536: 68.5}


def test_eqcos_figures_have_the_numbers_that_text_and_tables_print():
    head, row = table("eqco", "Table 4")
    expected = {int(k): float(value) for k, value in zip(head[1:], row[1:], strict=True)}
    found = {at["k"]: paper for at, paper, _, s in papers("eqco/figure-3a") if paper is not None}
    assert found == expected
    assert all(s["alpha"] is None for _, paper, _, s in papers("eqco/figure-3a") if paper is not None)
    # "from 62.0% to 65.3%" with alpha 4096 (2.3); SiMo "(68.1% vs. 67.5%)" and Table 2
    of_3b = {(at["k"], at["alpha"]): paper for at, paper, _, _ in papers("eqco/figure-3b") if paper is not None}
    assert of_3b == {(256, 256): 62.0, (256, 4096): 65.3}
    of_4 = {(at["k"], at["alpha"]): paper for at, paper, _, _ in papers("eqco/figure-4") if paper is not None}
    assert of_4 == {(16, 256): 68.1, (256, 256): 68.0}


def rows_of_table_3():
    """(epochs, queue, oracle, (N, s, s') or None, "all queue", number, deviation) of the rows that are run here."""
    epochs, queue, oracle = 200, 16384, False
    for first, value, *_ in table("mochi", "Table 3")[1:]:
        if "epoch training" in first:
            epochs = int(numbers(first)[0])
        elif "Class Oracle" in first:
            oracle, queue = True, 16384
        elif re.search(r"K = (\d+)", first):
            queue = int(re.search(r"K = (\d+)", first)[1])
        if not value or "iMix" in first or "CMC" in first or first in ("MoCo [30]",):
            continue
        if epochs == 800 and queue != 16384:
            queue = 16384
        mix = MIX.search(first)
        own = re.search(r"\((\d+) epochs\)", first)
        mean, *deviation = numbers(value)
        kind = "supervised" if "supervised" in first else "MoCo" if first == "MoCo [30]*" else "MoCo v2"
        yield (
            int(own[1]) if own else 200 if kind == "supervised" else epochs, queue, oracle and kind != "supervised",
            tuple(map(int, mix.groups())) if mix else kind, "all queue" in first, mean, *(deviation or [None]),
        )  # fmt: skip


def test_mochis_table_3_row_by_row():
    expected = set(rows_of_table_3())
    found = set()
    for _, paper, deviation, settings in papers("mochi/table-3"):
        mix = tuple(settings.get(name, 0) for name in ("hardest", "pairs", "with_query"))
        name = {"moco-v1": "MoCo", "moco-v2": "MoCo v2", "supervised": "supervised"}.get(settings["method"])
        everything = settings["method"] == "mochi" and settings["hardest"] is None
        kind = name or ((1024, *mix[1:]) if everything else mix)
        epochs = settings.get("evaluate.epoch", settings["epochs"])
        queue = settings.get("queue_size", 16384)
        found.add((epochs, queue, settings.get("oracle", False), kind, everything, paper, deviation))
        assert settings.get("continued_at") == (200 if epochs > 200 else None)
        assert settings.get("bn_groups", 4) == 4
    assert found == expected and len(expected) > 35


def test_mochis_figures_3a_and_3b_show_the_numbers_of_table_3():
    known = {mix: value for e, q, oracle, mix, everything, value, _ in rows_of_table_3()
             if (e, q, oracle, everything) == (200, 16384, False, False)}  # fmt: skip
    for id, count in (("mochi/figure-3a", 11), ("mochi/figure-3b", 10)):
        shown = 0
        for _, paper, _, settings in papers(id):
            mix = tuple(settings.get(name, 0) for name in ("hardest", "pairs", "with_query"))
            assert paper == known.get("MoCo v2" if settings["method"] == "moco-v2" else mix)
            shown += paper is not None
        assert shown == count


def test_mochis_table_4_on_imagenet():
    expected, epochs = set(), 0
    for first, value, *_ in table("mochi", "Table 4")[2:]:
        if "epoch training" in first:
            epochs = int(numbers(first)[0])
        mix = MIX.search(first)
        if mix or first in ("MoCo-v2 [13]*", "MoCo-v2[13]*"):
            oracle = "MoCo-v2 [13] +" in first
            kind = tuple(map(int, mix.groups())) if mix else None
            expected.add((1000 if oracle else epochs, kind, oracle, float(value)))
    found = set()
    for _, paper, _, s in papers("mochi/table-4"):
        mix = None if s["method"] == "moco-v2" else (s["hardest"], s["pairs"], s["with_query"])
        found.add((s.get("evaluate.epoch", s["epochs"]), mix, s["oracle"], paper))
    assert found == expected and len(found) == 18


def test_msbregs_tables():
    expected = {}
    for row in table("msbreg", "Table 5")[1:]:
        for first in range(0, 12, 4):
            views, singular, brownian, value = map(float, row[first : first + 4])
            expected[views, singular, brownian] = value
    found = {tuple(at.values()): paper for at, paper, _, _ in papers("msbreg/table-5")}
    assert found == expected and len(expected) == 60 == sum(len(row) for rows in ACCURACIES.values() for row in rows)
    shown = [tuple(map(float, (value.lstrip("-"), alignment, uniformity)))
             for _, value, alignment, uniformity in table("msbreg", "Table 3")[1:]]  # fmt: skip
    values = [paper for _, paper, _, _ in papers("msbreg/table-3")]
    assert [tuple(values[first : first + 3]) for first in range(0, 12, 3)] == shown
    on_stl10 = [(row[1], float(row[2]), float(row[4])) for row in table("msbreg", "Table 4")[1:]]
    assert [(at["norm"], at["batch"], paper) for at, paper, _, _ in papers("msbreg/table-4")] == on_stl10


def test_the_classes_of_imagenet_100_are_those_that_both_papers_list():
    lists = [re.findall(r"n\d{8}", (PRINTED / f"{paper}.txt").read_text()) for paper in ("jcl", "mochi")]
    assert len(lists[0]) == 100 and sorted(lists[0]) == sorted(lists[1]) == sorted(CLASSES)
