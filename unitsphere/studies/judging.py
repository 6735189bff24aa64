"""How a run is judged: by a protocol of `unitsphere evaluate`, a number of `unitsphere analyse`, or what it logged."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from unitsphere.common.errors import UnitsphereError
from unitsphere.evaluation.options import Options
from unitsphere.evaluation.protocols import PROTOCOLS, find_protocol

if TYPE_CHECKING:
    from unitsphere.runs.run import Run

OF_A_CHECKPOINT = ("geometry", "hardness", "similarity", "gradient")  # analyses that give numbers of one
LOGGED = "training"  # what the run said of itself, the mean over an epoch


class NotLogged(UnitsphereError):
    """A run does not log this here: memory on a CPU, say. Its cell has no number."""


@cache
def settings_of(protocol: str | None) -> tuple[str, ...]:
    """What may be said of how a run is judged. read: which number; epoch: of which checkpoint, if not the last."""
    common = ("protocol", "data", "seed", "read", "epoch")
    if protocol == LOGGED:
        return common
    if protocol in OF_A_CHECKPOINT:
        from unitsphere.analysis.analyse import ANALYSES

        return (*common, *ANALYSES[protocol].options)
    known = PROTOCOLS.values() if protocol is None else (find_protocol(protocol),)
    return (*common, *Options.model_fields, *dict.fromkeys(name for each in known for name in each.options))


def judge(run: Run, judging: Mapping[str, Any], device: str) -> dict[str, Any]:
    """All that a protocol measures of a run; `number` reads a cell's value off it."""
    settings = {name: value for name, value in judging.items() if name not in ("read", "epoch")}
    epoch = judging.get("epoch")
    if settings["protocol"] == LOGGED:
        return logged(run, epoch or run.config.epochs)
    if settings["protocol"] in OF_A_CHECKPOINT:
        return analysed(run, epoch, device=device, **settings)
    from unitsphere.evaluation.evaluate import evaluate

    return evaluate(run if epoch is None else checkpoint_of(run, epoch), **{"device": device, **settings})


def number(result: Mapping[str, Any], judging: Mapping[str, Any]) -> float:
    """The value that `read` names, such as `top1`, `similarity.mean` or, of a list, `plain.3.gradient_norm`."""
    read, protocol = judging["read"], judging["protocol"]
    found: Any = result["value"] if "value" in result else result.get("checkpoints", [result])[-1]
    for name in read.split("."):
        names = {str(place): each for place, each in enumerate(found)} if isinstance(found, list) else found
        if name not in names:
            problem = NotLogged if protocol == LOGGED else UnitsphereError
            raise problem(f"{protocol} gave {', '.join(names)}, but the study reads {read}.")
        found = names[name]
    return float(found)


def logged(run: Run, epoch: int) -> dict[str, Any]:
    """The means of what metrics.jsonl has of an epoch."""
    from unitsphere.training.log import read_metrics

    lines = [line for line in read_metrics(run.metrics_file) if line["epoch"] == epoch]
    if not lines:
        raise UnitsphereError(f"{run.metrics_file} has no line of epoch {epoch}.")
    names = [name for name, value in lines[-1].items() if isinstance(value, int | float)]
    found = {name: [line[name] for line in lines if line.get(name) is not None] for name in names}
    return {name: fmean(values) for name, values in found.items() if values}


def analysed(
    run: Run, epoch: int | None, *, protocol: str, data: Any, seed: int, device: str, **options: Any
) -> dict[str, Any]:
    """What `unitsphere analyse` measures of one checkpoint, without the figure."""
    from unitsphere.analysis.analyse import ANALYSES
    from unitsphere.analysis.request import AnalysisRequest
    from unitsphere.common.devices import pick_device
    from unitsphere.common.terminal import bars

    class OfOneCheckpoint(AnalysisRequest):
        def checkpoints(self, run: Run) -> list[Path]:
            return super().checkpoints(run) if epoch is None else [checkpoint_of(run, epoch)]

    with bars() as progress:
        asked = OfOneCheckpoint(data, pick_device(device), seed, progress=progress, latest_only=True)
        return ANALYSES[protocol].measure(run, asked, **options)


def checkpoint_of(run: Run, epoch: int) -> Path:
    """The checkpoint at the end of an epoch of a finished run."""
    checkpoints = dict(run.checkpoints())
    step = max(checkpoints) * epoch // run.config.epochs
    if step not in checkpoints:
        raise UnitsphereError(
            f"{run.path} has no checkpoint of epoch {epoch}: it was begun without keep_epochs {epoch}. Remove it, or "
            "use another --store."
        )
    return checkpoints[step]
