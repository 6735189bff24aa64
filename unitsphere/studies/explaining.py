"""Where each setting of a cell comes from, for people: `unitsphere study show ID --settings`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from unitsphere.config.config import INCIDENTAL
from unitsphere.methods.resolve import Resolved
from unitsphere.studies.study import Settings

Line = tuple[str, str, str]  # name, value, where it comes from
PREFIX = "evaluate."


def of_run(resolved: Resolved, given: Settings) -> Iterator[Line]:
    """The fields of a run, but for those that change only how it is carried out. given: those of the cell."""
    config = resolved.config
    for name, origin in resolved.origins.items():
        if name in INCIDENTAL - {"keep_epochs"} or resolved.why_unused(name):
            continue
        value = text(getattr(config, name))
        if name in ("base_lr", "lr") and getattr(config, name) is not None:
            value += f" ({config.learning_rate:g} at a batch of {config.batch_size})"
        yield name, value, place(name, given) if origin == "study" else origin


def of_judging(judging: Mapping[str, Any], given: Settings) -> Iterator[Line]:
    """How the run is judged, with what the named recipe says."""
    for name, value in judging.items():
        yield PREFIX + name, text(value), place(PREFIX + name, given)
    if judging.get("protocol") == "linear":
        from unitsphere.evaluation.recipes import LINEAR_RECIPES

        recipe = judging.get("recipe", "moco")
        for name, value in asdict(LINEAR_RECIPES[recipe]).items():
            if name not in judging:
                yield PREFIX + name, text(value), f"recipe {recipe}"


def place(name: str, given: Settings) -> str:
    return "this cell" if name in given else "the study"


def text(value: Any) -> str:
    """Tuples as lists and numbers as short as they are exact: (10.0,) is 10."""
    if isinstance(value, list | tuple):
        return ",".join(map(text, value)) or "none"
    return "none" if value is None else f"{value:.12g}" if isinstance(value, float) else str(value)


def in_one(lines: list[list[Line]]) -> list[Line]:
    """The settings of several cells in one list: where they differ, the values that there are."""
    names = list(dict.fromkeys(name for own in lines for name, _, _ in own))
    by_cell = [{name: (value, origin) for name, value, origin in own} for own in lines]
    found = []
    for name in names:
        each = [own.get(name, ("(without effect)", "")) for own in by_cell]
        values, origins = (list(dict.fromkeys(part for part in parts if part)) for parts in zip(*each, strict=True))
        found.append((name, " | ".join(values), ", ".join(origins)))
    return found
