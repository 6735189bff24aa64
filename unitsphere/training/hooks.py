"""Functions of a user's own that a run calls: `on_step` after each step and `on_epoch` after each epoch.

A hook gets a record, a dict of plain numbers, and may return a mapping of names to numbers, which become metrics of the
run. It stops the run by raising or returning `StopTraining`. Hooks are called on the first rank only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from unitsphere.common.errors import UnitsphereError

__all__ = ["StopTraining"]


class StopTraining(Exception):
    """Stop the run from within `on_step` or `on_epoch`: raise it, or return it.

    The run is saved and ends as it does on Ctrl-C; --resume goes on from there. After the last step it changes nothing.

        def on_epoch(record):
            if record["loss"] < 0.1:
                raise unitsphere.StopTraining
    """


class HookFailed(UnitsphereError):
    """A hook raised an error of its own, or returned something else than metrics."""

    of_all = True


Hook = Callable[[dict[str, Any]], Mapping[str, Any] | type[StopTraining] | StopTraining | None]


class Hooks:
    """The hooks of a run and what they asked for."""

    def __init__(self, on_step: Hook | None = None, on_epoch: Hook | None = None) -> None:
        self.on_step = on_step
        self.on_epoch = on_epoch
        self.stop = False  # a hook asked for it
        self.error: Exception | None = None  # the first that a hook raised
        self.failed = ""  # the name of that hook

    def call(self, name: str, record: Mapping[str, Any], taken: Collection[str] = ()) -> dict[str, float]:
        """Call the hook of this name with `record` and return the metrics that it adds; they bear none of the names in
        `record` or `taken`. An error is kept: the run is saved first, and ends after that."""
        hook: Hook | None = getattr(self, name)
        if hook is None or self.error is not None:
            return {}
        try:
            given = hook(dict(record))
            if given is StopTraining or isinstance(given, StopTraining):
                raise StopTraining
            return metrics_of(given, {*record, *taken})
        except StopTraining:
            self.stop = True
        except Exception as error:
            self.error, self.failed = error, name
        return {}

    def failure(self, step: int, last_good: str) -> HookFailed:
        """Return the error with which the run ends after a hook has failed, with that of the hook as its cause."""
        what = f"{self.failed} failed after step {step}: {type(self.error).__name__}: {self.error}"
        failure = HookFailed(f"{what.rstrip('.')}. {last_good} Correct the hook; --resume goes on from there.")
        failure.__cause__ = self.error
        return failure


def metrics_of(given: Any, taken: Collection[str]) -> dict[str, float]:
    """Return what a hook gave as names and floats. Refuse anything else, and names that are taken."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"it returned {given!r}. Allowed: a mapping of names to numbers, StopTraining or None")
    for name in given:
        if name in taken:
            raise ValueError(f"it returned the metric {name!r}, which the run measures itself. Take another name")
    return {name: float(value) for name, value in given.items()}
