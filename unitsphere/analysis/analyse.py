"""`unitsphere analyse`: measure runs side by side, write the numbers as JSON and draw them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unitsphere.analysis import figures, geometry, gradient, hardness, similarity, training, tsne
from unitsphere.analysis.request import AnalysisRequest
from unitsphere.common.devices import memory_errors, pick_device
from unitsphere.common.errors import UsageError, check_word
from unitsphere.common.extras import require
from unitsphere.common.files import write_text
from unitsphere.common.terminal import bars
from unitsphere.data.source import Data
from unitsphere.evaluation.evaluate import data_name
from unitsphere.runs.account import now
from unitsphere.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Analysis", "analyse"]

Result = dict[str, Any]


@dataclass(frozen=True)
class Analysis:
    """measure: a run and an AnalysisRequest to numbers, its keywords being what can be set; draw: the numbers of
    several runs to a figure; needs: what must be installed."""

    measure: Callable[..., Result]
    draw: Callable[[Sequence[Result]], Figure]
    needs: tuple[str, ...] = ("matplotlib",)

    @property
    def options(self) -> list[str]:
        return [name for name, it in signature(self.measure).parameters.items() if it.kind is it.KEYWORD_ONLY]


ANALYSES = {
    "similarity": Analysis(similarity.measure, similarity.draw),
    "gradient": Analysis(gradient.measure, gradient.draw),
    "training": Analysis(training.measure, training.draw),
    "geometry": Analysis(geometry.measure, geometry.draw),
    "hardness": Analysis(hardness.measure, hardness.draw),
    "tsne": Analysis(tsne.measure, tsne.draw, needs=("matplotlib", "scikit-learn")),
}
WITHOUT_RUN = ("tsne",)


def analyse(
    runs: Sequence[str | os.PathLike[str]],
    what: str,
    *,
    data: Data | None = None,
    out: str | os.PathLike[str] | None = None,
    names: Sequence[str] | None = None,
    format: str = "png",
    batch_size: int = 256,
    device: str = "auto",
    seed: int = 0,
    verbose: bool = True,
    **options: Any,
) -> tuple[Path, Path]:
    """Look at runs and write OUT/WHAT.json and OUT/WHAT.png; both paths are returned.

    what: a name of ANALYSES; options: the keywords of its `measure`. data: the images, where they are not (or no
    longer) what the runs say. out: by default the folder `analysis` of a single run. names: what the runs are called in
    the figure, by default as their folders. batch_size: images at once, where it is not the run's own batches that are
    looked at. seed: of the images, views and negatives that are drawn. verbose: show progress on a screen.
    """
    check_word("what", what, ANALYSES)
    check_word("format", format, ("png", "svg", "pdf"))
    analysis = ANALYSES[what]
    for name in options:
        if name not in analysis.options:
            allowed = ", ".join(analysis.options) or "nothing"
            raise UsageError(f"{name}: {what} has no such setting; it takes {allowed}.")
    if bool(runs) == (what in WITHOUT_RUN):
        raise UsageError(f"{what} takes no run." if runs else f"{what}: give one run or more.")
    if names is not None and (len(names) != len(runs) or len(set(names)) != len(names)):
        raise UsageError(f"names: given {len(names)} for {len(runs)} runs; each run needs one of its own.")
    if batch_size < 1:
        raise UsageError(f"batch_size: given {batch_size}; at least 1 is needed.")
    opened = [Run.open(run) for run in runs]
    folder = place_of(opened, out)
    for package in analysis.needs:
        require(package, "drawing figures")
    with bars(verbose) as progress, memory_errors("Lower --batch-size or --images."):
        ask = AnalysisRequest(data, pick_device(device), seed, batch_size, progress)
        found = [analysis.measure(run, ask, **options) for run in opened] or [analysis.measure(ask, **options)]
    results = [result | {"name": name} for result, name in zip(found, names or names_of(opened), strict=True)]
    where = [str(run.path) for run in opened] or [""]
    written = {"analysis": what, "data": data_name(data) if data is not None else None, "seed": seed, "time": now()}
    told = [{"run": path or None, **result} for path, result in zip(where, results, strict=True)]
    numbers, picture = folder / f"{what}.json", folder / f"{what}.{format}"
    write_text(numbers, json.dumps(written | {"runs": told}, indent=1) + "\n")
    figures.save(lambda: analysis.draw(results), picture)
    return numbers, picture


def place_of(runs: Sequence[Run], out: str | os.PathLike[str] | None) -> Path:
    """The folder to write to, made; refused before anything is computed."""
    if out is None and len(runs) != 1:
        raise UsageError("out: say where the figure of several runs (or of none) goes: --out DIR.")
    folder = Path(out) if out is not None else runs[0].path / "analysis"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"out: {folder} cannot be written: {error.strerror}.") from error
    return folder


def names_of(runs: Sequence[Run]) -> list[str]:
    """What to call them in a figure: the folder's name, or the whole path where that is not enough."""
    short = [run.path.resolve().name for run in runs]
    return (short if len(set(short)) == len(short) else [str(run.path) for run in runs]) or [""]
