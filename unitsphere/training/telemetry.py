"""Measure a run and report it: to its log, to the terminal, and by warnings.

Signs of health are summed on the device and read only when a line is due, so that no step waits for them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from unitsphere.common.distributed import average, gather, rank
from unitsphere.common.errors import UnitsphereError
from unitsphere.config.config import Config
from unitsphere.methods.learners.learner import StepOutput
from unitsphere.objectives.geometry import effective_rank, evenness, feature_deviation, uniformity
from unitsphere.runs.run import Run
from unitsphere.training.hooks import Hooks
from unitsphere.training.log import Log

STARVING = 0.3  # share of the time spent waiting for data
COLLAPSED_DEVIATION = 0.05
COLLAPSED_RANK = 1.5
NARROW_DEVIATION, NARROW_RANK = 0.25, 4.0  # both: most directions are lost, and the rest hardly differ
LOOKED_AT = 256  # embeddings of more dimensions than this
SETTLING_STEPS = 50  # a fresh network looks collapsed
# Names in a line beside those of the method's own signs of health.
MEASURED = {"images_per_second", "wait_share", "memory_mib", "knn"}
MEASURED |= {"feature_deviation", "effective_rank", "uniformity", "evenness"}
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Listener(Protocol):
    """Shows progress, as the terminal does."""

    def line(self, record: dict[str, Any]) -> None: ...
    def advance(self, step: int) -> None: ...
    def warn(self, message: str) -> None: ...
    def say(self, message: str) -> None: ...


class Meter:
    """Sums over the steps since the last line: on the device of what the method measures, on the host of what a hook
    gives."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew, after a line."""
        self.sums: dict[str, Tensor] = {}
        self.given: dict[str, tuple[float, int]] = {}  # name -> sum, and how many a hook has given
        self.steps = 0
        self.images = 0
        self.waited = 0.0
        self.since = time.perf_counter()

    def add(self, health: dict[str, Tensor], images: int, waited: float, given: Mapping[str, float] = NOTHING) -> None:
        """Add a step: its signs of health, its images, the seconds spent waiting for them, the numbers of a hook."""
        for name, value in health.items():
            value = value.float()
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
        for name, number in given.items():
            total, count = self.given.get(name, (0.0, 0))
            self.given[name] = total + number, count + 1
        self.steps += 1
        self.images += images
        self.waited += waited

    def read(self) -> dict[str, float]:
        """Return the means since the last line. Waits for the device, once."""
        totals = torch.stack(list(self.sums.values())).tolist()
        means = {name: total / self.steps for name, total in zip(self.sums, totals, strict=True)}
        elapsed = time.perf_counter() - self.since
        means["images_per_second"] = self.images / elapsed
        means["wait_share"] = min(1.0, self.waited / elapsed)
        return means

    def restore(self, sums: dict[str, Tensor], steps: int, given: Mapping[str, tuple[float, int]] = NOTHING) -> None:
        """Go on from sums that a checkpoint holds."""
        self.sums, self.steps, self.given = dict(sums), steps, {name: (total, n) for name, (total, n) in given.items()}


@torch.no_grad()
def spread(embedding: Tensor) -> dict[str, float]:
    """Measure how far the embeddings (N, dim) of a batch are from a collapse.

    Eigenvalues of so small a matrix are quicker on the CPU. Those of a large one would hold up a quick network, so only
    the first of many wide embeddings count.
    """
    here = embedding.cpu()
    here = here[:LOOKED_AT] if min(here.shape) > LOOKED_AT else here
    return {
        "feature_deviation": float(feature_deviation(here)),
        "effective_rank": float(effective_rank(here)),
        "uniformity": float(uniformity(embedding)),
        "evenness": float(evenness(here)),
    }


@dataclass
class Reporter:
    """Measures the steps of a run, writes a line of metrics when one is due, and warns of what looks wrong.

    Use it as a context manager around the steps. All ranks call it alike, and the first speaks for all. look: evaluates
    the backbone as it is (online k-NN), or None.
    """

    run: Run
    config: Config
    meter: Meter
    hooks: Hooks
    listener: Listener
    look: Callable[[], dict[str, float]] | None
    step: int  # steps done when it begins
    log: Log | None = None

    def __enter__(self) -> Reporter:
        events = self.run.path / "events" if self.config.tensorboard else None
        with self.writing():
            self.log = Log(self.run.metrics_file, events, self.step) if rank() == 0 else None
        self.meter.since = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self.log is not None:
            self.log.close()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Say of a log that cannot be written what is kept, and how to go on."""
        try:
            yield
        except OSError as error:
            where, why = error.filename or self.run.path, error.strerror or error
            raise UnitsphereError(
                f"{where} cannot be written: {why}. {self.run.last_good()} If the disk is full, make room; --resume "
                "goes on from the last checkpoint."
            ) from error

    def measure(self, record: dict[str, Any], health: dict[str, Tensor], images: int, waited: float) -> None:
        """Count a step in. record: step, epoch and rate. images: over all ranks. waited: seconds, for the images."""
        given = self.hooks.call("on_step", record, {*health, *MEASURED}) if self.hooks.on_step is not None else NOTHING
        self.meter.add(health, images, waited, given)
        self.listener.advance(record["step"])

    def report(self, record: dict[str, Any], output: StepOutput, epoch_is_over: bool) -> None:
        """Write a line: what the record of the last step says, and the means of all steps since the last line."""
        step, rate = record["step"], {"lr": record["lr"]}
        record = {"step": step, "epoch": record["epoch"]}
        average(self.meter.sums.values())
        record |= {name: round(value, 6) for name, value in self.meter.read().items()} | rate
        if output.loss.device.type == "cuda":
            record["memory_mib"] = torch.cuda.max_memory_allocated(output.loss.device) // 2**20
        check_finite(record.get("total_loss", record["loss"]), step, self.run.last_good())
        every = self.config.knn_every
        if self.look is not None and every and epoch_is_over and record["epoch"] % every == 0:
            try:
                record |= self.look()
            except (UnitsphereError, torch.OutOfMemoryError) as error:  # a run must not die of being looked at
                self.listener.warn(f"online k-NN failed: {error}")
        embedding = gather(output.embedding.detach())  # of the whole batch: the same for any number of ranks
        if self.log is not None:
            record |= {name: round(value, 6) for name, value in spread(embedding).items()}
            record |= {name: total / count for name, (total, count) in self.meter.given.items()}
            if epoch_is_over:
                record |= self.hooks.call("on_epoch", record)
            with self.writing():
                self.log.write(record)
            self.listener.line(record)
            forces = "singular_weight" in type(self.config).model_fields
            for warning in warnings(record, len(embedding), forces):
                self.listener.warn(warning)
        self.meter.reset()


class Diverged(UnitsphereError):
    """The loss or a weight is infinite or not a number."""


def check_finite(loss: float, step: int, last_good: str) -> None:
    """Raise Diverged for a loss that is infinite or not a number: everything after it is lost time."""
    if not math.isfinite(loss):
        raise diverged(f"the loss became {loss}", step, last_good)


def check_state(tensors: Iterable[Tensor], step: int, last_good: str) -> None:
    """Raise Diverged for such weights: the loss of the last step is that of the weights before it."""
    finite = [tensor.isfinite().all() for tensor in tensors if tensor.is_floating_point()]
    if not torch.stack([each.to(finite[0].device) for each in finite]).all():
        raise diverged("weights became infinite or no numbers", step, last_good)


def diverged(what: str, step: int, last_good: str) -> Diverged:
    return Diverged(
        f"{what} by step {step}. {last_good} Start a new run, in another folder, with a lower --lr, --clip-norm 1, "
        "--warmup-epochs or --precision fp32; --init takes the weights of a good checkpoint along."
    )


def warnings(record: dict[str, Any], images: int, forces: bool = True) -> Iterator[str]:
    """Give a warning for each number of a line that looks wrong, with what to do about it.

    images: how many the batch has. forces: whether the method can have forces that spread the embeddings.
    """
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
    """Say in words what has collapsed, or nothing. Two images always lie on a line."""
    if deviation < COLLAPSED_DEVIATION:
        return "different images get nearly the same embedding"
    if rank < COLLAPSED_RANK and images > 2:
        return "the embeddings of different images lie nearly on a line"
    if deviation < NARROW_DEVIATION and rank < NARROW_RANK < images / 4:
        return "the embeddings of different images lie close together, in a few directions"
    return ""
