"""Running a study: what is finished is read, what is not is computed and kept, and the claims are judged.

OUT/results.json           cells (settings, value, the paper's value, what made them) and claims (statement, verdict,
                           evidence)
OUT/results.png            the figure, of a study that is one (drawn by the command)
STORE/cells/ADDRESS.json   one finished cell; the address is the hash of its settings
STORE/runs/ADDRESS/        a pre-training run that cells were measured on

STORE is OUT unless given; several studies, processes and machines may share one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from unitsphere.common.errors import UsageError
from unitsphere.common.files import refuse_unwritable, write_text
from unitsphere.common.version import __version__
from unitsphere.studies.costs import missing
from unitsphere.studies.kept import Kept, made_by, makers, told
from unitsphere.studies.study import Begun, Cell, Job, Settings, Study, Table, in_common, label, on_other, shown
from unitsphere.studies.verdicts import NOT_COMPARABLE, NOT_MEASURED

__all__ = ["run_study"]


def run_study(
    study: Study,
    out: Path,
    *,
    store: Path | None = None,
    seeds: Sequence[int] = (0,),
    given: Settings | None = None,
    only: Mapping[str, Sequence[str]] | None = None,
    part: tuple[int, int] = (1, 1),
    device: str = "auto",
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Compute the cells that are chosen and not finished, and return what is then known of the study (also written to
    OUT/results.json). given: settings for all cells; only: values on some axes; part (i, n): the i-th of n equal
    parts of the runs that the chosen cells are of. A cell's value is the mean over the seeds that are finished,
    beside which stands their deviation."""
    store = store or out
    given = given or {}
    seeds = list(dict.fromkeys(seeds))
    refuse_other_study(study, out)
    all_parts = study.choose(only or {})
    refuse_axes(study, all_parts, given)
    alike = cells_alike(study, all_parts, given)
    jobs = {cell.label: [study.job(cell, given, seed) for seed in seeds] for cell in alike}
    chosen = share(study, all_parts, jobs, *part)
    refuse_unwritable("out", out, out)
    refuse_unwritable("store", store, store / "cells")
    compute(study, [(cell, jobs[cell.label]) for cell in chosen], store, device, say)
    results = collect(study, Kept(store / "cells", study.runner), jobs, seeds, given)
    if len(versions := makers(results)) > 1:
        say(f"these cells were computed by {len(versions)} versions of unitsphere: {', '.join(versions)}")
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "results.json", json.dumps(results, indent=1) + "\n")
    return results


def compute(
    study: Study, jobs: Sequence[tuple[Cell, Sequence[Job]]], store: Path, device: str, say: Callable[[str], None]
) -> None:
    """What is not finished of these cells, saying before a run what it is of and after a number what it is."""
    from unitsphere.runs.account import commit

    kept = Kept(store / "cells", study.runner)
    places = {job.address: cell for cell, own in jobs for job in own}
    waiting = {job.address: job for _, own in jobs for job in own if kept.find(job) is None}
    say(f"{len(places) - len(waiting)} of {len(places)} cells are finished already, {len(waiting)} are to be computed")
    if kept.unreadable:
        say(f"{kept.unreadable} cells of {kept.folder} are of an older version, whose settings are not known any more")
    if lacking := missing(name for job in waiting.values() for name in study.runner.data(job.given, store)):
        raise UsageError("\n".join(f"data: {line}" for line in lacking))
    several = any(len(own) > 1 for _, own in jobs)
    maker = {"unitsphere": __version__, "commit": commit()}  # before hours in which the checkout may move on
    number, began = 0, time.monotonic()
    for event in study.runner.run(list(waiting.values()), store, device):
        if isinstance(event, Begun):
            of_all = in_common([places[job.address] for job in event.jobs])
            left = minutes_left(event, (time.monotonic() - began) / 60)
            say(f"run {event.number} of {event.of}{left}: {label({**of_all, 'seed': event.jobs[0].given['seed']})}")
            continue
        number += 1
        kept.keep(event, maker)
        where = places[event.job.address].label + (f", seed {event.job.given['seed']}" if several else "")
        found = event.details.get("failure") if event.value is None else f"{event.value:.2f}"
        say(f"{number}/{len(waiting)}  {where}: {found}")


def minutes_left(run: Begun, passed: float) -> str:
    """If the runs to come take as long as those before; nothing of the first, or under a minute."""
    left = passed / (run.number - 1) * (run.of - run.number + 1) if run.number > 1 else 0.0
    return f", about {left:.0f} minutes left" if left >= 1 else ""


def refuse_other_study(study: Study, out: Path) -> None:
    path = out / "results.json"
    if path.is_file():
        other = json.loads(path.read_text())
        name = other.get("study") if isinstance(other, dict) else "a run"
        if name != study.id:
            raise UsageError(
                f"out: {out} holds the results of {name}. Use another --out; --store shares finished cells."
            )


def refuse_axes(study: Study, chosen: Sequence[Cell], given: Settings) -> None:
    """What the chosen cells differ in cannot be the same in all of them."""
    for name in given:
        if name == "seed":
            raise UsageError("set: seeds are given with --seeds.")
        groups = by_value(study, chosen, name)
        if len(groups) > 1:
            found = "; ".join(f"{value} at {described(cells)}" for value, cells in groups.items())
            raise UsageError(
                f"set: {name} is what the study varies: it is {found}. Choose cells that have the same with --only."
            )


def by_value(study: Study, cells: Sequence[Cell], name: str) -> dict[str, list[Cell]]:
    """The cells that have a setting, by what it is in them; none where the grid does not speak of it."""
    found: dict[str, list[Cell]] = {}
    if any(name in cell.given for cell in study.cells):
        for cell in cells:
            if study.runner.takes(cell.given, name):
                settings = {**study.job(cell, {}, 0).settings, **cell.given}
                found.setdefault(shown(settings.get(name)), []).append(cell)
    return found


def described(cells: Sequence[Cell]) -> str:
    return cells[0].label + (f" and {len(cells) - 1} more" if len(cells) > 1 else "")


def cells_alike(study: Study, chosen: Sequence[Cell], given: Settings) -> list[Cell]:
    """The cells that stand in one table with the chosen ones when these settings are given: those that differ from
    them in nothing given. Given the same, others would become their doubles, under names that are wrong then."""
    known = {name: by_value(study, chosen, name).keys() for name in given}
    return [
        cell
        for cell in study.cells
        if all(by_value(study, [cell], name).keys() <= values for name, values in known.items() if values)
    ]


def altered(study: Study, cells: Sequence[Cell], given: Settings) -> list[str]:
    """Which of the settings given make a cell another than the paper's: not the folder of its images, say."""
    both = [(study.job(cell, {}, 0).settings, study.job(cell, given, 0).settings) for cell in cells]
    return [name for name in given if any(own.get(name) != made.get(name) for own, made in both)]


def remark(results: Mapping[str, Any]) -> str:
    """What keeps the numbers from passing for the paper's, if anything does."""
    given = ", ".join(f"{name}={results['given'][name]}" for name in results["altered"])
    return given and f"Not the study's own settings, and not the paper's: {given}"


def share(
    study: Study, cells: Sequence[Cell], jobs: Mapping[str, Sequence[Job]], part: int, parts: int
) -> Sequence[Cell]:
    """All cells of the runs of this part, so that two machines never train one run."""
    runs: dict[str, list[Cell]] = {}
    for cell in cells:
        runs.setdefault(study.runner.run_of(jobs[cell.label][0].given), []).append(cell)
    shared = list(runs.values())
    return list(chain.from_iterable(shared[len(shared) * (part - 1) // parts : len(shared) * part // parts]))


def collect(
    study: Study, store: Kept, jobs: Mapping[str, Sequence[Job]], seeds: Sequence[int], given: Settings
) -> dict[str, Any]:
    """Everything known of a study, by this process or another. Cells without jobs have no value here."""
    from unitsphere.runs.account import now

    cells = []
    for cell in study.cells:
        own = jobs.get(cell.label, [])
        found = dict.fromkeys(map(str, seeds)) | {str(job.given["seed"]): store.find(job) for job in own}
        values = [kept["value"] for kept in found.values() if kept and kept["value"] is not None]
        settings = {name: value for job in own[:1] for name, value in job.settings.items() if name != "seed"}
        cells.append(
            {
                "at": dict(cell.at),
                "value": fmean(values) if values else None,
                "deviation": stdev(values) if len(values) > 1 else None,
                "paper": cell.paper,
                "paper_deviation": cell.deviation,
                "values": {seed: kept and kept["value"] for seed, kept in found.items()},
                "told": {seed: kept and told(kept) for seed, kept in found.items()},
                "made_by": {seed: kept and made_by(kept) for seed, kept in found.items()},
                "addresses": [job.address for job in own],
                "settings": settings,
            }
        )
    changed = altered(study, [cell for cell in study.cells if cell.label in jobs], given)
    shown_as = as_run(study, given, changed)
    return {
        "study": study.id,
        "title": shown_as.title,
        "paper": study.paper,
        "quantity": shown_as.quantity,
        "given": dict(given),
        "altered": changed,
        "seeds": list(seeds),
        "cells": cells,
        "claims": judge_claims(study, cells, given, changed),
        "unitsphere": __version__,
        "time": now(),
    }


def judge_claims(
    study: Study, cells: Sequence[Mapping[str, Any]], given: Settings, changed: Sequence[str]
) -> list[dict[str, str]]:
    """The verdicts on the cells of a results.json. With settings that the study does not call harmless a number says
    nothing of the paper: what was found with them stands in the evidence."""
    values = [{seed: float(v) for seed, v in cell["values"].items() if v is not None} for cell in cells]
    judged = [claim.judge(Table(study.cells, values)) for claim in study.claims]
    if study.scale is not None:
        judged = [{**claim, "verdict": at_this_scale(claim["verdict"], study.scale)} for claim in judged]
    if not (strange := [name for name in changed if name not in study.harmless]):
        return judged
    others = ", ".join(f"{name}={given[name]}" for name in strange)
    return [
        claim
        if claim["verdict"] == NOT_MEASURED
        else {**claim, "verdict": NOT_COMPARABLE, "evidence": f"{claim['verdict']} with {others}: {claim['evidence']}"}
        for claim in judged
    ]


def at_this_scale(verdict: str, scale: str) -> str:
    return verdict if verdict == NOT_MEASURED else f"{verdict} at scale {scale}"


def as_run(study: Study, given: Settings, changed: Sequence[str]) -> Study:
    """The study with a title and a quantity that say which settings it was run with."""
    if not changed:
        return study
    others = ", ".join(f"{name}={given[name]}" for name in changed)
    data = next((str(given[name]) for name in ("evaluate.data", "data") if name in changed), "")
    quantity = on_other(study.quantity, data) if data else study.quantity
    return replace(study, title=f"{study.title} [run with {others}]", quantity=quantity)
