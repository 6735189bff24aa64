"""Draws the results of `benchmarks.speed` for the docs.

    python -m benchmarks.plot benchmarks/results/speed-h200.json --to docs/figures

Needs matplotlib. Several files are laid over each other, a later file's sections in place of an earlier one's.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS, THEIRS, INK = "#1f6f8b", "#b9c0c7", "#22272b"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "svg.hashsalt": "unitsphere",  # the same file for the same numbers
    "svg.fonttype": "none",
    "figure.facecolor": "white",
}
COMPARED = {
    "step resnet50": "Step, ResNet-50, 224x224, batch 256, queue 65,536",
    "step resnet18": "Step, ResNet-18, 32x32, batch 512, queue 4,096",
    "end to end": "CIFAR-10 end to end, symmetric, views and k-NN included",
}
SWEPT = {
    "batch": "images a step",
    "queue": "keys in the queue",
    "keys": "keys of an image (JCL)",
    "views": "views of an image (MSBReg)",
}

Section = dict[str, Any]


def bars(axes: Axes, section: Section) -> None:
    """images/s of each contender and how many times those of the first."""
    rows = measured(section)
    speeds = [row["images_per_second"] for row in rows.values()]
    drawn = axes.barh(
        list(rows), speeds, color=[OURS if name.startswith("unitsphere") else THEIRS for name in rows], height=0.7
    )
    first = speeds[0]
    axes.bar_label(drawn, [f"{speed:,}   {speed / first:.1f}x" for speed in speeds], padding=4, fontsize=9)
    axes.set_xlim(0, 1.3 * max(speeds))
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def line(axes: Axes, section: Section, label: str) -> None:
    """images/s over the size that is swept."""
    rows = measured(section)
    sizes, speeds = [int(name) for name in rows], [row["images_per_second"] for row in rows.values()]
    axes.plot(sizes, speeds, "o-", color=OURS)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_ylim(0, 1.15 * max(speeds))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", color="#e4e7ea")
    axes.set_axisbelow(True)
    axes.set_xlabel(label)
    axes.set_title("images/s\n" + section["what"].removeprefix("unitsphere, "), fontsize=9, fontweight="normal")


def measured(section: Section) -> dict[str, Section]:
    return {name: row for name, row in section["rows"].items() if "images_per_second" in row}


def draw_compared(sections: dict[str, Section]) -> Figure:
    """A panel for each comparison, as high as it has contenders."""
    heights = [0.27 * len(measured(section)) + 0.5 for section in sections.values()]
    figure = plt.figure(figsize=(8, sum(heights)), layout="constrained")
    panels = figure.subfigures(len(sections), squeeze=False, height_ratios=heights)
    for panel, (name, section) in zip(panels[:, 0], sections.items(), strict=True):
        panel.suptitle(f"{COMPARED[name]}: images/s", x=0.01, ha="left", fontsize=11, fontweight="bold")
        bars(panel.subplots(), section)
    return figure


def draw_swept(sections: dict[str, Section]) -> Figure:
    rows = math.ceil(len(sections) / 2)
    figure, panels = plt.subplots(
        rows, min(2, len(sections)), squeeze=False, layout="constrained", figsize=(8.8, 3.2 * rows)
    )
    for axes in panels.flat[len(sections) :]:
        axes.set_visible(False)
    for axes, (name, section) in zip(panels.flat, sections.items(), strict=False):
        line(axes, section, SWEPT[name])
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, required=True, help="the folder of the figures")
    parser.add_argument("--format", default="svg", choices=("svg", "png"))
    options = parser.parse_args()
    matplotlib.use("agg")
    matplotlib.rcParams.update(STYLE)
    sections: dict[str, Section] = {}
    for file in options.results:
        sections |= json.loads(file.read_text().replace("antipode", "unitsphere"))["sections"]
    options.to.mkdir(parents=True, exist_ok=True)
    figures: dict[str, tuple[dict[str, str], Callable[[dict[str, Section]], Figure]]] = {
        "speed": (COMPARED, draw_compared),
        "speed-sweeps": (SWEPT, draw_swept),
    }
    for name, (wanted, draw) in figures.items():
        found = {title: sections[title] for title in wanted if title in sections and measured(sections[title])}
        if found:
            file = options.to / f"{name}.{options.format}"
            draw(found).savefig(file, dpi=150, metadata={"Date": None} if options.format == "svg" else None)
            print(file)


if __name__ == "__main__":
    main()
