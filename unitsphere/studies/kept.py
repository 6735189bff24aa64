"""Finished cells on the disk: STORE/cells/ADDRESS.json, which several studies, processes and machines may share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unitsphere.common.errors import UsageError
from unitsphere.common.files import write_text
from unitsphere.studies.study import Job, Measured, Runner, address

TOLD = ("run", "images_per_second", "memory_mib", "failure", "edge")  # of what is kept with a cell, where there is such


class Kept:
    """The cells of a store. Those of an older scheme of addresses are found by the settings that they were kept with;
    `unreadable` counts the ones whose settings this version does not know any more."""

    def __init__(self, folder: Path, runner: Runner) -> None:
        self.folder, self.runner = folder, runner
        self.unreadable = 0
        self.former: dict[str, Path] | None = None  # looked for when a cell is not at its address

    def find(self, job: Job) -> dict[str, Any] | None:
        """What is kept of a job that was computed before."""
        path = self.path(job)
        if not path.is_file():
            if self.former is None:
                self.former = self.at_former_addresses()
            path = self.former.get(job.address, path)
        return json.loads(path.read_text()) if path.is_file() else None

    def path(self, job: Job) -> Path:
        return self.folder / f"{job.address}.json"

    def at_former_addresses(self) -> dict[str, Path]:
        """By the address that its settings have today. A cell that an interruption cut short is none."""
        found = {}
        for path in self.folder.glob("*.json"):
            kept = json.loads(path.read_text())
            if kept.get("runner") != self.runner.name:
                continue
            try:
                today = address(self.runner.name, self.runner.settled(kept["settings"]))
            except UsageError:
                self.unreadable += 1
                continue
            if today != path.stem:
                found[today] = path
        return found

    def keep(self, measured: Measured, maker: Mapping[str, Any]) -> None:
        from unitsphere.runs.account import now

        known = {"runner": self.runner.name, "settings": measured.job.settings, "value": measured.value}
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**known, **maker, "time": now(), **measured.details}, indent=1)
        write_text(self.path(measured.job), text + "\n")


def makers(results: Mapping[str, Any]) -> list[str]:
    """The versions of unitsphere, and their commits where these are known, that the cells were computed by."""
    made = (by for cell in results["cells"] for by in cell["made_by"].values() if by)
    return sorted({" ".join(part for part in by.values() if part) for by in made})


def made_by(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Version and commit of what computed a cell. Until November 2026 the package was called antipode."""
    return {"unitsphere": kept.get("unitsphere", kept.get("antipode")), "commit": kept.get("commit")}


def told(kept: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kept[name] for name in TOLD if name in kept}
