"""Hooks of a user's own: they see the run, add metrics, stop it, and lose nothing when they fail."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from test_ranks import on_two_ranks
from torch import distributed as dist

import unitsphere
from unitsphere import StopTraining
from unitsphere.common.errors import UnitsphereError
from unitsphere.runs.run import Run
from unitsphere.training.hooks import HookFailed
from unitsphere.training.loop import Stopped

# 54 images to train on are 3 steps an epoch, 9 in all; a line every 2 steps and at the end of each epoch.
SMALL = {"backbone": "resnet-tiny", "image_size": 16, "batch_size": 16, "queue_size": 64, "bn_groups": 2, "epochs": 3}
SMALL |= {"device": "cpu", "tensorboard": False, "log_every": 2, "precision": "fp32", "warmup_epochs": 0}
LINES = [2, 3, 4, 6, 8, 9]
CLOCK = {"images_per_second", "wait_share"}


def pretrain(out, on_step=None, on_epoch=None, **fields):
    method = None if "resume" in fields else "moco-v2"
    pictures = np.random.default_rng(0).integers(0, 255, (54, 20, 18, 3), dtype=np.uint8)
    fields = fields if method is None else SMALL | fields
    return unitsphere.pretrain(method, data=pictures, out=out, on_step=on_step, on_epoch=on_epoch, **fields)


def lines(run):
    """The metrics of a run, but not those of the clock."""
    found = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in CLOCK} for line in found]


def assert_same_weights(one, other):
    ours, theirs = (run.latest()[0] for run in (one, other))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    return pretrain(tmp_path_factory.mktemp("without") / "run", holdout=0.0)


def test_hooks_see_every_step_and_every_epoch_and_change_nothing(tmp_path, without):
    steps, epochs = [], []

    def on_step(record):
        steps.append(dict(record))
        record.clear()  # it is theirs
        torch.rand(3)

    def on_epoch(record):
        epochs.append(dict(record))
        record.clear()
        torch.rand(3)

    run = pretrain(tmp_path / "run", on_step, on_epoch, holdout=0.0)
    assert [(each["step"], each["epoch"]) for each in steps] == [(step, 1 + (step - 1) // 3) for step in range(1, 10)]
    assert all(isinstance(value, int | float) for record in epochs for value in record.values())
    assert [{k: v for k, v in record.items() if k not in CLOCK} for record in epochs] == [
        line for line in lines(run) if line["step"] % 3 == 0
    ]
    assert lines(run) == lines(without)
    assert_same_weights(run, without)


def test_the_record_of_an_epoch_has_the_online_knn(tmp_path):
    epochs = []
    fields = SMALL | {"knn_every": 2, "data": "shapes=64x16"}
    unitsphere.pretrain("moco-v2", out=tmp_path / "run", on_epoch=epochs.append, **fields)
    assert [record.get("knn", -1.0) >= 0 for record in epochs] == [False, True, False]


def test_metrics_of_hooks_are_written_as_means_of_steps_and_as_they_are_of_epochs(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def on_step(record):
        step = record["step"]
        return {"square": step**2, "tiny": np.float32(2**-30)} | ({"odd": torch.tensor(step)} if step % 2 else {})

    def on_epoch(record):
        return {"seen": record["square"] + 0.5, "nan": math.nan}

    run = pretrain(tmp_path / "run", on_step, on_epoch, tensorboard=True)
    found = lines(run)
    # square: over the steps since the last line; odd: over those that gave it, and absent where none did
    assert [line["square"] for line in found] == [2.5, 9.0, 16.0, 30.5, 56.5, 81.0]
    assert [line.get("odd") for line in found] == [1.0, 3.0, None, 5.0, 7.0, 9.0]
    assert all(line["tiny"] == 2**-30 for line in found)
    assert [line.get("seen") for line in found] == [None, 9.5, None, 31.0, None, 81.5]
    assert all(("nan" in line) == (line["step"] % 3 == 0) and line.get("nan") is None for line in found)
    events = EventAccumulator(str(run.path / "events"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("square")] == [
        (line["step"], line["square"]) for line in found
    ]
    assert [event.step for event in events.Scalars("seen")] == [3, 6, 9]


def raises(at):
    def hook(record):
        if record["step"] == at:
            raise StopTraining
        return {"given": record["step"]}

    return hook


def returns(at):
    return lambda record: StopTraining if record["step"] == at else {"given": record["step"]}


@pytest.mark.parametrize("name", ["on_step", "on_epoch"])
@pytest.mark.parametrize("stopping", [raises, returns])
def test_a_run_that_a_hook_stops_is_saved_and_resumes_as_if_never_stopped(name, stopping, tmp_path):
    """In the middle of a line's steps for on_step: what they have given so far is not lost."""
    at = 5 if name == "on_step" else 6
    with pytest.raises(Stopped, match=rf"stopped after step {at} \(epoch 2\); --resume goes on"):
        pretrain(tmp_path / "run", **{name: stopping(at)})
    run = Run(tmp_path / "run")
    assert run.checkpoints()[-1][0] == at and lines(run)[-1]["step"] == (4 if name == "on_step" else 6)

    def gives(record):  # all that the hook gives which does not stop
        return None if record["step"] == at else {"given": record["step"]}

    whole = pretrain(tmp_path / "whole", **{name: gives})
    pretrain(run.path, resume=True, **{name: gives})
    assert lines(run) == lines(whole) and "given" in lines(whole)[1]
    assert_same_weights(run, whole)


@pytest.mark.parametrize("name", ["on_step", "on_epoch"])
def test_a_stop_after_the_last_step_changes_nothing(name, tmp_path):
    run = pretrain(tmp_path / "run", **{name: raises(9)})
    assert [line["step"] for line in lines(run)] == LINES and run.results()


@pytest.mark.parametrize("name", ["on_step", "on_epoch"])
def test_a_hook_that_fails_is_named_after_the_run_is_saved(name, tmp_path, without):
    def fail(record):
        if record["epoch"] == 2:
            raise ZeroDivisionError("no such luck")

    with pytest.raises(UnitsphereError, match=f"{name} failed.*ZeroDivisionError: no such luck") as told:
        pretrain(tmp_path / "run", holdout=0.0, **{name: fail})
    assert isinstance(told.value.__cause__, ZeroDivisionError)
    run, at = Run(tmp_path / "run"), 4 if name == "on_step" else 6
    assert f"after step {at}:" in str(told.value) and str(run.checkpoints()[-1][1]) in str(told.value)
    assert run.checkpoints()[-1][0] == at and lines(run)[-1]["step"] == at  # the line is written all the same
    pretrain(run.path, resume=True)
    assert lines(run) == lines(without)
    assert_same_weights(run, without)


NO_METRICS = [[1.0], "words", {"a": "b"}, {1: 1.0}, {"a": None}, 7, {"loss": 1.0}, {"step": 1}]


@pytest.mark.parametrize(
    ("name", "given"), [*(("on_step", given) for given in NO_METRICS), ("on_epoch", 7), ("on_epoch", {"loss": 1.0})]
)
def test_what_is_no_metric_is_refused(name, given, tmp_path):
    with pytest.raises(HookFailed, match=f"{name} failed after step {1 if name == 'on_step' else 3}"):
        pretrain(tmp_path / "run", **{name: lambda record: given})


@pytest.mark.parametrize("name", ["lr", "contrastive_accuracy", "wait_share", "evenness"])
def test_no_name_of_a_line_can_be_taken_by_a_hook(name, tmp_path, without):
    assert name in json.loads(without.metrics_file.read_text().splitlines()[0])
    with pytest.raises(HookFailed, match=f"after step 1: .*'{name}', which the run measures itself"):
        pretrain(tmp_path / name, on_step=lambda record: {name: 1.0})


def test_a_hook_is_named_even_if_nothing_can_be_saved(tmp_path):
    def fail(record):
        shutil.rmtree(tmp_path / "run" / "checkpoints")
        (tmp_path / "run" / "checkpoints").write_text("a file")
        raise OSError("disk full")

    with pytest.raises(HookFailed, match=r"on_step failed after step 1: OSError: disk full.*no checkpoint yet"):
        pretrain(tmp_path / "run", on_step=fail)


def test_a_hook_that_is_interrupted_interrupts(tmp_path):
    def interrupt(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(tmp_path / "run", on_step=interrupt)


def stories(folder):
    """What a rank has seen of three runs: one that ends, one that a hook stops, and one whose hook fails."""
    calls = []
    run = pretrain(folder / "run", lambda record: calls.append(1), lambda record: {"mine": record["epoch"]})
    said = {}
    for name, hook in (("stopped", {"on_step": raises(5)}), ("failed", {"on_epoch": lambda record: 1 / 0})):
        try:
            pretrain(folder / name, **hook)
        except UnitsphereError as error:
            said[name] = f"{type(error).__name__}: {error}"
    pretrain(folder / "stopped", resume=True)
    every = [None, None]
    dist.all_gather_object(every, (len(calls), said))
    return {
        "mine": [line.get("mine") for line in lines(run)],
        "calls": [n for n, _ in every],
        "said": [s for _, s in every],
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return folder, on_two_ranks(folder, stories, folder)


def test_of_two_ranks_the_first_calls_the_hooks(two_ranks):
    _, found = two_ranks
    assert found["calls"] == [9, 0]
    assert found["mine"] == [None, 1, None, 2, None, 3]


def test_two_ranks_stop_together_when_a_hook_asks(two_ranks):
    folder, found = two_ranks
    assert all(said["stopped"].startswith("Stopped: stopped after step 5 (epoch 2)") for said in found["said"])
    run, whole = Run(folder / "stopped"), Run(folder / "run")  # which had other hooks, and the same weights
    assert [line["loss"] for line in lines(run)] == [line["loss"] for line in lines(whole)]
    for name, tensor in run.latest()[0].items():  # to stop, ranks average their running statistics once more
        torch.testing.assert_close(tensor, whole.latest()[0][name], rtol=1e-5, atol=1e-7)


def test_two_ranks_end_together_when_a_hook_fails(two_ranks):
    folder, found = two_ranks
    first, second = (said["failed"] for said in found["said"])
    assert first.startswith("HookFailed: on_epoch failed after step 3: ZeroDivisionError: division by zero.")
    assert second.startswith("Stopped: stopped after step 3") and Run(folder / "failed").checkpoints()[-1][0] == 3
