"""Cells that are pre-training runs, each judged by a protocol.

A cell's settings are fields of `unitsphere pretrain`, and how the run is judged with `evaluate.` before the names: the
arguments of `unitsphere.evaluate`, or an analysis as the protocol and its settings. Runs are addressed by the fields
alone, so cells that differ only in how they are judged share one. Two settings are the studies' own:

evaluate.epoch  judge the checkpoint of this epoch of the run, not the last one (it must be among keep_epochs)
continued_at    train for so many epochs, then resume with `epochs` in all: the learning rate jumps back up (MoCHi)
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from unitsphere.common.errors import UsageError, check_word
from unitsphere.config.config import INCIDENTAL
from unitsphere.config.layers import Layer, merge
from unitsphere.data.named import without_path
from unitsphere.methods.contrastive import ContrastiveConfig
from unitsphere.methods.resolve import Resolved, resolve
from unitsphere.studies.costs import hours
from unitsphere.studies.judging import NotLogged, judge, number, settings_of
from unitsphere.studies.study import Begun, Job, Measured, Settings, address

if TYPE_CHECKING:
    from unitsphere.runs.run import Run

PREFIX = "evaluate."
CONTINUED_AT = "continued_at"
RENAMED = {"evaluate.row": "evaluate.recipe"}  # in cells that were kept before November 2026
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

    def settled(self, settings: Settings) -> Settings:
        fields = {name: value for name, value in settings.items() if not name.startswith(PREFIX)}
        judging = {RENAMED.get(name, name): settings[name] for name in settings if name.startswith(PREFIX)}
        return {**settings_of_run(fields), **judging}

    def explain(self, given: Settings) -> Sequence[tuple[str, str, str]]:
        from unitsphere.studies.explaining import of_judging, of_run

        fields, judging = self.split(given)
        known = {name: value for name, value in fields.items() if name != CONTINUED_AT}
        return [*of_run(resolve(Layer("study", known)), given), *of_judging(judging, given)]

    def row_of(self, given: Settings) -> str:
        return name_of_run(self.split(given)[0])

    def hours(self, given: Settings) -> float | None:
        """Those of a run that continues another are of what it adds to it."""
        resolved, own = configured(self.split(given)[0])
        config = resolved.config
        return hours(config, config.epochs - own.get(CONTINUED_AT, 0))

    def data(self, given: Settings, store: Path) -> Sequence[str]:
        """A run that has a checkpoint is judged with the judge's data alone."""
        fields, judging = self.split(given)
        begun = (folder_of_run(fields, store / "runs") / "checkpoints").exists()
        return [str(judging["data"])] if begun else [str(fields["data"]), str(judging["data"])]

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
        measured: dict[str, dict[str, Any]] = {}  # cells may read different numbers off one measurement
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
            asked = json.dumps([name, {key: value for key, value in judging.items() if key != "read"}], default=str)
            result = measured[asked] = measured.get(asked) or judge(run, judging, device)
            try:
                value = number(result, judging)
            except NotLogged as error:
                yield Measured(job, None, {"run": name, "failure": str(error)})
                continue
            about = {"run": name, "seconds": round(time.monotonic() - started, 1), **speed_of(run)}
            about |= {**edge_of(result), "result": result}
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


def edge_of(result: Mapping[str, Any]) -> dict[str, float]:
    """The chosen rate of a linear classifier, if it is the lowest or highest of those tried: a better one may lie
    beyond it."""
    constants = result.get("constants", {})
    tried, chosen = constants.get("lr") or (), constants.get("chosen_lr")
    return {"edge": chosen} if len(tried) > 1 and chosen in (min(tried), max(tried)) else {}


def speed_of(run: Run) -> dict[str, float]:
    """Images a second, the median line's, and on a card the most memory: as the run logged them."""
    from unitsphere.training.log import read_metrics

    lines = list(read_metrics(run.metrics_file))
    found = {"images_per_second": round(median(line["images_per_second"] for line in lines))} if lines else {}
    return found | ({"memory_mib": lines[-1]["memory_mib"]} if lines and "memory_mib" in lines[-1] else {})


def settings_of_run(fields: Settings) -> dict[str, Any]:
    """All that the run depends on: what has no effect beside the other settings is left out."""
    resolved, own = configured(fields)
    found = dumped(resolved)
    if isinstance(resolved.config, ContrastiveConfig) and meets_all(resolved.config):
        found["negatives"] = None
        del found["shared_draw"]
    return {name: value for name, value in found.items() if not resolved.why_unused(name)} | own


def dumped(resolved: Resolved) -> dict[str, Any]:
    """All fields that make the run what it is, as plain values."""
    values = resolved.config.model_dump(mode="json", exclude=INCIDENTAL)
    return {**values, "data": without_path(resolved.config.data)}


def meets_all(config: ContrastiveConfig) -> bool:
    """Whether each query meets all negatives that there are, however many were asked for."""
    in_batch = 2 * config.batch_size - 2 if config.both_views else config.batch_size - 1
    at_hand = config.queue_size if config.negatives_from == "queue" else in_batch
    return config.negatives is None or config.negatives >= at_hand


def configured(fields: Settings) -> tuple[Resolved, dict[str, Any]]:
    """The run's configuration, and the settings that are the studies' own."""
    own = {name: fields[name] for name in (CONTINUED_AT,) if name in fields}
    return resolved_once(json.dumps({name: value for name, value in fields.items() if name not in own})), own


@lru_cache(4096)  # a plan asks for the same ones again and again
def resolved_once(fields: str) -> Resolved:
    return resolve(Layer("study", json.loads(fields)))


def name_of_run(fields: Settings) -> str:
    return address("pretrain", settings_of_run(fields))


def former_name_of_run(fields: Settings) -> str:
    """Until November 2026 what has no effect was part of a run's address."""
    resolved, own = configured(fields)
    return address("pretrain", {**dumped(resolved), **own})


def folder_of_run(fields: Settings, runs: Path) -> Path:
    """Where the run lies, or is to lie."""
    folder, former = runs / name_of_run(fields), runs / former_name_of_run(fields)
    return former if former.exists() and not folder.exists() else folder


def trained(fields: Settings, runs: Path, device: str) -> Run:
    """The run with these fields: if it was interrupted it is resumed, if it is finished nothing is done. One that was
    begun goes on as it was begun: on its device, with the epochs that it keeps."""
    from unitsphere.common.stopping import Stopped
    from unitsphere.jobs.pretrain import pretrain
    from unitsphere.runs.run import Run

    folder = folder_of_run(fields, runs)
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
        raise Stopped("stopped; the run is saved, and the same command goes on from there.") from stopped


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
