"""Cells that are pre-training runs, each judged by a protocol.

A cell's settings are fields of `unitsphere pretrain`, and how the run is judged with `evaluate.` before the names: the
arguments of `unitsphere.evaluate`, or an analysis as the protocol and its settings. Runs are addressed by the fields
alone, so cells that differ only in how they are judged share one. Two settings are the studies' own:

evaluate.epoch  judge the checkpoint of this epoch of the run, not the last one (it must be among keep_epochs)
continued_at    train for so many epochs, then resume with `epochs` in all: the learning rate jumps back up (MoCHi)
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from unitsphere.common.errors import UnitsphereError, UsageError, check_word
from unitsphere.config.config import INCIDENTAL
from unitsphere.config.layers import Layer, merge
from unitsphere.data.named import without_path
from unitsphere.methods.resolve import resolve
from unitsphere.studies.judging import judge, settings_of
from unitsphere.studies.study import Begun, Job, Measured, Settings, address

if TYPE_CHECKING:
    from unitsphere.runs.run import Run

PREFIX = "evaluate."
CONTINUED_AT = "continued_at"
AS_SETTINGS = "In a study options are settings: --set data=NAME=PATH, --set evaluate.data=NAME=PATH for the judge's."


@dataclass(frozen=True)
class Pretraining:
    """base: fields of all cells; protocol: how they are judged (on the run's own data unless given); read: which of
    the protocol's values is the cell's (`evaluate.read` in a cell that differs)."""

    base: Mapping[str, Any]
    protocol: Mapping[str, Any]
    read: str
    name = "pretraining"

    def resolve(self, given: Settings) -> Settings:
        fields, judging = self.split(given)
        judging["data"] = without_path(judging["data"])
        return {**settings_of_run(fields), **{PREFIX + name: value for name, value in judging.items()}}

    def takes(self, given: Settings, name: str) -> bool:
        """All cells take all fields, but how a run is judged is for those whose protocol knows it."""
        protocol = given.get(PREFIX + "protocol", self.protocol.get("protocol"))
        return not name.startswith(PREFIX) or name.removeprefix(PREFIX) in settings_of(protocol)

    def run_of(self, given: Settings) -> str:
        """The run that is trained; of one that continues another, that other."""
        fields, _ = self.split(given)
        if CONTINUED_AT in fields:
            fields["epochs"] = fields.pop(CONTINUED_AT)
        return name_of_run(fields)

    def run(self, jobs: Sequence[Job], store: Path, device: str) -> Iterator[Measured | Begun]:
        from unitsphere.data.sharing import keep_decoded

        try:
            with keep_decoded():  # for all runs and their judges
                yield from self.run_each(jobs, store, device)
        except UsageError as error:  # it names options of pretrain and evaluate
            raise UsageError(f"{error}\n{AS_SETTINGS}") from error

    def run_each(self, jobs: Sequence[Job], store: Path, device: str) -> Iterator[Measured | Begun]:
        from unitsphere.training.telemetry import Diverged

        runs: dict[str, Run] = {}
        failed: dict[str, str] = {}
        names = [name_of_run(self.split(job.given)[0]) for job in jobs]
        for job, name in zip(jobs, names, strict=True):
            fields, judging = self.split(job.given)
            started = time.monotonic()
            if name not in runs and name not in failed:
                read_off = [other for other, run_of_other in zip(jobs, names, strict=True) if run_of_other == name]
                yield Begun(len(runs) + len(failed) + 1, len(set(names)), read_off)
            if name in failed:
                yield Measured(job, None, {"run": name, "failure": failed[name]})
                continue
            try:
                run = runs[name] = runs.get(name) or trained(fields, store / "runs", device)
            except Diverged as error:  # is a result: the others go on
                failed[name] = str(error)
                yield Measured(job, None, {"run": name, "failure": failed[name]})
                continue
            value, result = judge(run, judging, device)
            about = {"run": name, "seconds": round(time.monotonic() - started, 1), **speed_of(run), "result": result}
            yield Measured(job, value, about)

    def split(self, given: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
        """The fields of the run, and how it is judged, with the data and the seed."""
        of_run = {name: value for name, value in given.items() if not name.startswith(PREFIX)}
        fields, _ = merge([Layer("study", self.base), Layer("cell", of_run)])
        judging = {name.removeprefix(PREFIX): value for name, value in given.items() if name.startswith(PREFIX)}
        usual = {"data": fields.get("data"), "seed": fields.get("seed", 0), "read": self.read}
        judging = {**usual, **self.protocol, **judging}
        allowed = [PREFIX + name for name in settings_of(judging.get("protocol"))]
        for name in judging:
            check_word("set", PREFIX + name, allowed)
        return fields, judging


def speed_of(run: Run) -> dict[str, float]:
    """Images a second, the median line's, and on a card the most memory: as the run logged them."""
    from unitsphere.training.telemetry import read_metrics

    lines = list(read_metrics(run.metrics_file))
    found = {"images_per_second": round(median(line["images_per_second"] for line in lines))} if lines else {}
    return found | ({"memory_mib": lines[-1]["memory_mib"]} if lines and "memory_mib" in lines[-1] else {})


def settings_of_run(fields: Settings) -> dict[str, Any]:
    """All that the run depends on."""
    own = {name: fields[name] for name in (CONTINUED_AT,) if name in fields}
    known = {name: value for name, value in fields.items() if name not in own}
    config = resolve(Layer("study", known)).config.model_dump(mode="json", exclude=INCIDENTAL)
    return {**config, "data": without_path(config["data"]), **own}


def name_of_run(fields: Settings) -> str:
    return address("pretrain", settings_of_run(fields))


def trained(fields: Settings, runs: Path, device: str) -> Run:
    """The run with these fields: if it was interrupted it is resumed, if it is finished nothing is done. One that was
    begun goes on as it was begun: on its device, with the epochs that it keeps."""
    from unitsphere.jobs.pretrain import pretrain
    from unitsphere.runs.run import Run
    from unitsphere.training.loop import Stopped

    folder = runs / name_of_run(fields)
    known = {name: value for name, value in fields.items() if name != CONTINUED_AT}
    if CONTINUED_AT in fields and not folder.exists():
        copy_run(trained({**known, "epochs": fields[CONTINUED_AT]}, runs, device).path, folder)
    if is_finished(Run(folder), fields.get("epochs")):
        return Run(folder)
    if Run(folder).exists():
        known = {name: value for name, value in known.items() if name not in INCIDENTAL}
    else:
        known = {"device": device, **known}
    try:
        return pretrain(out=folder, resume=True, **known)
    except Stopped as stopped:
        raise UnitsphereError("stopped; the run is saved, and the same command goes on from there.") from stopped


def is_finished(run: Run, epochs: int | None) -> bool:
    """Whether its latest checkpoint is that of the last step: of so many epochs, or of its own. The images are not
    asked: they may lie elsewhere by now."""
    from unitsphere.training.loop import Plan

    if not run.checkpoints():
        return False
    (_, meta), config = run.latest(tensors=False), run.config
    return bool(meta["step"] == Plan(meta["data"]["images"], config.batch_size, epochs or config.epochs, 0).steps)


def copy_run(source: Path, target: Path) -> None:
    """All but what was found out about it; whole or not at all."""
    half = target.with_name(f".{target.name}.tmp")
    shutil.copytree(source, half, dirs_exist_ok=True, ignore=shutil.ignore_patterns("results.json", "analysis"))
    half.rename(target)
