"""Claims of the kind that most tables make: one number is above another."""

from __future__ import annotations

import math

from unitsphere.studies.study import Claim, Settings, Table

ROUNDING = 1e-9  # 68.0 - 67.5 is not quite 0.5


def above(statement: str, high: Settings, low: Settings, by: float = 0.0, *, papers: bool = False) -> Claim:
    """Claim that the value at one place is above that at another, or at least `by` above it. papers: so says the
    paper; otherwise `by` is named as ours."""
    return _compared(statement, high, low, by - ROUNDING if by else ROUNDING, "" if papers else named(by))


def no_worse(statement: str, high: Settings, low: Settings, within: float = 0.0, *, papers: bool = False) -> Claim:
    """Claim that the value at one place is not below that at another, or at most so far."""
    return _compared(statement, high, low, -within - ROUNDING, "" if papers else named(within))


def at_most(statement: str, place: Settings, most: float, ours: str = "") -> Claim:
    def check(table: Table) -> tuple[float, str]:
        (value,) = table.row(**place)
        return most - value + ROUNDING, f"{value:.2f}"

    return Claim(statement, check, ours)


def near(statement: str, one: Settings, other: Settings, within: float) -> Claim:
    """Claim that two values are within so many points of each other; how many is ours."""

    def check(table: Table) -> tuple[float, str]:
        (first,), (second,) = table.row(**one), table.row(**other)
        return within - abs(first - second) + ROUNDING, f"{first:.2f} and {second:.2f}"

    return Claim(statement, check, named(within))


def ratio(one: float, other: float) -> float:
    return one / other if other else math.inf


def named(margin: float) -> str:
    return f"{margin:g}" if margin else ""


def _compared(statement: str, high: Settings, low: Settings, border: float, ours: str) -> Claim:
    """Each place must be that of one cell."""

    def check(table: Table) -> tuple[float, str]:
        (upper,), (lower,) = table.row(**high), table.row(**low)
        digits = 2 if max(abs(upper), abs(lower)) >= 10 else 3  # percent, or something smaller
        return upper - lower - border, f"{upper:.{digits}f} and {lower:.{digits}f}"

    return Claim(statement, check, ours)
