"""What a run says of itself while it runs: metrics.jsonl, TensorBoard, the terminal, and warnings.

Signs of health are summed on the device and read only when a line is due, so that no step waits for them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from unitsphere.common.errors import UnitsphereError
from unitsphere.common.files import write_text
from unitsphere.objectives.geometry import effective_rank, evenness, feature_deviation, uniformity

STARVING = 0.3  # share of the time spent waiting for data
COLLAPSED_DEVIATION = 0.05
COLLAPSED_RANK = 1.5
NARROW_DEVIATION, NARROW_RANK = 0.25, 4.0  # both: most directions are lost, and the rest hardly differ
LOOKED_AT = 256  # embeddings of more dimensions than this
SETTLING_STEPS = 50  # a fresh network looks collapsed


class Listener(Protocol):
    """Who shows progress: the terminal."""

    def line(self, record: dict[str, Any]) -> None: ...
    def advance(self, step: int) -> None: ...
    def warn(self, message: str) -> None: ...
    def say(self, message: str) -> None: ...


class Meter:
    """Sums on the device since the last line."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps = 0
        self.images = 0
        self.waited = 0.0
        self.since = time.perf_counter()

    def add(self, health: dict[str, Tensor], images: int, waited: float) -> None:
        for name, value in health.items():
            value = value.float()
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
        self.steps += 1
        self.images += images
        self.waited += waited

    def read(self) -> dict[str, float]:
        """Means since the last line. Waits for the device, once."""
        totals = torch.stack(list(self.sums.values())).tolist()
        means = {name: total / self.steps for name, total in zip(self.sums, totals, strict=True)}
        elapsed = time.perf_counter() - self.since
        means["images_per_second"] = self.images / elapsed
        means["wait_share"] = min(1.0, self.waited / elapsed)
        return means

    def state(self) -> tuple[dict[str, Tensor], int]:
        return dict(self.sums), self.steps

    def restore(self, sums: dict[str, Tensor], steps: int) -> None:
        self.sums, self.steps = dict(sums), steps


class Log:
    """metrics.jsonl and TensorBoard of one run. Opening it drops what lies after the step resumed from."""

    def __init__(self, metrics: Path, events: Path | None, from_step: int) -> None:
        kept = [line for line in read_metrics(metrics) if line["step"] <= from_step]
        try:
            write_text(metrics, "".join(json.dumps(line) + "\n" for line in kept))
            self.file = open(metrics, "a", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise UnitsphereError(f"{metrics} cannot be written: {error.strerror}.") from error
        self.writer = None
        if events is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(events), purge_step=from_step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """A number that is none is null: JSON has no other word for it."""
        known = {name: value if math.isfinite(value) else None for name, value in record.items()}
        try:
            self.file.write(json.dumps(known) + "\n")
        except OSError as error:
            raise UnitsphereError(f"{self.file.name} cannot be written: {error.strerror}.") from error
        if self.writer is not None:
            for name, value in record.items():
                if name not in ("step", "epoch"):
                    self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.file.close()
        if self.writer is not None:
            self.writer.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a metrics.jsonl; one cut short by a crash is left out."""
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue


@torch.no_grad()
def spread(embedding: Tensor) -> dict[str, float]:
    """How far the embeddings (N, dim) of a batch are from a collapse. Eigenvalues of so small a matrix are quicker on
    the CPU; those of a large one would hold a quick network up, so of many wide embeddings some are looked at."""
    here = embedding.cpu()
    here = here[:LOOKED_AT] if min(here.shape) > LOOKED_AT else here
    return {
        "feature_deviation": float(feature_deviation(here)),
        "effective_rank": float(effective_rank(here)),
        "uniformity": float(uniformity(embedding)),
        "evenness": float(evenness(here)),
    }


class Diverged(UnitsphereError):
    """The loss is no number any more."""


def check_finite(loss: float, step: int, last_good: str) -> None:
    """Stop at a loss that is no number: everything after it is lost time."""
    if not math.isfinite(loss):
        raise diverged(f"the loss became {loss}", step, last_good)


def check_state(tensors: Iterable[Tensor], step: int, last_good: str) -> None:
    """The same for what the last step made: its loss is of the weights before it."""
    finite = [tensor.isfinite().all() for tensor in tensors if tensor.is_floating_point()]
    if not torch.stack([each.to(finite[0].device) for each in finite]).all():
        raise diverged("weights became infinite or no numbers", step, last_good)


def diverged(what: str, step: int, last_good: str) -> Diverged:
    return Diverged(
        f"{what} by step {step}. {last_good} Start a new run, in another folder, with a lower --lr, --clip-norm 1, "
        "--warmup-epochs or --precision fp32; --init takes the weights of a good checkpoint along."
    )


def warnings(record: dict[str, Any], images: int, forces: bool = True) -> Iterator[str]:
    """What is wrong with the numbers of a line, and what to do about it. images: of the batch; forces: whether the
    method could have some."""
    if record["step"] < SETTLING_STEPS:
        return
    deviation, rank = record["feature_deviation"], record["effective_rank"]
    if what := collapse(deviation, rank, images):
        spread_them = "spread them by --singular-weight, " if forces else ""
        yield (
            f"collapse: {what} (deviation {deviation:.3f} where 1 is an even spread, effective rank {rank:.1f}). Lower "
            f"--lr, add --warmup-epochs, {spread_them}use batch norm (--norm, --head-norm), or check that the images "
            "differ."
        )
    if record["wait_share"] > STARVING:
        yield (
            f"starving: {record['wait_share']:.0%} of the time went into waiting for images. `unitsphere pack` the "
            "data (with --size to shrink large photos), give more --workers, or use --resident true if memory allows."
        )


def collapse(deviation: float, rank: float, images: int) -> str:
    """What has collapsed, in words; empty if nothing has. Two images always lie on a line."""
    if deviation < COLLAPSED_DEVIATION:
        return "different images get nearly the same embedding"
    if rank < COLLAPSED_RANK and images > 2:
        return "the embeddings of different images lie nearly on a line"
    if deviation < NARROW_DEVIATION and rank < NARROW_RANK < images / 4:
        return "the embeddings of different images lie close together, in a few directions"
    return ""
