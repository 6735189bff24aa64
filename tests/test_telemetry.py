"""A collapse, a starving loader, a NaN and too little memory are said aloud, with what to do."""

import io
import json
import math

import pytest
import torch
from rich.console import Console

from unitsphere.common.devices import memory_errors
from unitsphere.common.errors import UnitsphereError
from unitsphere.common.terminal import Terminal
from unitsphere.objectives.geometry import effective_rank, uniformity
from unitsphere.training.log import Log, read_metrics
from unitsphere.training.telemetry import Meter, check_finite, spread, warnings

HEALTHY = {"step": 100, "feature_deviation": 0.8, "effective_rank": 30.0, "wait_share": 0.02}


def test_a_healthy_run_is_left_in_peace():
    assert list(warnings(HEALTHY, 256)) == []


@pytest.mark.parametrize(
    ("sign", "said"),
    [
        ({"feature_deviation": 0.01}, ["collapse", "0.010", "--lr"]),
        ({"effective_rank": 1.1}, ["collapse", "1.1", "--lr"]),
        ({"effective_rank": 2.6, "feature_deviation": 0.18}, ["collapse", "in a few directions", "2.6", "0.180"]),
        ({"wait_share": 0.6}, ["starving", "60%", "unitsphere pack", "--workers"]),
    ],
)
def test_what_is_wrong_is_named_with_the_number_that_shows_it_and_what_to_do(sign, said):
    (warning,) = warnings(HEALTHY | sign, 256)
    assert all(part in warning for part in said)


def test_few_directions_are_a_collapse_only_where_the_images_hardly_differ_and_are_many():
    few = {"effective_rank": 3.3, "feature_deviation": 0.57}
    assert list(warnings(HEALTHY | few, 256)) == []
    assert list(warnings(HEALTHY | few | {"feature_deviation": 0.2}, 8)) == []


def test_forces_are_advised_to_methods_that_can_have_them():
    collapsed = HEALTHY | {"feature_deviation": 0.01}
    assert "--singular-weight" in next(warnings(collapsed, 256))
    assert "--singular-weight" not in next(warnings(collapsed, 256, forces=False))


def test_two_images_always_lie_on_a_line():
    assert (
        list(warnings(HEALTHY | {"effective_rank": 1.0}, 2))
        == []
        != list(warnings(HEALTHY | {"effective_rank": 1.0}, 3))
    )


def test_a_fresh_network_is_not_called_collapsed():
    assert list(warnings(HEALTHY | {"step": 3, "feature_deviation": 0.01}, 256)) == []


def test_real_embeddings_are_told_apart_from_collapsed_ones():
    torch.manual_seed(0)
    spread_out = spread(torch.nn.functional.normalize(torch.randn(256, 32), dim=1))
    collapsed = spread(torch.nn.functional.normalize(torch.randn(1, 32) + 1e-4 * torch.randn(256, 32), dim=1))
    assert list(warnings(HEALTHY | spread_out, 256)) == []
    assert any("collapse" in warning for warning in warnings(HEALTHY | collapsed, 256))


def test_of_many_wide_embeddings_some_are_looked_at():
    wide, narrow = torch.randn(300, 260), torch.randn(300, 250)
    assert spread(wide)["effective_rank"] == float(effective_rank(wide[:256]))
    assert spread(narrow)["effective_rank"] == float(effective_rank(narrow))
    assert spread(wide)["uniformity"] == float(uniformity(wide))  # on the device, which has the time


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_the_run(loss):
    with pytest.raises(UnitsphereError, match=r"step 7.*lower --lr"):
        check_finite(loss, 7, "There is no checkpoint yet.")


def test_running_out_of_memory_says_what_to_lower():
    with pytest.raises(UnitsphereError, match="Lower --batch-size"), memory_errors("Lower --batch-size."):
        torch.empty(10**14)
    with pytest.raises(RuntimeError, match="size"), memory_errors("Lower --batch-size."):
        torch.zeros(2) @ torch.zeros(3)


def test_means_are_over_all_steps_since_the_last_line():
    meter = Meter()
    for value in (1.0, 2.0, 6.0):
        meter.add({"loss": torch.tensor(value)}, images=10, waited=0.0)
    assert meter.read()["loss"] == pytest.approx(3.0)


def test_a_line_says_how_near_the_own_key_and_the_others_are_and_a_legend_explains_it_once():
    said = io.StringIO()
    terminal = Terminal(steps=30, epochs=3, console=Console(file=said))
    record = {"epoch": 1, "loss": 5.772, "log_k": 6.93, "positive_similarity": 0.879, "negative_similarity": -0.052}
    record |= {"wait_share": 0.0, "images_per_second": 1833.4}
    for step in (10, 20, 30):  # the second is too soon after the first
        terminal.advance(step)
        terminal.line(record | {"step": step})
    legend, *lines = said.getvalue().splitlines()
    assert legend.startswith("legend: guessing: ") and "own key, others: mean cosine similarity" in legend
    assert "rank" not in legend and "k-NN" not in legend  # this method's lines have none
    assert len(lines) == 2
    assert lines[0].startswith("epoch 1/3  loss 5.772 (guessing 6.93)  own key 0.88, others -0.05  1,833 images/s")


def test_opening_the_log_drops_what_lies_after_the_step_resumed_from_and_a_line_cut_short(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 5}\n{"step": 9}\n{"st')
    log = Log(path, None, from_step=5)
    log.write({"step": 6, "highest_pair": math.nan})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 5, 6]
    assert path.read_text().endswith('{"step": 6, "highest_pair": null}\n')  # there is no NaN in JSON
    assert [line["step"] for line in read_metrics(path)] == [1, 5, 6]
