"""What contrastive runs said of themselves while they trained, over epochs: EqCo's Fig. 1 and 2 live, MoCHi's Fig. 4.

It reads metrics.jsonl and needs neither images nor checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from antipode.analysis.figures import colour, from_zero, over_epochs, panels
from antipode.analysis.inquiry import Inquiry, number
from antipode.errors import UsageError
from antipode.training.run import Run
from antipode.training.telemetry import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = {
    "mutual_information_bound": "mutual-information bound in nats",
    "gradient_norm": "|dL/dq|, mean and 2 deviations",
    "gradient_norm_bound": "bound of |dL/dq| (Theorem 2)",
    "contrastive_accuracy": "share of keys above all negatives",
    "loss": "loss",
    "knn": "k-NN accuracy in %",
}
DEVIATION = "gradient_norm_deviation"  # drawn with the norm
Result = dict[str, Any]


def measure(run: Run, ask: Inquiry) -> Result:
    """For each name the epochs it was logged in, and its mean over each; a line of metrics.jsonl counts as often as it
    has steps."""
    sums: dict[str, dict[int, list[float]]] = {}
    last = 0
    for line in read_metrics(run.metrics_file):
        steps, last = line["step"] - last, line["step"]
        for name in (*CURVES, DEVIATION):
            if line.get(name) is not None:
                total = sums.setdefault(name, {}).setdefault(line["epoch"], [0.0, 0.0])
                total[0] += steps * line[name]
                total[1] += steps
    if not sums:
        raise UsageError(f"{run.metrics_file} has no line to draw yet.")
    curves = {
        name: {"epochs": list(found), "values": [number(total / steps) for total, steps in found.values()]}
        for name, found in sums.items()
    }
    return {"epoch": max(epoch for found in sums.values() for epoch in found), "curves": curves}


def draw(results: Sequence[Result]) -> Figure:
    """A panel for each quantity that some run has logged."""
    names = [name for name in CURVES if any(name in result["curves"] for result in results)]
    figure, axes = panels(len(names))
    for place, name in zip(axes, names, strict=True):
        for which, result in enumerate(results):
            if name in result["curves"]:
                draw_curve(place, result["curves"], name, colour(which), result["name"])
        over_epochs(place)
        if name.startswith("gradient_norm"):
            from_zero(place)
        place.set_ylabel(CURVES[name])
        place.legend()
    return figure


def draw_curve(axes: Axes, curves: Result, name: str, tint: str, label: str) -> None:
    epochs, values = curves[name]["epochs"], curves[name]["values"]
    axes.plot(epochs, values, color=tint, label=label, marker="o" if len(epochs) < 12 else None, markersize=3)
    if name == "gradient_norm":
        spread = curves[DEVIATION]["values"]
        low, high = ([v + sign * s for v, s in zip(values, spread, strict=True)] for sign in (-2, 2))
        axes.fill_between(epochs, low, high, color=tint, alpha=0.12, linewidth=0)
