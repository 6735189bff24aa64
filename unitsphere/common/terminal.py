"""Progress in the terminal: a bar where there is a screen, plain lines where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from unitsphere.common.text import printable

QUIET_SECONDS = 10.0  # between plain lines
MakeProgress = Callable[[str, int], Callable[[int], None]]  # (title, total) -> what to call with the number done


# The words of a line of metrics, in this order, where the method measures the number.
WORDS = (
    "epoch {epoch}/{epochs}",
    "loss {loss:.3f}",
    "(guessing {log_k:.2f})",
    "accuracy {contrastive_accuracy:.0%}",
    "accuracy {accuracy:.0%}",
    "own key {positive_similarity:.2f}, others {negative_similarity:.2f}",
    "views apart {alignment:.2f}",
    "centroids {centroid_distance:.2f}  uniformity {uniformity:.2f}",
    "rank {effective_rank:.0f}",
    "{images_per_second:,.0f} images/s",
    "wait {wait_share:.0%}",
    "k-NN {knn:.1f}",
)
# What the words mean that do not explain themselves, where the line has them.
LEGEND = {
    "log_k": "guessing: the loss of a guess",
    "positive_similarity": "own key, others: mean cosine similarity of a query with its key and with the negatives",
    "alignment": "views apart: mean squared distance of two views of an image",
    "effective_rank": "rank: how many directions the embeddings use",
    "wait_share": "wait: share of the time spent waiting for images",
}


def describe(record: dict[str, Any], epochs: int) -> str:
    """Return a line of metrics in words."""
    known = {**record, "epochs": epochs}
    said = []
    for words in WORDS:
        with suppress(KeyError):
            said.append(words.format_map(known))
    return "  ".join(said).replace("  (", " (")


def legend(record: dict[str, Any]) -> str:
    """Return a line that explains the words of such a line of metrics."""
    return f"legend: {'; '.join(meaning for name, meaning in LEGEND.items() if name in record)}"


class Screen(Console):
    """A console that falls silent when nobody reads it any longer: what runs is saved before it stops."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Terminal:
    """Shows a run on standard error. Use as a context manager around the loop."""

    def __init__(self, steps: int, epochs: int, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Screen(file=sys.stderr, highlight=False, quiet=quiet)
        self.epochs = epochs
        self.steps = steps
        self.first: tuple[int, float] | None = None
        self.printed: float | None = None  # when the last plain line was
        self.warned: set[str] = set()
        self.progress: Progress | None = None
        if self.console.is_terminal and not quiet:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self.progress = Progress(*columns, console=self.console)
            self.task = self.progress.add_task("training", total=steps)

    def __enter__(self) -> Terminal:
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def advance(self, step: int) -> None:
        if self.first is None:
            self.first = (step, time.monotonic())
        if self.progress is not None:
            self.progress.update(self.task, completed=step)

    def line(self, record: dict[str, Any]) -> None:
        if self.progress is not None:  # the bar knows the time left, and must stay narrow enough to show it
            brief = f"epoch {record['epoch']}/{self.epochs}  loss {record['loss']:.3f}"
            speed = f"{record['images_per_second']:,.0f} images/s  wait {record['wait_share']:.0%}"
            self.progress.update(self.task, description=f"{brief}  {speed}")
        last = record["step"] == self.steps
        if self.printed is None:
            self.say(legend(record))
        if last or self.printed is None or time.monotonic() - self.printed > QUIET_SECONDS:
            self.printed = time.monotonic()
            self.say(f"{describe(record, self.epochs)}  {self.time_left(record['step'])}")

    def time_left(self, step: int) -> str:
        if self.first is None or step <= self.first[0]:
            return ""
        started, at = self.first
        seconds = int((time.monotonic() - at) / (step - started) * (self.steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"

    def warn(self, message: str) -> None:
        kind = message.partition(":")[0]  # each kind once: a warning repeated a hundred times is not read
        if kind not in self.warned:
            self.warned.add(kind)
            warn(message, self.console)

    def say(self, message: str) -> None:
        self.console.print(printable(message, lines=True), soft_wrap=True, markup=False)


def warn(message: str, console: Console | None = None) -> None:
    console = console or Screen(file=sys.stderr, highlight=False)
    console.print(f"[bold yellow]warning[/] {escape(printable(message, lines=True))}", soft_wrap=True)


@contextmanager
def bars(verbose: bool = True) -> Iterator[MakeProgress]:
    """Show progress bars on standard error, where it is a screen; none if not `verbose`."""
    shown = verbose and Console(file=sys.stderr).is_terminal
    console = Screen(file=sys.stderr, quiet=not shown)  # quiet: rich 13 ends a disabled bar with an empty line
    with Progress(console=console, transient=True, disable=not shown) as progress:

        def start(title: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(title, total=total)
            return lambda done: progress.update(task, completed=done)

        yield start
