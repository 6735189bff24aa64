"""Cells that are pre-training runs, each judged by a protocol.

A cell's settings are fields of `antipode pretrain`, and arguments of `antipode.evaluate` with `evaluate.` before their
names. Runs are addressed by the fields alone, so cells that differ only in how they are judged share one.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antipode.config.fields import RunningFields
from antipode.config.resolve import Layer, merge, resolve
from antipode.errors import AntipodeError
from antipode.studies.study import Job, Measured, Settings, address, check_word

PREFIX = "evaluate."
# What changes how a run is carried out but not what it is.
INCIDENTAL = {"device", "resident", "workers", *RunningFields.model_fields}


@dataclass(frozen=True)
class Pretraining:
    """base: fields of all cells; protocol: arguments of `evaluate` (its data are the run's unless given); read: which
    of the protocol's values is the cell's (`evaluate.read` in a cell that differs)."""

    base: Mapping[str, Any]
    protocol: Mapping[str, Any]
    read: str
    name = "pretraining"

    def resolve(self, given: Settings) -> Settings:
        fields, judging = self.split(given)
        config = resolve(Layer("study", fields)).config.model_dump(mode="json", exclude=INCIDENTAL)
        config["data"] = without_path(config["data"])
        judging["data"] = without_path(judging["data"])
        return {**config, **{PREFIX + name: value for name, value in judging.items()}}

    def run(self, jobs: Sequence[Job], store: Path, device: str) -> Iterator[Measured]:
        """A run that was interrupted is resumed, a finished one is only judged."""
        from antipode.evaluation.evaluate import evaluate
        from antipode.training.loop import Stopped
        from antipode.training.pretrain import pretrain

        for job in jobs:
            fields, judging = self.split(job.given)
            read = judging.pop("read")
            of_run = {name: value for name, value in job.settings.items() if not name.startswith(PREFIX)}
            folder = store / "runs" / address("pretrain", of_run)
            started = time.monotonic()
            try:
                run = pretrain(out=folder, resume=True, **{"device": device, **fields})
            except Stopped as stopped:
                raise AntipodeError("stopped; the run is saved, and the same command goes on from there.") from stopped
            result = evaluate(run, **{"device": device, **judging})
            if read not in result["value"]:
                raise AntipodeError(f"the protocol gave {', '.join(result['value'])}, but the study reads {read}.")
            about = {"run": folder.name, "seconds": round(time.monotonic() - started, 1), "result": result}
            yield Measured(job, result["value"][read], about)

    def split(self, given: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
        """The fields of the run, and the arguments of `evaluate` that were given, with the data and the seed."""
        from antipode.evaluation.evaluate import evaluate

        of_run = {name: value for name, value in given.items() if not name.startswith(PREFIX)}
        fields, _ = merge([Layer("study", self.base), Layer("cell", of_run)])
        judging = {name.removeprefix(PREFIX): value for name, value in given.items() if name.startswith(PREFIX)}
        known = [*list(inspect.signature(evaluate).parameters)[1:], "read"]
        for name in judging:
            check_word("set", PREFIX + name, [PREFIX + argument for argument in known])
        usual = {"data": fields.get("data"), "seed": fields.get("seed", 0), "read": self.read}
        return fields, {**usual, **self.protocol, **judging}


def without_path(data: str) -> str:
    """name=path without the path: where the images lie is the machine's business. (shapes=COUNT has no path.)"""
    name, _, path = data.partition("=")
    return name if path and name != "shapes" else data
