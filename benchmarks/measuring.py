"""How things are timed here, and where the numbers go."""

from __future__ import annotations

import gc
import json
import os
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

import unitsphere

Row = dict[str, Any]

ROUND_SECONDS = 0.3


def milliseconds(work: Callable[[], Any], device: torch.device, *, warm_up: int = 5, rounds: int = 5) -> float:
    """Of one call: the median over rounds of some calls, the device waited for at the ends of a round."""

    def round_of(calls: int) -> float:
        wait_for(device)
        started = time.perf_counter()
        for _ in range(calls):
            work()
        wait_for(device)
        return 1e3 * (time.perf_counter() - started) / calls

    round_of(warm_up)
    calls = max(1, round(1e3 * ROUND_SECONDS / round_of(1)))
    return statistics.median(round_of(calls) for _ in range(rounds))


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device) -> Row:
    """What every file of results says of its origin."""
    return {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "unitsphere": unitsphere.__version__,
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
    }


class Results:
    """Rows of numbers by section, printed and written as they come: what was measured survives what fails later."""

    def __init__(self, file: Path, device: torch.device, only: Sequence[str] = ()) -> None:
        """only: measure the rows whose "section/row" contains one of these words; none: all."""
        self.file = file
        self.device = device
        self.only = only
        self.started = time.perf_counter()
        self.sections: dict[str, Row] = {}

    def section(self, name: str, what: str) -> None:
        self.sections[name] = {"what": what, "rows": {}}

    def add(self, section: str, name: str, measure: Callable[[], Row]) -> None:
        """Measure one row from a clean start. A failure becomes the row, and the others go on."""
        if self.only and not any(word in f"{section}/{name}" for word in self.only):
            return
        rows = self.sections[section]["rows"]
        if not rows:
            print(f"\n{section}: {self.sections[section]['what']}", flush=True)
        self.clean()
        try:
            row = measure()
            if self.device.type == "cuda":
                row["peak_memory_mib"] = round(torch.cuda.max_memory_allocated(self.device) / 2**20)
        except Exception as error:
            traceback.print_exc()
            row = {"error": f"{type(error).__name__}: {error}"}
        # The first row of a section is what the others are compared with.
        first = next(iter(rows.values()), row).get("images_per_second")
        if first and "images_per_second" in row:
            row["times_the_first"] = round(row["images_per_second"] / first, 2)
        if section.startswith("methods") and rows and "ms" in row:  # small differences
            base = next(iter(rows.values()))
            row["slower_percent"] = round(100 * (row["ms"] / base["ms"] - 1), 2)
            if "peak_memory_mib" in row:
                row["step_mib_over_first"] = step_mib(row) - step_mib(base)
        rows[name] = row
        print(f"  {name:<40} {in_words(row)}", flush=True)
        self.write()

    def clean(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def write(self) -> None:
        seconds = round(time.perf_counter() - self.started, 1)
        measured = {name: section for name, section in self.sections.items() if section["rows"]}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        found = machine(self.device) | {"seconds": seconds, "sections": measured}
        self.file.write_text(json.dumps(found, indent=1) + "\n")


def step_mib(row: Row) -> int:
    """The peak without the views that wait for their turn."""
    return row["peak_memory_mib"] - row.get("views_mib", 0)


def in_words(row: Row) -> str:
    """A row of the table."""
    if "error" in row:
        return row["error"].splitlines()[0]
    words = []
    if "ms" in row:
        words.append(f"{row['ms']:>9,.2f} ms")
    if "images_per_second" in row:
        words.append(f"{row['images_per_second']:>9,} images/s")
    if "times_the_first" in row:
        words.append(f"{row['times_the_first']:>6.2f} x")
    if "slower_percent" in row:
        words.append(f"{row['slower_percent']:>+7.2f} %")
    if "peak_memory_mib" in row:
        words.append(f"{row['peak_memory_mib']:>7,} MiB")
    if "seconds_to_start" in row:
        words.append(f"{row['seconds_to_start']:>6.1f} s to start")
    return " ".join(words)
