"""`torchrun ... -m unitsphere pretrain`: real processes, from the command line to the checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import SMALL, command, packed_shapes

from unitsphere.runs.run import Run

ARGUMENTS = [
    *["pretrain", "moco-v2", "--data", packed_shapes(), "--recipe", "shapes", *SMALL, "--epochs", "4"],
    *["--log-every", "5", "--lr", "0.02", "--tensorboard", "false", "--precision", "fp32", "--knn-every", "2"],
]
# Few steps: float32 summed in another order once lets a rectifier open that else stays shut, and over dozens of steps
# that grows as large as anything (two threads in place of one do the same). tests/test_ranks.py is exact, in float64.
SHORT = [*ARGUMENTS, "--data", packed_shapes(64), "--epochs", "2", "--knn-every", "1", "--log-every", "1"]


def torchrun(processes, *words):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.Popen(
        [*start, "-m", "unitsphere", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def finish(process):
    out, errors = process.communicate(timeout=240)
    return process.returncode, out, errors


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    done = command(*SHORT, "--out", out)
    assert done.returncode == 0, done.stderr
    return out


def measured(run, name="loss"):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def assert_close(one, other):
    ours, theirs = (Run.open(run).latest()[0] for run in (one, other))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert (ours[name] - theirs[name]).double().norm() <= 3e-3 * theirs[name].double().norm() + 1e-4, name


def test_two_processes_train_as_one_and_only_the_first_writes(alone, tmp_path):
    status, out, errors = finish(torchrun(2, *SHORT, "--out", tmp_path / "run"))
    assert status == 0, errors
    assert measured(tmp_path / "run") == pytest.approx(measured(alone), rel=2e-3)
    for name in ("effective_rank", "uniformity"):  # of the whole batch
        assert measured(tmp_path / "run", name) == pytest.approx(measured(alone, name), rel=1e-2)
    # of 500 queries a few may change sides with the rounding; tests/test_ranks.py is exact about equal weights
    assert measured(tmp_path / "run", "knn") == pytest.approx(measured(alone, "knn"), abs=1.0)
    assert len(measured(alone, "knn")) == 2
    assert_close(tmp_path / "run", alone)
    assert out.count("steps an epoch") == 1 and errors.count("without labels:") == 1
    assert len(json.loads((tmp_path / "run" / "results.json").read_text())) == 1


def test_a_run_resumes_on_another_number_of_processes(alone, tmp_path):
    shorter = [*SHORT, "--out", str(tmp_path / "run")]
    process = torchrun(2, *shorter, "--save-minutes", "0.001")
    while process.poll() is None and not (tmp_path / "run" / "metrics.jsonl").exists():
        time.sleep(0.002)
    for child in children(process.pid):
        os.kill(child, signal.SIGTERM)
        break  # one rank is asked, and all stop
    status, _, errors = finish(process)
    if status == 0:
        pytest.skip("the run was over before it could be stopped")
    assert errors.count("--resume goes on from there") == 1 and Run.open(tmp_path / "run").checkpoints(), errors
    done = command(*shorter, "--save-minutes", "0.001", "--resume")
    assert done.returncode == 0, done.stderr
    assert_close(tmp_path / "run", alone)


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def test_a_rank_that_is_killed_ends_the_job(tmp_path):
    process = torchrun(2, *ARGUMENTS, "--epochs", "400", "--out", tmp_path / "run")
    while process.poll() is None and not (tmp_path / "run" / "metrics.jsonl").exists():
        time.sleep(0.05)
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    status, _, errors = finish(process)
    assert status != 0 and "SIGKILL" in errors
    assert "unitsphere: another process died" in errors and "RuntimeError" not in errors
    assert not children(process.pid)


def test_mistakes_are_told_once(tmp_path):
    status, _, errors = finish(
        torchrun(2, *ARGUMENTS, "--batch-size", "15", "--bn-groups", "1", "--out", tmp_path / "r")
    )
    assert status != 0 and errors.count("multiple of 2") == 1
    assert not (tmp_path / "r").exists()
