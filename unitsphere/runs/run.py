"""A run is a folder that explains itself.

config.json       the whole configuration; starts the same run again
record.json       what is needed to use its backbone: architecture, image size, normalisation
run.json          versions, hardware, where each setting came from, where it was begun
metrics.jsonl     one JSON object a line
events/           the same for TensorBoard
checkpoints/      step-00001234.safetensors, the latest last
results.json      every number with its protocol, epoch and seed
.lock             held by the process that trains
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, TypeVar

from torch import Tensor

from unitsphere.common.distributed import rank
from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.common.files import LEFTOVER, clear_leftovers, set_damaged_aside, write_text
from unitsphere.common.terminal import warn
from unitsphere.config.config import Config
from unitsphere.config.layers import Layer, read_file
from unitsphere.methods.resolve import Resolved, resolve
from unitsphere.runs.account import account, now
from unitsphere.runs.record import Record
from unitsphere.weights.files import Damaged, load_tensors, save_tensors

__all__ = ["Run"]

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")
LOCK = ".lock"
CHECKPOINT = re.compile(r"step-(\d+)\.safetensors")


@dataclass(frozen=True)
class Run:
    """The folder of a run."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Run:
        """An existing run, or a UsageError that says why it is none."""
        run = cls(Path(path))
        try:
            known = run.config_file.is_file()
        except OSError as error:
            raise UsageError(f"{path} cannot be read as a run: {error.strerror}.") from error
        if not known:
            raise UsageError(f"{path} is not a run: it has no config.json.")
        return run

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def results_file(self) -> Path:
        return self.path / "results.json"

    @property
    def checkpoints_folder(self) -> Path:
        return self.path / "checkpoints"

    @property
    def record_file(self) -> Path:
        return self.path / "record.json"

    @property
    def saved(self) -> dict[str, Any]:
        """The fields of the configuration as they were written."""
        return read_file(self.config_file)

    @property
    def config(self) -> Config:
        """The configuration of a run with one of the named methods."""
        try:
            return resolve(Layer(str(self.config_file), self.saved)).config
        except UsageError as error:
            raise UsageError(f"{self.config_file} is damaged or of another version:\n{error}") from error

    @property
    def record(self) -> Record:
        """What is needed to use the run's backbone, readable without its method."""
        if self.record_file.is_file():
            return Record.read({"record": read_file(self.record_file)}, str(self.record_file))
        return Record.read({"config": self.saved}, str(self.config_file))

    def state(self) -> tuple[bytes | None, tuple[str, ...]]:
        """What tells whether another process has trained here since: the configuration and the checkpoints' names."""
        try:
            return self.config_file.read_bytes(), tuple(path.name for _, path in self.checkpoints())
        except (OSError, ValueError, UnitsphereError):  # `exists` says what is wrong
            return None, ()

    def exists(self) -> bool:
        """Whether a run is there. An empty folder is nothing, and neither is what a kill left half; anything else that
        is no run is refused."""
        try:
            if "\0" in str(self.path):
                raise ValueError("a name has no null byte")
            if not self.path.exists():
                return False
            if self.path.is_dir() and all(is_nothing(entry.name) for entry in self.path.iterdir()):
                return False
        except (OSError, ValueError) as error:
            raise UsageError(f"out: {self.path} cannot be used: {getattr(error, 'strerror', error)}.") from error
        if not self.config_file.is_file():
            what = "a folder of other things, without a config.json" if self.path.is_dir() else "a file"
            raise UsageError(f"out: {self.path} is no run but {what}. Take another place for the run.")
        return True

    def lock(self) -> IO[str]:
        """Makes the folder, and lets no other process train in it until what is returned is closed, or its process
        dies. (A record lock: a flock would live on in decoders that were forked.)"""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = open(self.path / LOCK, "a+")  # noqa: SIM115
        except OSError as error:
            raise UsageError(f"out: {self.path} cannot be written: {error.strerror}.") from error
        try:
            if fcntl is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):  # not: a file system that has no locks
                file.seek(0)
                with file:
                    raise UsageError(f"out: {self.path} is being trained by another process ({file.read()}).") from None
        file.truncate(0)
        file.write(f"{os.getpid()} on {platform.node()}")
        file.flush()
        return file

    def create(self, resolved: Resolved, record: Record, *, resumes: bool = False) -> None:
        """Make the folder and write down what is about to happen. A resumed run keeps its first account."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for folder in (self.path, self.checkpoints_folder):
                clear_leftovers(folder, alone=True)
            self.write_config(resolved.config)  # first: a folder with it can be resumed
            write_text(self.record_file, record.model_dump_json(indent=2) + "\n")
            if not resumes:
                write_text(self.path / "run.json", json.dumps(account(resolved), indent=2) + "\n")
            self.checkpoints_folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(f"out: {self.path} cannot be written: {error.strerror}.") from error

    def begun(self) -> str:
        """Where, and with which data: for those who resume it elsewhere."""
        try:
            about = json.loads((self.path / "run.json").read_text())
            return f"The run was begun in {about['folder']} with --data {about['data']}; give --data."
        except (OSError, ValueError, KeyError):
            return "If the images lie elsewhere now, give --data."

    def write_config(self, config: Config) -> None:
        write_text(self.config_file, json.dumps(config.model_dump(mode="json"), indent=2) + "\n")

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(step, path) of every checkpoint, the latest last."""
        try:
            if not self.checkpoints_folder.is_dir():
                return []
            found = [(CHECKPOINT.fullmatch(path.name), path) for path in self.checkpoints_folder.iterdir()]
        except OSError as error:
            raise UnitsphereError(f"{self.checkpoints_folder} cannot be read: {error.strerror}.") from error
        return sorted((int(match[1]), path) for match, path in found if match)

    def latest(self, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors, if wanted, and meta of the latest checkpoint that can be read."""
        return self.first_whole(lambda path: load_tensors(path, tensors))

    def first_whole(self, take: Callable[[Path], T]) -> T:
        """Return what `take` makes of the latest checkpoint or, with a warning, of the latest that it does not refuse
        as damaged."""
        checkpoints = self.checkpoints()
        if not checkpoints:
            raise UsageError(f"{self.path} has no checkpoint yet.")
        for (_, path), (_, earlier) in pairwise(reversed(checkpoints)):
            try:
                return take(path)
            except UsageError:
                raise
            except UnitsphereError as error:
                if rank() == 0:
                    warn(f"{str(error).rstrip('.')}; {earlier.name} is taken instead.")
        return take(checkpoints[0][1])

    def set_aside(self, after: int) -> None:
        """Later checkpoints than that of a step could not be read: they must not count as the latest."""
        for step, path in self.checkpoints():
            if step > after:
                path.rename(path.with_suffix(".damaged"))

    def save(self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """A new checkpoint. A full disk loses the new one, never the last good one."""
        path = self.checkpoints_folder / f"step-{step:08d}.safetensors"
        try:
            self.checkpoints_folder.mkdir(exist_ok=True)  # not its parents: a run that was removed stays so
            save_tensors(path, tensors, {"step": step, "record": self.record.model_dump(mode="json"), **meta})
        except Exception as error:
            # safetensors reports a full disk as its own error; whatever failed, the user must hear what is left.
            raise UnitsphereError(
                f"the checkpoint {path} cannot be written: {error}. {self.last_good()} If the disk is full, make room "
                "and use --resume."
            ) from error

    def last_good(self) -> str:
        try:
            checkpoints = self.checkpoints()
        except UnitsphereError:
            checkpoints = []
        if not checkpoints:
            return "There is no checkpoint yet."
        before = f", and the one before it {checkpoints[-2][1].name}" if len(checkpoints) > 1 else ""
        return f"The last good checkpoint is {checkpoints[-1][1]}{before}."

    def prune(self, keep_last: int, keep_steps: set[int]) -> None:
        """Remove all but the latest checkpoints and the chosen ones."""
        for step, path in self.checkpoints()[:-keep_last]:
            if step not in keep_steps:
                path.unlink(missing_ok=True)

    def add_result(self, result: dict[str, Any]) -> None:
        """Append to results.json. Of several processes that do so at once, each waits for the others. A damaged file
        is kept under another name, and a new one begun."""
        with open(self.path / ".results.lock", "a") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)  # let go of when closed, or when the process dies
            try:
                known = self.results()
            except Damaged as error:
                known = []
                warn(f"{error} It is kept as {set_damaged_aside(self.results_file).name}, and a new one is begun.")
            write_text(self.results_file, json.dumps([*known, {**result, "time": now()}], indent=2) + "\n")

    def results(self) -> list[dict[str, Any]]:
        """All that results.json holds."""
        if not self.results_file.is_file():
            return []
        try:
            known = json.loads(self.results_file.read_text())
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{self.results_file} is damaged: {error}.") from error
        if not isinstance(known, list) or not all(isinstance(result, dict) for result in known):
            raise Damaged(f"{self.results_file} is damaged: it is no list of results.")
        return known

    def is_summarised(self, epoch: int) -> bool:
        """Whether the run has said what it learnt by the end of this epoch, or cannot add that to its results."""
        try:
            told = [result.get("epoch") for result in self.results() if result.get("protocol") == "label-free"]
            return epoch in told
        except (OSError, Damaged):
            return True


def is_nothing(name: str) -> bool:
    """Whether a file of this name is no sign of a run."""
    return name == LOCK or fnmatch(name, LEFTOVER)
