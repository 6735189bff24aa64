"""How a run is judged: by a protocol of `unitsphere evaluate`, or by a number of `unitsphere analyse`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unitsphere.common.errors import UnitsphereError
from unitsphere.evaluation.options import Options
from unitsphere.evaluation.protocols import PROTOCOLS, find_protocol

if TYPE_CHECKING:
    from unitsphere.runs.run import Run

OF_A_CHECKPOINT = ("geometry", "hardness", "similarity")  # analyses that give a number of one


def settings_of(protocol: str | None) -> list[str]:
    """What may be said of how a run is judged. read: which number; epoch: of which checkpoint, if not the last."""
    if protocol in OF_A_CHECKPOINT:
        from unitsphere.analysis.analyse import ANALYSES

        return ["protocol", "data", "seed", "read", *ANALYSES[protocol].options]
    known = PROTOCOLS.values() if protocol is None else (find_protocol(protocol),)
    own = dict.fromkeys(name for each in known for name in each.options)
    return ["protocol", "data", *Options.model_fields, "seed", *own, "read", "epoch"]


def judge(run: Run, judging: Mapping[str, Any], device: str) -> tuple[float, dict[str, Any]]:
    """The number that was asked for, and all that was measured with it."""
    settings = dict(judging)
    read, epoch = settings.pop("read"), settings.pop("epoch", None)
    if settings["protocol"] in OF_A_CHECKPOINT:
        result = analysed(run, device=device, **settings)
        found: Any = result["checkpoints"][-1] if "checkpoints" in result else result
    else:
        from unitsphere.evaluation.evaluate import evaluate

        result = evaluate(run if epoch is None else checkpoint_of(run, epoch), **{"device": device, **settings})
        found = result["value"]
    for name in read.split("."):
        if name not in found:
            raise UnitsphereError(f"{settings['protocol']} gave {', '.join(found)}, but the study reads {read}.")
        found = found[name]
    return float(found), result


def analysed(run: Run, *, protocol: str, data: Any, seed: int, device: str, **options: Any) -> dict[str, Any]:
    """What `unitsphere analyse` measures of one run, without the figure."""
    from unitsphere.analysis.analyse import ANALYSES
    from unitsphere.analysis.request import AnalysisRequest
    from unitsphere.common.devices import pick_device
    from unitsphere.common.terminal import bars

    with bars() as progress:
        asked = AnalysisRequest(data, pick_device(device), seed, progress=progress, latest_only=True)
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
