"""Stopped anywhere and resumed equals never stopped: real processes, real signals, bit for bit."""

import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import SMALL, Started, command, packed_shapes, write_images

from unitsphere.runs.run import Run

DATA = ["--data", str(packed_shapes()), "--recipe", "shapes"]
ARGUMENTS = ["pretrain", "moco-v2", *DATA, *SMALL, "--epochs", "6", "--log-every", "3"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def start(out, *more):
    return Started(*ARGUMENTS, "--out", out, *more)


def wait_for_step(run, step, process):
    """Until metrics.jsonl has reached a step, or the process has ended."""
    while process.poll() is None:
        lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
        if lines and lines[-1].endswith("}") and json.loads(lines[-1])["step"] >= step:
            return
        time.sleep(0.01)


def weights(run):
    return Run.open(run).latest()[0]


def metrics(run):
    """All that does not depend on the clock."""
    clock = {"images_per_second", "wait_share"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in clock} for line in lines]


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    done = command(*ARGUMENTS, "--out", out)
    assert done.returncode == 0, done.stderr
    return out


def test_killed_at_random_moments_and_resumed_equals_never_stopped(tmp_path, never_stopped):
    chance = random.Random(time.time_ns())
    out = tmp_path / "run"
    reached = 0
    for _ in range(3):
        process = start(out, "--resume", "--save-minutes", "0.0005")
        wait_for_step(out, min(reached + chance.randint(3, 18), 55), process)
        time.sleep(chance.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
        reached = max([step for step, _ in Run(out).checkpoints()], default=0)
    done = start(out, "--resume", "--save-minutes", "0.0005").completed()
    assert done.returncode == 0, done.stderr
    assert_same(weights(out), weights(never_stopped))
    assert metrics(out) == metrics(never_stopped)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_says_so_and_can_be_resumed(number, tmp_path, never_stopped):
    out = tmp_path / "run"
    process = start(out)
    wait_for_step(out, 6, process)
    process.send_signal(number)
    stopped = process.completed()
    assert stopped.returncode == 75
    assert all(word in stopped.stderr for word in ("stopped after step", "--resume"))
    assert "Traceback" not in stopped.stderr
    stopped_at = Run(out).checkpoints()[-1][0]
    assert 6 <= stopped_at < 60
    done = command(*ARGUMENTS, "--out", out, "--resume")
    assert done.returncode == 0, done.stderr
    assert_same(weights(out), weights(never_stopped))
    assert metrics(out) == metrics(never_stopped)


def test_a_finished_run_goes_on_under_a_longer_schedule(tmp_path):
    out = tmp_path / "run"
    assert command(*ARGUMENTS, "--out", out, "--epochs", "2").returncode == 0
    before = weights(out)
    done = command("pretrain", "--out", out, "--resume", "--epochs", "4")
    assert done.returncode == 0, done.stderr
    lines = metrics(out)
    assert lines[-1]["epoch"] == 4 and lines[-1]["step"] == 40
    third = next(line for line in lines if line["epoch"] == 3)
    assert third["lr"] == pytest.approx(Run.open(out).config.learning_rate / 2)  # the longer cosine, at its middle
    assert int(weights(out)["method.queue.pushed"]) == 40 * 16
    assert not torch.equal(before["method.online.head.0.weight"], weights(out)["method.online.head.0.weight"])


def test_of_two_processes_in_one_folder_the_second_is_refused_and_a_kill_leaves_no_lock(tmp_path, never_stopped):
    out = tmp_path / "run"
    process = start(out, "--save-minutes", "0.0005")
    wait_for_step(out, 3, process)
    process.send_signal(signal.SIGSTOP)  # or it might be done before the second has begun
    second = command(*ARGUMENTS, "--out", out, "--resume")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert second.returncode == 2
    assert f"is being trained by another process ({process.pid} on {platform.node()})" in second.stderr
    done = command(*ARGUMENTS, "--out", out, "--resume")
    assert done.returncode == 0, done.stderr
    assert metrics(out) == metrics(never_stopped)


def test_without_locks_runs_are_made_all_the_same(tmp_path):
    """As on Windows, where there is no fcntl."""
    code = (
        "import sys; sys.modules['fcntl'] = None; from pathlib import Path; from unitsphere.runs.run import Run; "
        f"run = Run(Path({str(tmp_path / 'run')!r})); run.lock().close(); run.add_result({{}}); print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.stdout == "done\n", done.stderr


def test_what_changes_nothing_that_is_computed_may_change_on_resume(tmp_path, never_stopped):
    out = tmp_path / "run"
    assert command(*ARGUMENTS, "--out", out, "--epochs", "1").returncode == 0
    words = "--workers 1 --resident false --max-broken 0.5 --save-every 1 --keep-last 5 --keep-epochs 2 --knn-every 3"
    words += " --tensorboard false --compile false --record false --save-minutes 9 --device auto --accumulate 1"
    done = command(
        "pretrain", "--out", out, "--resume", "--epochs", "6", *words.split(), env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in Run(out).checkpoints()] == [20, 30, 40, 50, 60]
    # the first epoch of a longer schedule has the same rate as that of a short one
    assert_same(weights(out), weights(never_stopped))
    refused = command("pretrain", "--out", out, "--resume", "--precision", "fp32")
    assert refused.returncode == 2 and "precision" in refused.stderr and "save_every" in refused.stderr


def test_data_given_as_a_relative_path_is_found_from_elsewhere_when_it_is_given_again(tmp_path):
    write_images(tmp_path / "photos", 40)
    (tmp_path / "elsewhere").mkdir()
    words = ["pretrain", "moco-v2", "--data", "./photos", "--out", "run", *SMALL, "--epochs", "1"]
    assert command(*words, cwd=tmp_path).returncode == 0
    words = ["pretrain", "--out", "../run", "--resume", "--epochs", "2"]
    done = command(*words, cwd=tmp_path / "elsewhere")
    assert done.returncode == 2 and f"begun in {tmp_path} with --data ./photos; give --data" in done.stderr, done.stderr
    done = command(*words, "--data", "../photos", cwd=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    write_images(tmp_path / "others", 41)
    done = command(*words[:-1], "3", "--data", "../others", cwd=tmp_path / "elsewhere")
    assert done.returncode == 2 and "same images" in done.stderr


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(tmp_path):
    out = tmp_path / "run"
    assert command(*ARGUMENTS, "--out", out, "--epochs", "3", "--save-every", "1").returncode == 0
    whole = {name: tensor.clone() for name, tensor in weights(out).items()}  # those are mapped from the file
    lines = metrics(out)
    (_, good), (_, bad) = Run(out).checkpoints()
    bad.write_bytes(bad.read_bytes()[:1000])
    done = command("pretrain", "--out", out, "--resume", "--keep-last", "1")
    assert done.returncode == 0, done.stderr
    assert bad.name in done.stderr and f"{good.name} is taken" in done.stderr
    assert "resuming after step 20 of 30" in done.stderr
    assert_same(weights(out), whole)
    assert metrics(out) == lines
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000030.damaged", bad.name]


def test_a_damaged_configuration_is_named(tmp_path, never_stopped):
    shutil.copytree(never_stopped, tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    for text in (file.read_text()[:100], json.dumps(json.loads(file.read_text()) | {"temperature": 0})):
        file.write_text(text)
        done = command("pretrain", "--out", tmp_path / "run", "--resume")
        assert done.returncode == 2 and str(file) in done.stderr


def test_a_resume_says_only_what_is_new_and_estimates_what_is_left(never_stopped):
    done = command("pretrain", "--out", never_stopped, "--resume", "--epochs", "9", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "90 steps, of which 30 are left" in done.stdout and "for 30 steps of" in done.stdout.replace("\n", " ")
    done = command("pretrain", "--out", never_stopped, "--resume")
    assert len(done.stdout.splitlines()) == 1 and "resuming after step 60 of 60" in done.stderr
    done = command("pretrain", "--out", never_stopped, "--resume", "--log-every", "4")
    assert [line.split()[0] for line in done.stdout.splitlines()[1:-1]] == ["log_every"]


def test_nothing_else_may_change_on_resume(never_stopped):
    for wrong, said in (
        (["--temperature", "0.5"], "temperature"),
        (["--seed", "3"], "seed"),
        (["--epochs", "3"], "epochs"),
    ):
        done = command("pretrain", "--out", never_stopped, "--resume", *wrong)
        assert done.returncode == 2 and said in done.stderr


def test_an_existing_run_is_not_overwritten_and_a_missing_one_starts_with_resume(tmp_path, never_stopped):
    before = (never_stopped / "metrics.jsonl").read_text()
    done = command(*ARGUMENTS, "--out", never_stopped)
    assert done.returncode == 2 and "--resume" in done.stderr
    assert (never_stopped / "metrics.jsonl").read_text() == before
    (tmp_path / "empty").mkdir()
    done = command(*ARGUMENTS, "--out", tmp_path / "empty", "--resume", "--epochs", "1")
    assert done.returncode == 0, done.stderr


def test_the_saved_configuration_starts_the_same_run_again(tmp_path, never_stopped):
    done = command("pretrain", "--config", never_stopped / "config.json", "--out", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    assert_same(weights(tmp_path / "again"), weights(never_stopped))


def test_another_seed_is_another_run(tmp_path, never_stopped):
    assert command(*ARGUMENTS, "--out", tmp_path / "run", "--seed", "1").returncode == 0
    name = "method.online.head.0.weight"
    assert not torch.equal(weights(tmp_path / "run")[name], weights(never_stopped)[name])


COMMON = [
    "--backbone",
    "resnet-tiny",
    "--image-size",
    "16",
    "--batch-size",
    "16",
    "--device",
    "cpu",
    "--log-every",
    "3",
]
METHODS = {
    "simclr": ["--negatives", "6", "--both-views", "false", "--warmup-epochs", "1"],
    "simo": ["--negatives", "6", "--warmup-epochs", "1"],
    "jcl+mochi+eqco": [
        "--queue-size",
        "64",
        "--bn-groups",
        "2",
        "--hardest",
        "16",
        "--pairs",
        "8",
        "--with-query",
        "4",
    ],
    "byol": ["--hidden", "32", "--dim", "16", "--optimizer", "lars", "--warmup-epochs", "1"],
    "msbreg": ["--hidden", "32", "--dim", "16", "--warmup-epochs", "1"],
    "supervised": [],
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_killed_and_resumed_equals_never_stopped(method, tmp_path):
    """Memories, slow copies, schedules of lambda and momentum, mixing after its warm-up: all go on."""
    words = ["pretrain", method, *DATA, *COMMON, *METHODS[method], "--epochs", "4"]
    if "mochi" in method:
        words += ["--mixing-warmup", "2"]
    assert (done := command(*words, "--out", tmp_path / "whole")).returncode == 0, done.stderr
    again = [*words, "--out", tmp_path / "run", "--resume", "--save-minutes", "0.0005"]
    process = Started(*again)
    wait_for_step(tmp_path / "run", random.Random(time.time_ns()).randint(3, 30), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (done := command(*again)).returncode == 0, done.stderr
    assert_same(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
