"""What runs said of themselves while they trained, over epochs: EqCo's Fig. 1 and 2 live, MoCHi's Fig. 4, and how
MSBReg's particles lie.

It reads metrics.jsonl and needs neither images nor checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unitsphere.analysis.figures import colour, from_zero, name_lines, name_runs, over_epochs, panels
from unitsphere.analysis.request import AnalysisRequest, number
from unitsphere.common.errors import UsageError
from unitsphere.runs.run import Run
from unitsphere.training.log import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A panel's label, and for each name in it its line and what that is, where there are several.
PANELS: Sequence[tuple[str, dict[str, tuple[str, str]]]] = (
    ("mutual-information bound in nats", {"mutual_information_bound": ("-", "")}),
    ("|dL/dq|, mean and 2 deviations", {"gradient_norm": ("-", "")}),
    ("bound of |dL/dq| (Theorem 2)", {"gradient_norm_bound": ("-", "")}),
    ("share of keys above all negatives",
     {"contrastive_accuracy": ("-", "real negatives"), "accuracy_among_synthetic": ("--", "and synthetic ones")}),
    ("highest score of a query",
     {"highest_negative": ("-", "real negatives"), "highest_pair": ("--", "pairs of negatives"),
      "highest_with_query": (":", "mixed with the query")}),
    ("squared distance",
     {"alignment": ("-", "two views of an image"), "centroid_distance": ("--", "their centroids in both networks")}),
    ("uniformity of embeddings", {"uniformity": ("-", "")}),
    ("effective rank of embeddings", {"effective_rank": ("-", "")}),
    ("smallest over largest singular value", {"evenness": ("-", "")}),
    ("loss", {"loss": ("-", "the method's own"), "total_loss": ("--", "and forces")}),
    ("forces, with their weights",
     {"singular_loss": ("-", "singular values"), "brownian_loss": ("--", "Brownian"),
      "uniformity_loss": (":", "uniformity")}),
    ("k-NN accuracy in %", {"knn": ("-", "")}),
)  # fmt: skip
CURVES = tuple(name for _, lines in PANELS for name in lines)
DEVIATION = "gradient_norm_deviation"  # drawn with the norm
Result = dict[str, Any]


def measure(run: Run, ask: AnalysisRequest) -> Result:
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
    logged = {name for result in results for name in result["curves"]}
    shown = [panel for panel in PANELS if logged & panel[1].keys()]
    figure, axes = panels(len(shown))
    for place, (label, lines) in zip(axes, shown, strict=True):
        for which, result in enumerate(results):
            for name, (line, _) in lines.items():
                if name in result["curves"]:
                    draw_curve(place, result["curves"], name, line, colour(which))
        over_epochs(place)
        if any(name.startswith("gradient_norm") for name in lines):
            from_zero(place)
        place.set_ylabel(label)
        if len(kinds := [drawn for name, drawn in lines.items() if name in logged]) > 1:
            low, high = place.get_ylim()
            place.set_ylim(low, high + 0.1 * len(kinds) * (high - low))  # room for the legend
            name_lines(place, kinds)
    name_runs(figure, [result["name"] for result in results])
    return figure


def draw_curve(axes: Axes, curves: Result, name: str, line: str, tint: str) -> None:
    epochs, values = curves[name]["epochs"], curves[name]["values"]
    axes.plot(epochs, values, line, color=tint, marker="o" if len(epochs) < 12 else None, markersize=3)
    if name == "gradient_norm":
        spread = curves[DEVIATION]["values"]
        low, high = ([v + sign * s for v, s in zip(values, spread, strict=True)] for sign in (-2, 2))
        axes.fill_between(epochs, low, high, color=tint, alpha=0.12, linewidth=0)
