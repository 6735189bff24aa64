"""A study drawn: its numbers as lines along one axis, the paper's beside them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from unitsphere.analysis.figures import colour, counted, panels
from unitsphere.studies.study import Study, label, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Known = Mapping[str, Any]  # a cell of results.json
POWERS_OF_TWO = 8  # a range from which on they are better than equal steps
LETTERS = 14  # of the remark, to an inch


def draw(study: Study, cells: Sequence[Known], remark: str = "") -> Figure:
    """A panel for each place on the axes that have panels, the last of them across. remark: what stands above all."""
    over = study.over
    assert over is not None
    values = [list(dict.fromkeys(cell["at"][axis] for cell in cells)) for axis in study.panels]
    places = {place: [cell for cell in cells if place == at(cell, study.panels)] for place in product(*values)}
    places = {place: own for place, own in places.items() if own}
    figure, axes = panels(len(places), len(values[-1]) if len(values) > 1 else None)
    if remark:  # it may be a path: a dollar is no formula
        lines = textwrap.fill(remark, int(LETTERS * figure.get_figwidth()))
        figure.suptitle(lines, x=0.01, horizontalalignment="left", fontsize="small", parse_math=False)
    alike: dict[Any, Axes] = {}  # panels of one quantity have one scale
    for panel, (place, own) in zip(axes, places.items(), strict=True):
        first = alike.setdefault(own[0]["at"][study.columns] if study.columns in study.panels else None, panel)
        if panel is not first:
            panel.sharey(first)
        draw_panel(panel, study, over, own)
        panel.set_title(", ".join(map(shown, place)) or study.quantity)
    return figure


def draw_panel(axes: Axes, study: Study, over: str, cells: Sequence[Known]) -> None:
    """A line for each name: what was measured, and dashed what the paper has. A cell that has no number on the axis is
    a level to compare with. Where lines meet, the points of the lower ones are larger: rings round those above."""
    lines: dict[str, list[Known]] = {}
    for cell in cells:
        for name in names(study, over, cell["at"]):
            lines.setdefault(name, []).append(cell)
    lines = {name: own for name, own in lines.items() if not any(is_part(own, of) for of in lines.values())}
    for number, (name, points) in enumerate(lines.items()):
        look: dict[str, Any] = {"color": colour(number)}
        covering = [later for later in list(lines.values())[number + 1 :] if meet(points, later, over)]
        here: dict[str, Any] = {"fmt": "o-", "label": name or "here", "markersize": 4 + 2 * len(covering)}
        for key, error, more in (
            ("value", "deviation", here),
            ("paper", "paper_deviation", {"fmt": ".--", "alpha": 0.45, "markersize": 4}),
        ):
            placed = sorted((cell for cell in points if is_number(cell["at"][over])), key=lambda cell: cell["at"][over])
            known = [cell for cell in placed if cell[key] is not None]
            if known:
                spread = [cell[error] or 0.0 for cell in known]
                x, y = [cell["at"][over] for cell in known], [cell[key] for cell in known]
                axes.errorbar(x, y, yerr=spread if any(spread) else None, capsize=2, **look, **more)
            for cell in points:
                if not is_number(cell["at"][over]) and key == "value" and cell[key] is not None:
                    axes.axhline(cell[key], linestyle=":", label=name, **look)
    values = sorted({cell["at"][over] for cell in cells if is_number(cell["at"][over])})
    if values[0] > 0 and values[-1] / values[0] >= POWERS_OF_TWO:
        counted(axes, values)
    axes.set_xlabel(over.replace("_", " "))
    if axes.get_legend_handles_labels()[1]:
        axes.legend()


def names(study: Study, over: str, place: Known) -> Sequence[str]:
    """Of the lines that the cell at this place is a point of."""
    if study.lines is not None:
        return study.lines(place)
    own = {axis.replace("_", " "): value for axis, value in place.items() if axis not in (over, *study.panels)}
    return [label(own)]


def meet(one: Sequence[Known], other: Sequence[Known], over: str) -> bool:
    """Whether two lines have a point in common."""
    first, second = ({(cell["at"][over], cell["value"]) for cell in line} for line in (one, other))
    return any(value is not None for _, value in first & second)


def is_part(own: Sequence[Known], of: Sequence[Known]) -> bool:
    """Whether a line would only repeat some points of another."""
    return len(own) < len(of) and all(cell in of for cell in own)


def at(cell: Known, axes: Sequence[str]) -> tuple[Any, ...]:
    return tuple(cell["at"][axis] for axis in axes)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
