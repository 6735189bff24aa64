"""Estimating a mutual information that is known: EqCo's toy study, section 3, after Poole et al. (2019).

x ~ N(0, I_d) and y = rho x + sqrt(1 - rho^2) eps have the mutual information -(d/2) log(1 - rho^2) (Eq. 10). Two small
MLPs, trained with a contrastive loss on batches of K pairs, give a bound of it. How they are trained is in `critics`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import ClassVar

from unitsphere.studies.own_trainer import OwnTrainer
from unitsphere.studies.pair_settings import PairSettings
from unitsphere.studies.study import Job, Measured


class Stopped(Exception):
    """Another thread was asked to stop."""


class GaussianPairs(OwnTrainer):
    """Trains cells that differ only in their mutual information together, and such groups side by side."""

    name = "gaussian-pairs"
    section = PairSettings
    scales: ClassVar = {"small": {"steps": 1000, "evaluations": 200}, "tiny": {"steps": 4, "evaluations": 2}}

    def run(self, jobs: Sequence[Job], store: Path, device: str) -> Iterator[Measured]:
        """One thread a group: matrices this small do not fill two cores, and a group alone on a core gives the same
        numbers on any number of cores."""
        import torch

        from unitsphere.common.devices import pick_device
        from unitsphere.common.terminal import bars
        from unitsphere.studies.critics import estimate

        where = pick_device(device)
        groups = grouped(jobs)
        cores = torch.get_num_threads()
        stop = threading.Event()
        done = [0] * len(groups)

        def work(number: int, show: Callable[[int], None]) -> list[Measured]:
            cells = [PairSettings.model_validate(job.settings) for job in groups[number]]

            def tick(batches: int) -> None:
                if stop.is_set():
                    raise Stopped
                done[number] = batches * cells[0].k * len(cells)
                show(sum(done))

            started = time.monotonic()
            values = estimate(cells, where, tick)
            about = {"device": str(where), "seconds": round(time.monotonic() - started, 1), "together": len(cells)}
            return [Measured(job, value, about) for job, value in zip(groups[number], values, strict=True)]

        workers = min(len(groups), cores) if where.type == "cpu" else 1
        pool = ThreadPoolExecutor(max(1, workers), initializer=torch.set_num_threads, initargs=(1,))
        try:
            with bars() as progress:
                show = progress(f"training {len(jobs)} cells", sum(map(pairs, jobs)))
                for group in as_completed([pool.submit(work, number, show) for number in range(len(groups))]):
                    yield from group.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(cores)  # what a thread sets is also what threads born later start with


def pairs(job: Job) -> int:
    """How many pairs a job draws: near enough to the work in it for a progress bar."""
    return job.settings["k"] * (job.settings["steps"] + job.settings["evaluations"])


def grouped(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that differ only in their mutual information, the longest groups first."""
    groups: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        rest = {name: value for name, value in job.settings.items() if name != "mutual_information"}
        groups.setdefault(tuple(rest.items()), []).append(job)
    return sorted(groups.values(), key=lambda group: -sum(map(pairs, group)))
