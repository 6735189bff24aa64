"""The figures of studies: every number where it belongs."""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb

from unitsphere.analysis.figures import colour
from unitsphere.studies import STUDIES
from unitsphere.studies.figure import draw


def known(study, value, paper=False):
    """Cells as in results.json: value(at) is the number of each, and the paper's is half a point above."""
    return [
        {"at": dict(cell.at), "value": (number := value(cell.at)), "deviation": 0.25, "paper_deviation": None,
         "paper": number + 0.5 if paper and number is not None else None}
        for cell in study.cells
    ]  # fmt: skip


def drawn_lines(panel):
    """(label, x, y) of what has points; the paper's have no label."""
    found = [(box.get_label(), *map(list, box.lines[0].get_data())) for box in panel.containers]
    return [("" if name.startswith("_") else name, x, y) for name, x, y in found]


def test_a_figure_has_a_line_for_each_row_and_dashes_for_the_paper():
    study = STUDIES["eqco/figure-3a"]
    missing = {"alpha": 65536, "k": 64, "drawn": "once"}

    def value(at):
        with_eqco = at["alpha"] == 65536 != at["k"]
        return None if at == missing else at["k"] / 7 + with_eqco + 2 * (at["drawn"] == "once")

    (panel,) = draw(study, known(study, value, paper=True)).axes
    ks = sorted({cell.at["k"] for cell in study.cells})
    assert ks == [16, 64, 256, 1024, 4096, 16384, 65536]
    drawn = drawn_lines(panel)
    assert [name for name, _, _ in drawn if name] == [
        "alpha K, drawn once", "alpha K, drawn for each query", "alpha 65536, drawn once",
        "alpha 65536, drawn for each query",
    ]  # fmt: skip
    # what takes all keys is on both lines of its alpha, and what has alpha = K on all four
    few = {k: 2 * (k < 256) for k in ks}
    kept = [k for k in ks if k != 64]
    assert drawn[:2] == [
        ("alpha K, drawn once", ks, [k / 7 + few[k] for k in ks]),
        ("", ks, [k / 7 + few[k] + 0.5 for k in ks]),
    ]
    assert drawn[4][1:] == (kept, [k / 7 + few[k] + (k < 65536) for k in kept])
    assert drawn[6][1:] == (ks, [k / 7 + (k < 65536) for k in ks])
    assert panel.get_xscale() == "log" and panel.get_title() == study.quantity


def test_what_is_not_on_the_axis_is_a_level():
    study = STUDIES["mochi/figure-3a"]
    (panel,) = draw(study, known(study, lambda at: at.get("pairs", 70.0))).axes
    assert [name for name, _, _ in drawn_lines(panel)] == [f"method MoCHi, pairs {s}" for s in (128, 512, 1024)]
    (level,) = [line for line in panel.lines if line.get_label() == "method MoCo v2"]
    assert set(level.get_ydata()) == {70.0}


def test_at_alpha_equal_to_k_a_cell_is_on_both_lines():
    study = STUDIES["eqco/cifar10"]
    panels = draw(study, known(study, lambda at: at["k"] + at["alpha"])).axes
    assert [panel.get_title() for panel in panels] == [
        f"{judge}, {method}" for judge in ("k-NN", "linear") for method in ("moco-v2", "simclr", "simo")
    ]
    heights = [panel.get_ylim() for panel in panels]
    assert heights[0] == heights[1] == heights[2] and heights[0][0] < 32 and heights[0][1] > 8192  # seen side by side
    assert heights[3] == heights[4] == heights[5]
    moco = {name: (x, y) for name, x, y in drawn_lines(panels[0])}
    ks = [16, 64, 256, 4096]
    assert moco["alpha K"] == (ks, [2 * k for k in ks]) and moco["alpha 4096"] == (ks, [k + 4096 for k in ks])
    assert moco["alpha K, drawn once"] == ([64], [128])
    # SimCLR's only such cell is on the line of alpha 255, which it would repeat
    assert [name for name, _, _ in drawn_lines(panels[1])] == ["alpha 255", "alpha 4096"]


def test_a_line_shows_where_others_coincide_with_it():
    study = STUDIES["mochi/figure-3b"]
    figure = draw(study, known(study, lambda at: 60.0))
    (panel,) = figure.axes
    count = len(drawn_lines(panel))
    panel.get_legend().remove()
    figure.set_dpi(150)  # as it is saved
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    seen = [(pixels == np.round(255 * np.array(to_rgb(colour(number))))).all(2).sum() for number in range(count)]
    assert count == 5 and min(seen) > 20, seen


def test_a_remark_stands_above_the_panels_whole():
    given = "data=/a/folder/with$dollars$/whose_path_is_long/train, backbone=resnet-tiny, epochs=1, evaluate.epochs=1"
    for id in ("jcl/figure-2a", "eqco/cifar10"):  # one panel, and three across
        figure = draw(STUDIES[id], known(STUDIES[id], lambda at: 60.0), f"Not the paper's: {given}")
        assert "".join(figure.get_suptitle().split()) == "".join(f"Not the paper's: {given}".split())
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        extent = figure._suptitle.get_window_extent()
        assert extent.x0 >= 0 and extent.x1 <= figure.bbox.width and extent.y1 <= figure.bbox.height
        assert extent.y0 >= max(panel.title.get_window_extent().y1 for panel in figure.axes)
    assert draw(STUDIES[id], known(STUDIES[id], lambda at: 60.0)).get_suptitle() == ""
