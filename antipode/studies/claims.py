"""Claims of the kind that most tables make: one number is above another."""

from __future__ import annotations

from collections.abc import Callable

from antipode.studies.study import Claim, Settings, Table

ROUNDING = 1e-9  # 68.0 - 67.5 is not quite 0.5


def above(statement: str, high: Settings, low: Settings, by: float = 0.0) -> Claim:
    """That the value at one place is above that at another, or at least `by` above it."""
    return _compared(statement, high, low, lambda gap: gap > ROUNDING and gap >= by - ROUNDING)


def no_worse(statement: str, high: Settings, low: Settings, within: float = 0.0) -> Claim:
    """That the value at one place is not below that at another, or at most so far."""
    return _compared(statement, high, low, lambda gap: gap >= -within - ROUNDING)


def at_most(statement: str, place: Settings, most: float) -> Claim:
    def check(table: Table) -> tuple[bool, str]:
        (value,) = table.row(**place)
        return value <= most, f"{value:.2f}"

    return Claim(statement, check)


def _compared(statement: str, high: Settings, low: Settings, holds: Callable[[float], bool]) -> Claim:
    """Each place must be that of one cell."""

    def check(table: Table) -> tuple[bool, str]:
        (upper,), (lower,) = table.row(**high), table.row(**low)
        return holds(upper - lower), f"{upper:.2f} and {lower:.2f}"

    return Claim(statement, check)
