"""What running a study would do, said before it starts: distinct runs, their settings, hours, missing data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unitsphere.studies.costs import missing
from unitsphere.studies.explaining import Line, in_one
from unitsphere.studies.kept import Kept
from unitsphere.studies.run import cells_alike, refuse_axes
from unitsphere.studies.study import Cell, Settings, Study, in_common, label


@dataclass(frozen=True)
class Row:
    """A run. place: what its cells have in common; settings: those in which the study's runs differ."""

    place: str
    cells: int
    settings: Mapping[str, str]
    hours: float | None


@dataclass(frozen=True)
class Plan:
    """common: the settings that all runs share; finished: how many of the cells, of `cells`, are kept already."""

    rows: Sequence[Row]
    common: Sequence[Line]
    missing: Sequence[str]
    finished: int
    cells: int

    @property
    def hours(self) -> float | None:
        known = [row.hours for row in self.rows if row.hours is not None]
        return sum(known) if len(known) == len(self.rows) else None


def settings_of(study: Study, cells: Sequence[Cell], given: Settings) -> list[Line]:
    """(name, value, where it comes from) of all settings; the values of a varied one are parted by ` | `."""
    return in_one([explained(study, cell, given) for cell in cells])


def explained(study: Study, cell: Cell, given: Settings) -> list[Line]:
    everything = {**cell.given, **study.taken(cell, given), "seed": 0}
    lines = study.runner.explain(everything)
    return [(name, value, "given" if name in (*given, "seed") else origin) for name, value, origin in lines]


def plan(
    study: Study, store: Path, *, seeds: Sequence[int], given: Settings, only: Mapping[str, Sequence[str]]
) -> Plan:
    """The runs of the chosen cells, as `run_study` would make them."""
    chosen = study.choose(only)
    refuse_axes(study, chosen, given)
    kept = Kept(store / "cells", study.runner)
    alike = [cell for cell in cells_alike(study, chosen, given) if cell in chosen]
    jobs = [study.job(cell, given, seed) for cell in alike for seed in seeds]
    rows: dict[str, list[Cell]] = {}
    for cell in alike:
        rows.setdefault(study.runner.row_of(study.job(cell, given, 0).given), []).append(cell)
    lines = settings_of(study, alike, given)
    differing = [name for name, value, _ in lines if " | " in value]
    found = [
        Row(
            label(in_common(cells)) or cells[0].label,
            len(cells),
            {name: value for name, value, _ in settings_of(study, cells, given) if name in differing},
            study.runner.hours(study.job(cells[0], given, 0).given),
        )
        for cells in rows.values()
    ]
    return Plan(
        rows=found,
        common=[line for line in lines if line[0] not in differing],
        missing=missing(name for job in jobs for name in study.runner.data(job.given, store)),
        finished=sum(kept.find(job) is not None for job in jobs),
        cells=len(jobs),
    )
