"""The log of a run: metrics.jsonl, and the same for TensorBoard."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unitsphere.common.files import set_damaged_aside, write_text
from unitsphere.common.terminal import warn


class Log:
    """metrics.jsonl and TensorBoard of one run. Opening it drops the lines after the step that the run goes on from.

    Raises OSError, with the name of the file, where it cannot write.
    """

    def __init__(self, metrics: Path, events: Path | None, from_step: int) -> None:
        lines, damaged = parsed(metrics)
        if damaged:
            kept = set_damaged_aside(metrics)
            warn(f"{metrics} is damaged in {damaged} of its lines, which are left out; it is kept as {kept.name}.")
        write_text(metrics, "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= from_step))
        self.path = metrics
        self.file = open(metrics, "a", buffering=1)  # noqa: SIM115
        self.events = Events(events, from_step + 1) if events is not None else None

    def write(self, record: dict[str, Any]) -> None:
        """Write a line. NaN and infinity become null, since JSON has no word for them."""
        known = {name: value if math.isfinite(value) else None for name, value in record.items()}
        # A file that was removed can be written all the same, into nothing: its folder may be deleted or unmounted.
        if not (self.path.exists() and os.path.samestat(self.path.stat(), os.fstat(self.file.fileno()))):
            raise FileNotFoundError(errno.ENOENT, "it was removed while the run was writing to it", str(self.path))
        with named(self.path):
            self.file.write(json.dumps(known) + "\n")
        if self.events is not None:
            self.events.write(record)

    def close(self) -> None:
        with suppress(OSError):  # what could not be written would be tried again
            self.file.close()
        if self.events is not None:
            self.events.close()


class Events:
    """TensorBoard's file of events. It is written at once: TensorBoard's own writer has a thread for it, which prints
    a traceback where the disk is full."""

    def __init__(self, folder: Path, purge_step: int) -> None:
        """purge_step: what earlier files say of this step and later ones is void."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}.{time.monotonic_ns()}"
        self.path, self.event = folder / name, Event
        self.file = open(self.path, "wb")  # noqa: SIM115
        self.records = RecordWriter(self.file)
        self.add(file_version="brain.Event:2")
        self.add(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def write(self, record: dict[str, Any]) -> None:
        """Write a line of metrics, each number as a scalar."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = {name: value for name, value in record.items() if name not in ("step", "epoch")}
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self.add(step=record["step"], summary=Summary(value=values))

    def add(self, **fields: Any) -> None:
        with named(self.path):
            self.records.write(self.event(wall_time=time.time(), **fields).SerializeToString())
            self.records.flush()

    def close(self) -> None:
        with suppress(OSError):
            self.file.close()


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Give an OSError of writing the name of the file: Python does not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Give the lines of a metrics.jsonl, without one that a crash has cut short. Damaged ones are left out, with a
    warning."""
    lines, damaged = parsed(path)
    if damaged:
        warn(f"{path} is damaged in {damaged} of its lines, which are left out.")
    yield from lines


def parsed(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of a metrics.jsonl that are whole, and how many others there are before the last."""
    if not path.is_file():
        return [], 0
    *written, rest = path.read_bytes().split(b"\n")
    lines = [line for line in map(line_of, written) if line is not None]
    damaged = len(written) - len(lines)
    last = line_of(rest)
    return [*lines, last] if last is not None else lines, damaged


def line_of(text: bytes) -> dict[str, Any] | None:
    """Return a line of metrics, or None if it is damaged: each is a table of numbers under names, with its step."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return None
    return line if all(value is None or isinstance(value, int | float) for value in line.values()) else None
