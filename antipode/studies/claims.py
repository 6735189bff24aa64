"""Claims of the kind that most tables make: one number is above another."""

from __future__ import annotations

from antipode.studies.study import Claim, Settings, Table

ROUNDING = 1e-9  # 68.0 - 67.5 is not quite 0.5


def above(statement: str, high: Settings, low: Settings, by: float = 0.0) -> Claim:
    """That the value at one place is at least `by` above that at another; `by` below 0: at most so far below it.
    Each place must be that of one cell."""

    def check(table: Table) -> tuple[bool, str]:
        (upper,), (lower,) = table.row(**high), table.row(**low)
        return upper - lower >= by - ROUNDING, f"{upper:.2f} and {lower:.2f}"

    return Claim(statement, check)


def at_least(statement: str, place: Settings, least: float) -> Claim:
    def check(table: Table) -> tuple[bool, str]:
        (value,) = table.row(**place)
        return value >= least, f"{value:.2f}"

    return Claim(statement, check)


def at_most(statement: str, place: Settings, most: float) -> Claim:
    def check(table: Table) -> tuple[bool, str]:
        (value,) = table.row(**place)
        return value <= most, f"{value:.2f}"

    return Claim(statement, check)
