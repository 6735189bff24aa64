"""unitsphere study show --settings, and run --dry-run: what is printed before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unitsphere.studies.plan import Plan
    from unitsphere.studies.study import Study


def print_settings(lines: Sequence[tuple[str, str, str]], words: Mapping[str, str] | None = None) -> None:
    """A line a setting: name, value, where it comes from. words: what the paper says of some."""
    widths = [max((len(line[column]) for line in lines), default=0) for column in range(2)]
    for name, value, origin in lines:
        said = f'  "{words[name]}"' if words and name in words else ""
        print(f"{name:<{widths[0]}}  {value:<{min(widths[1], 40)}}  {origin}{said}")


def print_plan(study: Study, plan: Plan, seeds: Sequence[int]) -> None:
    """Runs with their settings and hours; missing data first."""
    for line in plan.missing:
        print(f"missing data: {line}")
    runs = len(plan.rows) * len(seeds)
    print(f"{runs} runs, {plan.cells} cells, of which {plan.finished} are finished already; needs {study.needs}")
    if plan.hours is not None:
        print(f"about {took(study, plan.hours * len(seeds))} to train them all")
    for row in plan.rows:
        own = "" if row.hours is None else f", about {took(study, row.hours)}"
        settings = "; ".join(f"{name} {value}" for name, value in row.settings.items())
        print(f"\n{row.place} ({row.cells} cell{'s' * (row.cells > 1)}{own})\n    {settings or 'as below'}")
    varied = {name for row in plan.rows for name in row.settings}
    print("\nall of them (where the paper says something of it, its words follow)")
    print_settings(plan.common, study.words)
    for name in sorted(varied & study.words.keys()):
        print(f'{name} differs  "{study.words[name]}"')


def took(study: Study, hours: float) -> str:
    return f"{hours:,.1f} hours of one NVIDIA H200" if study.scale is None else f"{60 * hours:,.0f} minutes on 2 cores"
