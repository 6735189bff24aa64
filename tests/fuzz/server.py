"""A fork server: one process imports everything, and each input is run in a fork of it."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .corpus import Bases, make_input

SECONDS = 30  # an input that takes longer hangs
MEMORY = 2 * 2**30  # bytes that an input may map beyond what the server has
STATUSES = {0, 1, 2}


@dataclass
class Verdict:
    """What became of one input. problem: None where the command did as it should."""

    seed: int
    kind: str
    words: list[str]
    status: int
    seconds: float
    mib: float
    problem: str | None
    told: str


def warm_up() -> None:
    """Import what any command needs, and start no thread."""
    import torch

    torch.set_num_threads(1)
    for name in (
        "unitsphere.cli", "unitsphere.jobs.pretrain", "unitsphere.evaluation.evaluate", "unitsphere.evaluation.embed",
        "unitsphere.data.commands", "unitsphere.evaluation.knn",
    ):  # fmt: skip
        __import__(name)
    from unitsphere.images.decode import formats, jpeg_decoder

    formats(), jpeg_decoder()
    with suppress(ImportError):
        import pyarrow.parquet  # noqa: F401


def forked(work, output: Path) -> int:
    """The number of a process that does this, with its output in a file."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        status = work()
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    except BaseException as problem:
        print(f"Traceback of the fuzzer: {type(problem).__name__}: {problem}", file=sys.stderr)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def waited(pid: int, seconds: float) -> tuple[int | None, float]:
    """The exit status (negative for a signal, None for one that had to be killed), and the most MiB it held."""
    late = time.monotonic() + seconds
    pause = 0.002
    while True:
        ended, found, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(found), usage.ru_maxrss / 1024
        if time.monotonic() > late:
            os.killpg(pid, signal.SIGKILL)
            _, _, usage = os.wait4(pid, 0)
            return None, usage.ru_maxrss / 1024
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)


def run_all(count: int, first: int = 0, kinds: list[str] | None = None) -> Iterator[Verdict]:
    """Run the inputs of `count` seeds, one after another."""
    warm_up()
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    os.environ.update({"XDG_CACHE_HOME": str(place / "cache"), "COLUMNS": "120"})
    try:
        bases = Bases(place / "bases")
        bases.folder.mkdir()
        status, _ = waited(forked(lambda: bases.make() or 0, place / "made"), 300)
        if status != 0:
            raise RuntimeError(f"the sound files could not be made:\n{(place / 'made').read_text()}")
        for seed in range(first, first + count):
            yield run_one(bases, place / "input", seed, kinds)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def run_one(bases: Bases, folder: Path, seed: int, kinds: list[str] | None) -> Verdict:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "files").mkdir(parents=True)
    made = make_input(bases, folder / "files", seed, kinds)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

    def work() -> int:
        from unitsphere.cli import main

        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
        os.chdir(folder / "files")
        return main(made.words)

    started = time.monotonic()
    status, mib = waited(forked(work, folder / "told"), SECONDS)
    seconds = time.monotonic() - started
    told = (folder / "told").read_text(errors="backslashreplace") if (folder / "told").exists() else ""
    problem = judged(status, told)
    return Verdict(seed, made.kind, made.words, -9 if status is None else status, seconds, mib, problem, told)


def judged(status: int | None, told: str) -> str | None:
    if status is None:
        return f"it hangs: more than {SECONDS} s"
    if status not in STATUSES:
        return f"exit status {status}"
    if "(--debug shows where)" in told or "Traceback" in told:
        return "a bare error"
    if status and "unitsphere: " not in told:
        return "it fails without a word"
    if "\x1b[2J" in told or "\0" in told:
        return "control characters"
    return None
