"""Claims of the kind that most tables make: one number is above another."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, stdev

from unitsphere.studies.study import Claim, Settings, Table

ROUNDING = 1e-9  # 68.0 - 67.5 is not quite 0.5
DECIDED = 2  # standard errors that a gap over several seeds must be away from what is claimed of it


def above(statement: str, high: Settings, low: Settings, by: float = 0.0) -> Claim:
    """That the value at one place is above that at another, or at least `by` above it."""
    return _compared(statement, high, low, by, lambda gap: gap > ROUNDING and gap >= by - ROUNDING)


def no_worse(statement: str, high: Settings, low: Settings, within: float = 0.0) -> Claim:
    """That the value at one place is not below that at another, or at most so far."""
    return _compared(statement, high, low, -within, lambda gap: gap >= -within - ROUNDING)


def at_most(statement: str, place: Settings, most: float) -> Claim:
    def check(table: Table) -> tuple[bool, str]:
        (value,) = table.row(**place)
        return value <= most, f"{value:.2f}"

    return Claim(statement, check)


def _compared(statement: str, high: Settings, low: Settings, border: float, holds: Callable[[float], bool]) -> Claim:
    """Each place must be that of one cell. Seeds that only one of them has are left out: the two runs of a seed begin
    with the same weights and images. A gap that the seeds place on either side of the border decides nothing."""

    def check(table: Table) -> tuple[bool | None, str]:
        pairs = table.pairs(high, low)
        upper, lower = map(fmean, zip(*pairs, strict=True))
        digits = 2 if max(abs(upper), abs(lower)) >= 10 else 3  # percent, or something smaller
        gap, evidence = upper - lower, f"{upper:.{digits}f} and {lower:.{digits}f}"
        if len(pairs) == 1:
            return holds(gap), evidence
        error = stdev(one - other for one, other in pairs) / len(pairs) ** 0.5
        evidence += f", {gap:+.{digits}f} with a standard error of {error:.{digits}f} over {len(pairs)} seeds"
        return None if abs(gap - border) < DECIDED * error else holds(gap), evidence

    return Claim(statement, check)
