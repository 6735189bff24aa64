"""Runs that share a machine with kills, full disks, flipped bits and other people."""

import json
import os
import resource
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL as SMALL_WORDS
from conftest import Started, ask_forks, packed_shapes, surroundings
from safetensors import safe_open
from safetensors.torch import save_file

import unitsphere
from unitsphere.cli import main
from unitsphere.cli.evaluate import print_result
from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.common.files import replacing
from unitsphere.common.stopping import stop_on_request
from unitsphere.runs.run import Run
from unitsphere.training.log import Log, read_metrics
from unitsphere.weights import files
from unitsphere.weights.files import Damaged, load_tensors

SMALL = {"data": "shapes=64x16", "image_size": 16, "batch_size": 16, "queue_size": 32, "device": "cpu"}
SMALL |= {"backbone": "resnet-tiny", "tensorboard": False}
DATA = ["--data", "shapes=64x16", "--device", "cpu"]
LONG = ["pretrain", "moco-v2", "--data", str(packed_shapes()), "--recipe", "shapes", *SMALL_WORDS]
LONG += ["--epochs", "600", "--log-every", "3"]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run with a checkpoint after each of its three epochs."""
    out = tmp_path_factory.mktemp("three") / "run"
    return unitsphere.pretrain("moco-v2", out=out, epochs=3, save_every=1, keep_last=5, log_every=100, **SMALL).path


@pytest.fixture
def run(three, tmp_path):
    return Path(shutil.copytree(three, tmp_path / "run"))


def checkpoints(run):
    return [path for _, path in Run(run).checkpoints()]


def wait_for(condition, process):
    while process.poll() is None and not condition():
        time.sleep(0.01)


# Requests to stop


def assert_saved_on_request(run, status, said):
    assert status == 75, said
    assert checkpoints(run) and load_tensors(checkpoints(run)[-1])
    assert "stopped after step" in said and "--resume goes on from there" in said and "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_slurm_s_warning_and_a_lost_connection_save_and_stop(number, tmp_path):
    process = Started(*LONG, "--out", tmp_path / "run")
    wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), process)
    process.send_signal(number)
    done = process.completed()
    assert_saved_on_request(tmp_path / "run", done.returncode, done.stderr)
    assert done.stderr.splitlines()[-1].endswith(f"stopped by: {number.name}.")


@pytest.mark.parametrize("also_errors", [False, True])
def test_an_output_that_nobody_reads_saves_and_stops(also_errors, tmp_path):
    """As `| head -3` and `2>&1 | head -3` do."""
    pipe, errors = tmp_path / "pipe", tmp_path / "errors"
    os.mkfifo(pipe)
    errors.touch()
    words = [*LONG, "--out", str(tmp_path / "run")]
    outputs = {"stdout": str(pipe), "stderr": str(pipe if also_errors else errors)}
    pid = ask_forks(words=words, env=surroundings(None), cwd=os.getcwd(), **outputs)
    with open(pipe) as reader:
        assert all(reader.readline() for _ in range(3))
    late = time.monotonic() + 120
    while (status := ask_forks(pid=pid)) is None:
        if time.monotonic() > late:
            os.kill(pid, signal.SIGKILL)
            pytest.fail("the run did not stop")
        time.sleep(0.05)
    assert status == 75 and checkpoints(tmp_path / "run")
    if not also_errors:
        assert_saved_on_request(tmp_path / "run", status, errors.read_text())
        assert "nobody reads the output" in errors.read_text()


def test_before_the_first_step_a_request_to_stop_says_how_to_go_on(tmp_path):
    process = Started(*LONG[:2], "--data", "shapes=100000x64", *SMALL_WORDS, "--out", tmp_path / "run")
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    done = process.completed()
    assert done.returncode == 75 and "interrupted by SIGTERM; --resume" in done.stderr


def test_a_signal_that_is_ignored_stays_so_and_a_handler_of_the_user_s_stays_too():
    """nohup ignores SIGHUP, and who calls from Python may need SIGUSR1."""
    seen = []
    before = [
        signal.signal(signal.SIGHUP, signal.SIG_IGN),
        signal.signal(signal.SIGUSR1, lambda *_: seen.append("mine")),
    ]
    try:
        with stop_on_request() as who:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert who() == "" and seen == ["mine"]
            os.kill(os.getpid(), signal.SIGTERM)
            assert who() == "SIGTERM"
    finally:
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGUSR1, before[1])


def test_who_asks_for_fewer_epochs_is_told_how_a_run_ends_early(run, capsys):
    assert main(["pretrain", "--out", str(run), "--resume", "--epochs", "2"]) == 2
    said = capsys.readouterr().err
    assert "To end it early, stop it" in said and "evaluate" in said


# Checksums


def flip(path, at, bit=0):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def ways_in(run):
    return {
        "evaluate": ["evaluate", str(run), "--protocol", "knn", "--k", "5", *DATA],
        "embed": ["embed", str(run), "--out", str(run.parent / "features.npz"), *DATA],
        "resume": ["pretrain", "--out", str(run), "--resume", "--epochs", "4"],
    }


@pytest.mark.parametrize("way", ["evaluate", "embed", "resume"])
def test_a_flipped_bit_is_called_damage_and_the_checkpoint_before_is_taken(way, run, capsys):
    _, earlier, last = checkpoints(run)
    flip(last, last.stat().st_size // 2)
    assert main(ways_in(run)[way]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"{last} is damaged" in said and f"{earlier.name} is taken instead" in said
    if way == "resume":
        assert "resuming after step 8 of 16" in said and last.with_suffix(".damaged").exists()
    else:
        assert main([word if word != str(run) else str(last) for word in ways_in(run)[way]]) == 1
        assert "is damaged" in capsys.readouterr().err


def test_every_flipped_bit_is_found(run):
    """Or it lies where nothing does: what is read is then what was written."""
    path = checkpoints(run)[-1]
    tensors, meta = load_tensors(path)
    whole, random = path.read_bytes(), np.random.default_rng(0)
    (header,) = struct.unpack("<Q", whole[:8])
    places = [*random.integers(0, 8 + header, 150), *random.integers(8 + header, len(whole), 50)]
    other = path.with_name("other.safetensors")
    found = 0
    for place in places:
        other.write_bytes(whole)
        flip(other, int(place), int(random.integers(8)))
        try:
            read, about = load_tensors(other)
        except UnitsphereError:
            found += 1
            continue
        assert about == meta and read.keys() == tensors.keys()
        assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert found >= 195


def rewritten(path, change, meta=None):
    """The file with other tensors, but the metadata as it was written unless other is given."""
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors)
    save_file(tensors, path, metadata=meta(metadata) if meta else metadata)


def without_checksums(metadata):
    about = json.loads(metadata["unitsphere"])
    del about["checksums"]
    return {"unitsphere": json.dumps(about)}


WEIGHT = "method.online.backbone.stem.0.weight"
CHANGES = {
    "missing": (lambda t: t.pop(WEIGHT), None),
    "of another shape": (lambda t: t.update({WEIGHT: t[WEIGHT].reshape(-1)}), None),
    "no number": (lambda t: t[WEIGHT].view(-1)[0].fill_(torch.nan), None),
    "no number, without checksums": (lambda t: t[WEIGHT].view(-1)[0].fill_(torch.nan), without_checksums),
    "missing, without checksums": (lambda t: t.pop(WEIGHT), without_checksums),
    "of another shape, without checksums": (lambda t: t.update({WEIGHT: t[WEIGHT][:1].clone()}), without_checksums),
    "other metadata": (lambda t: None, lambda m: m | {"unitsphere": m["unitsphere"].replace("epoch", "epoxy")}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_that_lost_something_is_not_resumed_from(change, run, capsys):
    _, earlier, last = checkpoints(run)
    rewritten(last, *CHANGES[change])
    assert main(["pretrain", "--out", str(run), "--resume", "--epochs", "4"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"{last} is damaged" in said and f"{earlier.name} is taken instead" in said
    assert "resuming after step 8 of 16" in said


def test_files_without_checksums_load_with_one_notice(run, capsys, monkeypatch):
    monkeypatch.setattr(files, "told", set())
    one, other, _ = checkpoints(run)
    tensors, meta = load_tensors(one)
    for path in (one, other):
        rewritten(path, lambda tensors: None, without_checksums)
    assert capsys.readouterr().err == ""
    for _ in range(2):
        read, about = load_tensors(one)
        assert about == meta and all(torch.equal(read[name], tensors[name]) for name in tensors)
    load_tensors(other)
    assert capsys.readouterr().err.count("warning checksums:") == 1


def test_a_loss_that_is_lost_after_a_resume_names_an_older_checkpoint(run):
    _, earlier, last = checkpoints(run)
    said = Run(run).last_good()
    assert str(last) in said and f"the one before it {earlier.name}" in said


# Edited configurations


@pytest.mark.parametrize(
    ("field", "value", "was"), [("temperature", 0.3, 0.2), ("backbone", "resnet18", "resnet-tiny"), ("dim", 64, 128)]
)
def test_an_edited_configuration_is_refused_field_by_field(field, value, was, run, capsys):
    file = run / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {field: value, "weight_decay": 0.25}))
    before = checkpoints(run)
    for words in ([], ["--epochs", "4"], ["--dry-run"]):
        assert main(["pretrain", "--out", str(run), "--resume", *words]) == 2
        said = capsys.readouterr().err
        assert f"{field}: it is {value!r} now, and was {was!r} in training" in said
        assert "weight_decay: it is 0.25" in said and "config.json was edited" in said and "state_dict" not in said
    assert checkpoints(run) == before
    del fields["queue_size"]  # what it would be then is another value
    file.write_text(json.dumps(fields))
    assert main(["pretrain", "--out", str(run), "--resume"]) == 2
    assert "queue_size: it is" in capsys.readouterr().err


def test_fields_that_are_free_may_be_edited(run):
    file = run / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"log_every": 1, "epochs": 4}))
    assert main(["pretrain", "--out", str(run), "--resume"]) == 0
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [4, 8, 12, 13, 14, 15, 16]


# Permissions


@pytest.mark.parametrize("mask", [0o027, 0o002, 0o077])
def test_permissions_follow_the_umask(mask, tmp_path):
    before = os.umask(mask)
    try:
        run = unitsphere.pretrain("moco-v2", out=tmp_path / "run", epochs=1, **SMALL)
    finally:
        os.umask(before)
    made = [path for path in run.path.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o666 & ~mask} and len(made) > 6


def as_somebody_else(words, errors):
    """The status of a command by a user who owns nothing."""
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            os._exit(main([str(word) for word in words]))
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_permission_denied_is_said_as_such(three):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        run = Path(shutil.copytree(three, Path(folder, "run")))
        for path in checkpoints(run):
            path.chmod(0)
        errors = Path(folder, "errors")
        for what in (run, checkpoints(run)[-1]):
            assert as_somebody_else(["evaluate", what, "--protocol", "knn", *DATA], errors) == 1
            said = errors.read_text()
            assert "permission denied" in said.lower() and ".safetensors" in said and "--debug" not in said
        (run / "checkpoints").chmod(0)
        assert as_somebody_else(["evaluate", run, "--protocol", "knn", *DATA], errors) == 1
        assert "Permission denied" in errors.read_text() and "--debug" not in errors.read_text()
        (run / "checkpoints").chmod(0o755)


# Folders that vanish and disks that fill


def test_a_run_whose_folder_is_removed_ends_within_a_log_interval(tmp_path):
    steps = []

    def remove(record):
        steps.append(record["step"])
        if record["step"] == 3:
            shutil.rmtree(tmp_path / "run")

    with pytest.raises(UnitsphereError, match=r"metrics\.jsonl cannot be written: it was removed") as told:
        unitsphere.pretrain("moco-v2", out=tmp_path / "run", on_step=remove, epochs=50, log_every=2, **SMALL)
    assert steps[-1] == 4 and told.value.exit_status == 1
    assert not (tmp_path / "run").exists()


@pytest.fixture
def file_limit():
    """Files can grow no further than this: the operating system refuses, as for a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_metrics_that_cannot_be_written_say_what_is_kept_and_how_to_go_on(tmp_path, file_limit):
    def fill(record):
        if record["step"] == 6:
            file_limit((tmp_path / "run" / "metrics.jsonl").stat().st_size)

    with pytest.raises(UnitsphereError) as told:
        unitsphere.pretrain(
            "moco-v2", out=tmp_path / "run", on_step=fill, epochs=50, save_every=1, log_every=4, **SMALL
        )
    said = str(told.value)
    (kept,) = checkpoints(tmp_path / "run")
    assert "metrics.jsonl cannot be written: File too large" in said and str(kept) in said and "--resume" in said
    assert told.value.exit_status == 1


def test_tensorboard_s_file_is_written_without_a_thread_that_could_print_a_traceback(tmp_path, file_limit, capfd):
    threads = threading.active_count()
    log = Log(tmp_path / "metrics.jsonl", tmp_path / "events", 0)
    file_limit(log.events.path.stat().st_size)
    with pytest.raises(OSError, match=r"File too large.*events\.out"):
        log.write({"step": 1, "a": 1.0})
    log.close()
    assert threading.active_count() == threads and capfd.readouterr().err == ""


# What killed jobs leave


def dead_process(folder, name):
    """A process that dies while it writes."""
    pid = os.fork()
    if pid == 0:
        with replacing(folder / name) as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def test_the_next_job_clears_what_a_killed_one_left_and_nothing_of_a_living_one(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with replacing(folder / "slow") as alive:
        dead_process(folder, "one")
        dead_process(folder, "two")
        left = {path.name for path in folder.iterdir()} - {alive.name}
        assert len(left) == 1 and next(iter(left)).startswith(".two.")  # the second cleared what the first had left
        (folder / ".unknown.0a1b2c3d.tmp").touch()  # by another machine, or an earlier version: perhaps alive
        (folder / ".unknown.99999999-1-0a1b2c3d.tmp").touch()
        os.utime(folder / ".unknown.0a1b2c3d.tmp", (0, 0))
        code = "import sys; from pathlib import Path; from unitsphere.common.files import write_text; "
        subprocess.run([sys.executable, "-c", code + f"write_text(Path({str(folder / 'new')!r}), 'x')"], check=True)
        assert {path.name for path in folder.iterdir()} == {alive.name, "new", ".unknown.99999999-1-0a1b2c3d.tmp"}
        alive.write_text("whole")
    assert (folder / "slow").read_text() == "whole"


def test_sigterm_clears_up_as_ctrl_c_does(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    process = Started("pack", "shapes=20000x64", out / "shapes.pack")
    wait_for(lambda: any(out.iterdir()), process)
    process.send_signal(signal.SIGTERM)
    done = process.completed()
    assert done.returncode == 1 and "interrupted by SIGTERM" in done.stderr and not list(out.iterdir())


# Damaged side files and odd settings


def test_damaged_metrics_are_kept_aside_and_the_rest_goes_on(run, capsys):
    file = run / "metrics.jsonl"
    good = file.read_bytes().splitlines(keepends=True)
    broken = good[1][:20] + b"\xff" + good[1][21:]
    damaged = good[0] + broken + good[2] + b"[1]\n" + b"[" * 10**5 + b"\n" + b'{"loss": 1}\n'
    file.write_bytes(damaged)
    assert [line["step"] for line in read_metrics(file)] == [4, 12]
    assert "metrics.jsonl is damaged in 4 of its lines" in capsys.readouterr().err
    assert main(["pretrain", "--out", str(run), "--resume", "--epochs", "4"]) == 0
    assert "kept as metrics.jsonl.damaged" in " ".join(capsys.readouterr().err.split())
    assert (run / "metrics.jsonl.damaged").read_bytes() == damaged
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [4, 12, 16]


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b'{"a": 1}', b"[" * 10**5])
def test_damaged_results_are_kept_aside_and_a_new_one_is_not_lost(content, run, capsys):
    (run / "results.json").write_bytes(content)
    assert main(ways_in(run)["evaluate"]) == 0
    assert "results.json is damaged" in capsys.readouterr().err
    assert (run / "results.json.damaged").read_bytes() == content
    (result,) = Run(run).results()
    assert result["protocol"] == "knn"


ODD = {
    "lr": ["--lr", "1e308"],
    "weight_decay": ["--weight-decay", "1e308"],
    "base_lr": ["--base-lr", "1e308"],
    "queue_size": ["--queue-size", "9" * 17],
    "memory": ["--queue-size", "9" * 12],
    "image_size": ["--image-size", "9" * 30],
    "backbone": ["--backbone", ":x"],
    "home": ["--data", "~nouser/x"],
    "null": ["--out", "a\0b"],
    "long": ["--out", "o" * 300],
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_odd_settings_are_told_in_a_sentence(odd, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["pretrain", "moco-v2", *DATA, *SMALL_WORDS, "--out", "run", *ODD[odd]]
    assert main(words) == (1 if odd == "memory" else 2)
    said = capsys.readouterr().err
    assert "--debug" not in said and len(said) < 1000


DEEP = "[" * 10**5 + "]" * 10**5
CONFIGURATIONS = {
    "recipe.json": '{"method": "moco-v2", "data": "shapes=64x16", "recipe": -1}',
    "numbers.json": '{"method": 3, "data": 4, "backbone": 5}',
    "deep.json": '{"method": ' + DEEP + "}",
    "deep.toml": "method = " + DEEP,
    "keys.toml": '1 = 2\nmethod = "moco-v2"\ndata = "shapes=64x16"',
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_odd_configurations_are_told_in_a_sentence(name, tmp_path, capsys):
    (tmp_path / name).write_text(CONFIGURATIONS[name])
    assert main(["pretrain", "--config", str(tmp_path / name), "--out", str(tmp_path / "run")]) == 2
    assert "--debug" not in capsys.readouterr().err


def holds_itself():
    table = {}
    table["model"] = table
    return table


@pytest.mark.parametrize("content", [{1: torch.zeros(2)}, holds_itself(), {"model": {2: 3}}, [torch.zeros(2)]])
def test_odd_torch_files_are_told_in_a_sentence(content, tmp_path, capsys):
    torch.save(content, tmp_path / "odd.pt")
    assert main(["evaluate", str(tmp_path / "odd.pt"), "--protocol", "knn", *DATA]) == 2
    said = capsys.readouterr().err
    assert "odd.pt" in said and "--debug" not in said


# Weights that are no numbers


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_start_from_weights_that_are_no_numbers_is_refused_before_step_1(value, three, tmp_path):
    tensors = load_tensors(checkpoints(three)[-1])[0]
    own = {name.removeprefix("method.online.backbone."): t.clone() for name, t in tensors.items() if "backbone" in name}
    own["stem.0.weight"].view(-1)[3] = value
    torch.save(own, tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"weights\.pt has weights that are infinite or no numbers, stem\.0\.weight"):
        unitsphere.pretrain("moco-v2", out=tmp_path / "run", init=str(tmp_path / "weights.pt"), epochs=1, **SMALL)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("judged", "share"), [(1, "100 %"), (3, "33.3 %"), (20, "5 %")])
def test_the_share_of_one_image_is_a_plain_number(judged, share, capsys):
    result = {"protocol": "knn", "data": "x", "value": {"k=5": 100.0}, "constants": {}, "images": {"test": judged}}
    print_result(result | {"backbone": "x", "epoch": 1, "features": "backbone"})
    assert f"of which one is {share}." in capsys.readouterr().err


def test_a_damaged_file_of_a_run_is_an_error_on_the_way():
    assert Damaged("x").exit_status == 1
