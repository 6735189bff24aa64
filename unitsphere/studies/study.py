"""A study: a paper's table or figure as data. Its grid, the paper's numbers, its claims, and what computes a cell.

Nothing here imports torch, so that `unitsphere study list` answers at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from unitsphere.common.errors import check_word
from unitsphere.studies.verdicts import NOT_MEASURED, verdict

__all__ = ["Cell", "Claim", "Study"]

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One number of a table: where it stands, the settings that make it, and what the paper has there.

    `patch` lies over the runner's own settings; where it is left out, the place says it all. `deviation`: of the
    paper's number over its runs, where it is a mean and says so.
    """

    at: Settings
    paper: float | None = None
    patch: Settings | None = None
    deviation: float | None = None

    @property
    def given(self) -> Settings:
        return self.at if self.patch is None else self.patch

    @property
    def label(self) -> str:
        return label(self.at)


def label(at: Settings) -> str:
    """A place in the grid for people: `mutual_information 2, objective EqCo, k 64`."""
    return ", ".join(f"{axis} {shown(value)}" for axis, value in at.items())


def on_other(quantity: str, data: str) -> str:
    """What the numbers are, of other data than a study's own: `top-1, % [on shapes]` for `ImageNet top-1, %`."""
    for name in ("ImageNet-100 ", "ImageNet ", "STL-10 "):
        quantity = quantity.removeprefix(name)
    return f"{quantity} [on {data}]"


def in_common(cells: Sequence[Cell]) -> Settings:
    """The part of their places in which cells do not differ."""
    first, *others = (cell.at.items() for cell in cells)
    return dict(place for place in first if all(place in other for other in others))


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def spelt(text: str, known: Container[str]) -> str:
    """As values are shown: 4.0 is 4, 5e-3 is 0.005."""
    try:
        return text if text in known else shown(float(text))
    except ValueError:
        return text


class NotMeasured(Exception):
    """A claim asked for a value that is not there yet."""


class Table:
    """What a claim sees: the values measured at each place of the grid, one for each seed that is finished."""

    def __init__(self, cells: Sequence[Cell], values: Sequence[Mapping[str, float]]) -> None:
        self.cells = cells
        self.values = values

    def __iter__(self) -> Iterator[tuple[Cell, float]]:
        """(cell, mean over its seeds) of every cell, all of which must be there."""
        for cell, values in zip(self.cells, self.values, strict=True):
            if not values:
                raise NotMeasured(f"{cell.label} has no value")
            yield cell, fmean(values.values())

    def part(self, **at: Any) -> Table:
        """The cells at these values of some axes, in the order of the grid."""
        rows = [
            (cell, values)
            for cell, values in zip(self.cells, self.values, strict=True)
            if all(axis in cell.at and cell.at[axis] == wanted for axis, wanted in at.items())
        ]
        if not rows:
            raise KeyError(f"the grid has no cell at {at}")
        return Table([cell for cell, _ in rows], [values for _, values in rows])

    def seeds(self) -> list[str]:
        """All that some cell has a value of."""
        return list(dict.fromkeys(seed for values in self.values for seed in values))

    def with_seeds(self, seeds: Container[str]) -> Table:
        """The same cells with the values of these seeds alone."""
        kept = [{seed: value for seed, value in values.items() if seed in seeds} for values in self.values]
        return Table(self.cells, kept)

    def row(self, **at: Any) -> list[float]:
        """The values of a part of the grid."""
        return [value for _, value in self.part(**at)]

    def axis(self, name: str) -> list[Any]:
        """The values that an axis takes."""
        return list(dict.fromkeys(cell.at[name] for cell in self.cells if name in cell.at))


@dataclass(frozen=True)
class Claim:
    """A statement, and a small function of the table of one seed: by how much it holds (zero or less: it does not;
    None: it does not apply), and what shows it. ours: a margin in it that is not the paper's, such as `2`."""

    statement: str
    check: Callable[[Table], tuple[float | None, str]]
    ours: str = ""

    @property
    def told(self) -> str:
        return f"{self.statement} (the margin of {self.ours} is ours)" if self.ours else self.statement

    def judge(self, table: Table) -> dict[str, str]:
        """Seed by seed, with the seeds that have all cells which the claim compares: the runs of one seed begin with
        the same weights and images."""
        margins: dict[str, float | None] = {}
        for seed in table.seeds():
            with suppress(NotMeasured):
                margins[seed], _ = self.check(table.with_seeds((seed,)))
        try:
            _, evidence = self.check(table.with_seeds(margins) if margins else table)
            if not margins:
                raise NotMeasured("no seed has all the cells that it compares")
        except NotMeasured as missing:
            return {"statement": self.told, "verdict": NOT_MEASURED, "evidence": str(missing)}
        found, certainty = verdict(list(margins.values()))
        return {"statement": self.told, "verdict": found, "evidence": "; ".join(filter(None, (evidence, certainty)))}


@dataclass(frozen=True)
class Job:
    """A cell to compute: what was given, and the settings that its number depends on, whose hash is its address."""

    given: Settings
    settings: Settings
    address: str


@dataclass(frozen=True)
class Measured:
    """The number of a job, None where it has none (its run diverged), and what is worth keeping beside it."""

    job: Job
    value: float | None
    details: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Begun:
    """What is worked on now, the number-th of `of` runs: for those who wait hours for its first number."""

    number: int
    of: int
    jobs: Sequence[Job]  # the cells that are read off it


class Runner(Protocol):
    """What computes cells. `run` gives each number as soon as it has it, in any order: whatever was given is kept,
    so what a runner computes together is what an interruption can cost. What takes long it says before it begins."""

    @property
    def name(self) -> str: ...

    def resolve(self, given: Settings) -> Settings:
        """The settings that the number depends on, as plain JSON values, without those that have no effect beside the
        others. A mistake is a UsageError."""
        ...

    def settled(self, settings: Settings) -> Settings:
        """The same of settings that were kept with a number, also by a version that kept more of them."""
        ...

    def explain(self, given: Settings) -> Sequence[tuple[str, str, str]]:
        """Of every setting of a cell: its name, its value for people, and where it comes from."""
        ...

    def takes(self, given: Settings, name: str) -> bool:
        """Whether a cell with these settings has a setting of that name."""
        ...

    def run_of(self, given: Settings) -> str:
        """Names what has to be computed once for several cells, which therefore stay in one part of a study."""
        ...

    def row_of(self, given: Settings) -> str:
        """Names the run that a cell is measured on."""
        ...

    def hours(self, given: Settings) -> float | None:
        """About how many hours that run takes on one NVIDIA H200; None where nobody knows before it starts."""
        ...

    def data(self, given: Settings, store: Path) -> Sequence[str]:
        """The data sets that have to be there to compute a cell, as they are given."""
        ...

    def run(self, jobs: Sequence[Job], store: Path, device: str) -> Iterator[Measured | Begun]: ...


@dataclass(frozen=True)
class Study:
    """A table or figure of a paper."""

    id: str
    title: str
    paper: str
    needs: str  # what it takes to run: where, and how long
    quantity: str  # what the numbers are
    columns: str  # the axis that runs across the printed table
    runner: Runner
    cells: tuple[Cell, ...]
    claims: tuple[Claim, ...]
    over: str | None = None  # the axis that the lines of its figure run along; None: it is a table
    panels: tuple[str, ...] = ()  # axes whose values have a panel of their own in it
    lines: Callable[[Settings], Sequence[str]] | None = None  # those that a cell is a point of; default: by its place
    harmless: tuple[str, ...] = ()  # settings that may be changed and the claims still be those of `paper`
    scale: str | None = None  # of `--scale`; None: the paper's
    words: Mapping[str, str] = field(default_factory=dict)  # what the paper says of a setting, by its name

    def job(self, cell: Cell, given: Settings, seed: int) -> Job:
        """The cell's own settings, under what the user gave for all cells that have such."""
        everything = {**cell.given, **self.taken(cell, given), "seed": seed}
        settings = self.runner.resolve(everything)
        return Job(everything, settings, address(self.runner.name, settings))

    def taken(self, cell: Cell, given: Settings) -> Settings:
        """What of the settings given for all cells is for this one; those that no cell has are left to be refused."""
        return {
            name: value
            for name, value in given.items()
            if self.runner.takes({**cell.given, **given}, name)
            or not any(self.runner.takes({**other.given, **given}, name) for other in self.cells)
        }

    def choose(self, only: Mapping[str, Sequence[str]]) -> list[Cell]:
        """The cells whose places have one of these values, given as text, on each of these axes."""
        axes: dict[str, dict[str, None]] = {}
        for cell in self.cells:
            for axis, value in cell.at.items():
                axes.setdefault(axis, {})[shown(value)] = None
        wanted: dict[str, list[str]] = {}
        for axis, values in only.items():
            check_word("only", axis, axes)
            wanted[axis] = [spelt(value, axes[axis]) for value in values]
            for value in wanted[axis]:
                check_word(f"only {axis}", value, axes[axis])
        return [
            cell
            for cell in self.cells
            if all(axis in cell.at and shown(cell.at[axis]) in values for axis, values in wanted.items())
        ]


def address(runner: str, settings: Settings) -> str:
    """The same for the same settings on every machine, and for no others."""
    text = json.dumps({"runner": runner, **settings}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
