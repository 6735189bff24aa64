"""How figures look. matplotlib is an extra, loaded when the first figure is due."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unitsphere.common.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID = "#22272b", "#e4e7ea"
COLOURS = ("#1f6f8b", "#d1495b", "#e0a030", "#5b8c5a", "#7d5ba6", "#8c6d46", "#4a5560", "#c77dba")
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": "white",
    "svg.hashsalt": "unitsphere",  # the same file for the same numbers
}
WIDTH, HEIGHT = 4.1, 3.3  # of a panel, in inches


@contextmanager
def style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def panels(count: int, columns: int | None = None, height: float = HEIGHT) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, row by row."""
    from matplotlib.figure import Figure

    columns = columns or (2 if count == 4 else min(count, 3))
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH * columns, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def shade(number: int, count: int) -> Any:
    """Of the number-th of `count` epochs, dark to light."""
    import matplotlib

    return matplotlib.colormaps["viridis"](0.85 * number / max(1, count - 1))


def epoch_label(epoch: int, number: int, count: int) -> str | None:
    """Of the number-th of `count` epochs, for a legend of six at most."""
    shown = {round(place * (count - 1) / 5) for place in range(6)}
    return f"epoch {epoch}" if number in shown or count <= 6 else None


def counted(axes: Axes, values: Sequence[int]) -> None:
    """A horizontal axis over powers of two, labelled at the values."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:,}" for value in values], rotation=45 if len(values) > 5 else 0)
    axes.minorticks_off()


def over_epochs(axes: Axes) -> None:
    """A horizontal axis of whole epochs."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("epoch")


def name_runs(figure: Figure, names: Sequence[str]) -> None:
    """Below all panels, which colour is which run."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=colour(number), linewidth=2) for number in range(len(names))]
    inches = 0.7 + 0.09 * max(map(len, names))  # of the longest: its line and the gap beside it, then its letters
    columns = max(1, min(6, int(figure.get_figwidth() / inches)))
    rows = -(-len(names) // columns)
    figure.legend(lines, names, loc="outside lower center", ncols=-(-len(names) // rows), fontsize="medium")


def name_lines(axes: Axes, lines: Sequence[tuple[str, str]]) -> None:
    """Within a panel, at its top, what each kind of line is, whatever its run. lines: how it is drawn ("o--"), its
    name."""
    from matplotlib.lines import Line2D

    found = []
    for drawn, name in lines:
        marker = drawn[0] if drawn[0] in "os^" else None
        found.append(Line2D([], [], color=INK, marker=marker, markersize=3, ls=drawn.lstrip("os^"), label=name))
    axes.legend(handles=found, loc="upper right")


def from_zero(axes: Axes) -> None:
    """A vertical axis from zero with some air above what is drawn so far."""
    axes.set_ylim(0, 1.08 * axes.dataLim.ymax or 1)


def save(draw: Callable[[], Figure], path: Path) -> None:
    """Draw in our style and write the file, whole or not at all."""
    with style(), replacing(path) as temporary:
        metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
        draw().savefig(temporary, format=path.suffix[1:], dpi=150, metadata=metadata)
