"""From the margins by which a claim holds, a number for each seed, to a verdict with its uncertainty."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
SEEN, NOT_SEEN = "seen once", "not seen"  # of one seed: no more than that run's
NOT_MEASURED = "not measured"
NOT_COMPARABLE = "not comparable with the paper"
# Student's t: how many standard errors of a mean over 2, 3, ... seeds hold its expectation 95 % of the time. Two would
# do so for 82 % at 3 seeds.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)


def half_width(values: Sequence[float]) -> float:
    """Half of the interval that holds the expectation of `values` 95 % of the time; at least two of them."""
    freedom = len(values) - 1
    return T_95[min(freedom, len(T_95)) - 1] * stdev(values) / len(values) ** 0.5


def verdict(margins: Sequence[float | None]) -> tuple[str, str]:
    """The verdict, and in words how sure it is.

    margins: by how much the claim holds with each seed, zero or less where it does not; None where it does not apply.
    """
    known = [margin for margin in margins if margin is not None]
    if len(known) < len(margins):
        return UNDECIDED, ""
    mean = fmean(known)
    if len(known) == 1:
        return (SEEN if mean > 0 else NOT_SEEN), ""
    half = half_width(known)
    told = f"margin {mean:+.3g} ± {half:.3g} (95 %) over {len(known)} seeds"
    if abs(mean) < half:
        return UNDECIDED, told
    return (HOLDS if mean > 0 else FAILS), told
