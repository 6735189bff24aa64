"""Requests to stop: signals, and an output that nobody reads any longer.

Before and after the steps of a run, and in all other commands, a signal raises Interrupted, so that temporary files are
removed. Within the steps it only asks: the loop saves first.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from unitsphere.common.errors import UnitsphereError

# SLURM sends SIGUSR1 or SIGTERM before the time is up, a lost connection SIGHUP. Windows does not have all of them.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))
Handler = Callable[[int, Any], None]


class Interrupted(KeyboardInterrupt):
    """A signal asked to stop."""


class Stopped(UnitsphereError):
    """A run was asked to stop. It is saved and can be resumed: no failure, so it has an exit status of its own."""

    exit_status = 75  # EX_TEMPFAIL of sysexits.h: try again
    of_all = True


def interrupt(number: int, frame: Any) -> None:
    raise Interrupted(signal.Signals(number).name)


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """Handle the signals that ask to stop within the block.

    SIGHUP stays ignored under nohup. After a Stopped within a command the handler stays: torchrun sends SIGTERM
    to the other ranks when the first has ended, and must not cut their last words short.
    """
    previous: dict[int, Any] = {}
    ending = False
    try:
        for number in SIGNALS:
            known = signal.getsignal(number)
            theirs = number not in (signal.SIGINT, signal.SIGTERM) and known not in (signal.SIG_DFL, interrupt)
            if not theirs:
                previous[number] = signal.signal(number, handler)
    except ValueError:  # not in the main thread: signals are somebody else's business
        pass
    try:
        yield
    except Stopped:
        ending = True
        raise
    finally:
        for number, before in previous.items():
            if not (ending and before is interrupt):
                signal.signal(number, before)


@contextmanager
def stop_on_request() -> Iterator[Callable[[], str]]:
    """Give a function that says who has asked to stop, or nothing. A second Ctrl-C interrupts at once."""
    asked = ""
    launcher = os.getppid() if "LOCAL_RANK" in os.environ else None

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = signal.Signals(number).name

    def who() -> str:
        if launcher is not None and os.getppid() != launcher:  # or the ranks would go on, and nobody would know
            return "torchrun has died"
        return asked or ("nobody reads the output" if unread() else "")

    with handled_by(ask):
        yield who


def unread() -> bool:
    """Return whether standard output or standard error is a pipe whose reader is gone, as after `| head -3`."""
    if not hasattr(select, "poll"):
        return False
    outputs = select.poll()
    for number in (1, 2):
        outputs.register(number, 0)  # errors and hang-ups are told without being asked for
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in outputs.poll(0))


def drop_unread(*streams: Any) -> None:
    """Empty the streams that can be written no longer, or Python would complain of them when it ends."""
    for stream in streams:
        try:
            stream.flush()
        except (BrokenPipeError, OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (AttributeError, ValueError):  # None, or closed
            continue
