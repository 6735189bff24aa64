"""The loop: images -> views -> method -> loss -> optimiser -> telemetry, for so many steps.

The step number is all the state that the loop has of its own: the order of the images, the views and the
permutations are functions of (seed, step), so a resumed run goes on exactly where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unitsphere.common.devices import send
from unitsphere.common.distributed import any_rank, average, averaging_gradients, gather, mine, rank, world
from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.common.randomness import generator, stream
from unitsphere.config.config import Config
from unitsphere.data.loader import Loader
from unitsphere.methods.learners.learner import Learner, Moment, StepOutput
from unitsphere.modules.norms import running_statistics
from unitsphere.optimisation.optimisers import build_optimizer
from unitsphere.optimisation.schedules import learning_rate
from unitsphere.runs.run import Run
from unitsphere.training.step import PlainStep, RecordedStep, TakeStep
from unitsphere.training.telemetry import Listener, Log, Meter, check_finite, check_state, spread, warnings
from unitsphere.views.views import MakeViews
from unitsphere.weights.names import part


class Stopped(UnitsphereError):
    """The run was asked to stop, saved itself and can be resumed."""

    of_all = True


@dataclass(frozen=True)
class Plan:
    """Which images make which step. The last, partial batch of an epoch is dropped."""

    images: int
    batch_size: int
    epochs: int
    seed: int

    def __post_init__(self) -> None:
        if self.images < self.batch_size:
            raise UsageError(
                f"batch_size: given {self.batch_size}, but there are only {self.images} images to train on. "
                f"Use at most --batch-size {self.images}."
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.images // self.batch_size

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def batches(self, start: int) -> Iterator[Tensor]:
        """The image indices (batch_size,) of step `start` and of all after it."""
        for epoch in range(start // self.steps_per_epoch, self.epochs):
            order = torch.randperm(self.images, generator=generator(self.seed, "order", epoch))
            first = start - epoch * self.steps_per_epoch if epoch == start // self.steps_per_epoch else 0
            for position in range(first, self.steps_per_epoch):
                yield order[position * self.batch_size : (position + 1) * self.batch_size]


class Training:
    """One run of the loop. Everything that a checkpoint holds is reachable from here."""

    def __init__(
        self,
        run: Run,
        config: Config,
        method: Learner,
        plan: Plan,
        device: torch.device,
        precision: str,
        data: dict[str, Any],
    ) -> None:
        """data: what tells the images from others, for a resume."""
        self.data = data
        self.run = run
        self.config = config
        self.method = method
        self.plan = plan
        self.device = device
        self.optimizer = build_optimizer(config, method)
        self.plain_step = PlainStep(
            method,
            self.optimizer,
            precision=precision,
            clip_norm=config.clip_norm,
            forward=averaging_gradients(method),
        )
        self.take_step: TakeStep = self.plain_step
        self.record = False  # replay the step as a CUDA graph
        self.recorded_phase: int | None = None
        self.compiles = False  # the first step compiles, and says how long it took
        self.meter = Meter()
        self.step = 0  # steps done
        self.saved_at, self.saved_step = time.monotonic(), 0

    @property
    def epoch(self) -> int:
        """The epoch of the last step done, from 1; 0 before the first."""
        return (self.step - 1) // self.plan.steps_per_epoch + 1

    @property
    def epoch_is_over(self) -> bool:
        return self.step % self.plan.steps_per_epoch == 0

    def resume(self) -> None:
        """Take up the latest checkpoint."""
        tensors, meta = self.run.latest()
        if meta["data"] != self.data:
            raise UsageError(
                f"data: the run was trained on {meta['data']['images']:,} images, and these are other ones "
                f"({self.data['images']:,}). A resumed run needs the same images under the same names."
            )
        self.plain_step.restore(tensors)
        self.meter.restore(part(tensors, "meter."), meta["meter_steps"])
        self.meter.sums = {name: value.to(self.device) for name, value in self.meter.sums.items()}
        self.step = self.saved_step = meta["step"]

    def save(self) -> None:
        """Write a checkpoint, but none where the loss or a weight is no number. All ranks call it, the first writes."""
        if self.step == self.saved_step:
            return
        self.average_statistics()
        sums, steps = self.meter.state()
        average(sums.values())
        self.saved_at, self.saved_step = time.monotonic(), self.step
        if rank() > 0:
            return
        if steps:
            check_finite(float(sums.get("total_loss", sums["loss"])), self.step, self.run.last_good())
        tensors = self.plain_step.state()
        check_state(tensors.values(), self.step, self.run.last_good())
        tensors |= {f"meter.{name}": value for name, value in sums.items()}
        meta = {
            "epoch": self.epoch,
            "meter_steps": steps,
            "data": self.data,
            "config": self.config.model_dump(mode="json"),
        }
        self.run.save(self.step, tensors, meta)
        per_epoch = self.plan.steps_per_epoch
        self.run.prune(self.config.keep_last, {epoch * per_epoch for epoch in self.config.keep_epochs})

    def average_statistics(self) -> None:
        """Running statistics are linear in those of each batch: their mean over ranks is what one rank would have."""
        average(running_statistics(self.method))

    def train(
        self,
        loader: Loader,
        make_views: MakeViews,
        listener: Listener,
        should_stop: Callable[[], bool],
        online: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        """Run to the end, or raise Stopped after saving. `online` evaluates at the end of an epoch."""
        events = self.run.path / "events" if self.config.tensorboard else None
        log = Log(self.run.metrics_file, events, self.step) if rank() == 0 else None
        labels = loader.images.labels if self.method.labels else None
        self.method.train()
        if self.step == 0 and 0 in self.config.keep_epochs:
            self.saved_step = -1
            self.save()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.meter.since = waiting_since = time.perf_counter()
        try:
            for indices, canvas in loader.batches(mine(batch) for batch in self.plan.batches(self.step)):
                waited = time.perf_counter() - waiting_since
                truth = None if labels is None else torch.from_numpy(labels[indices.numpy()])
                views = make_views(canvas, "views", self.step, rank(), world())
                step = self.first_step(views, truth, listener) if self.compiles else self.update(views, truth)
                self.meter.add(step.health, len(canvas) * world(), waited)
                listener.advance(self.step)
                if self.step % self.config.log_every == 0 or self.epoch_is_over:
                    self.report(step, log, listener, online)
                    self.meter = Meter()
                stop, due = any_rank(should_stop() and self.step < self.plan.steps, self.due())
                if stop or due:
                    self.save()
                if stop:
                    raise Stopped(f"stopped after step {self.step} (epoch {self.epoch}); --resume goes on from there.")
                waiting_since = time.perf_counter()
        finally:
            if log is not None:
                log.close()

    def first_step(self, views: list[Tensor], labels: Tensor | None, listener: Listener) -> StepOutput:
        started = time.perf_counter()
        step = self.update(views, labels)
        float(step.loss.detach())  # waits for the device
        listener.say(f"compiled: the first step took {time.perf_counter() - started:.0f} s")
        self.compiles = False
        return step

    def update(self, views: list[Tensor], labels: Tensor | None = None) -> StepOutput:
        """One step. The first of a kind may be recorded, to be replayed for all that follow it."""
        moment = Moment(self.step, self.plan.steps, self.step // self.plan.steps_per_epoch, self.config.epochs)
        drawn = self.method.inputs(self.plan.batch_size, moment, generator(self.config.seed, "step", self.step))
        if labels is not None:
            drawn["labels"] = labels
        inputs = {name: send(tensor, self.device) for name, tensor in drawn.items()}
        self.seed_networks()
        phase = self.method.phase(moment)
        if self.record and phase != self.recorded_phase:
            self.take_step = self.plain_step  # the memory of what was recorded before is free for what comes
            self.take_step = RecordedStep(self.plain_step, views, inputs)
            self.recorded_phase = phase
        step = self.take_step(views, inputs, self.learning_rate(self.step))
        self.step += 1
        return step

    def seed_networks(self) -> None:
        """For dropout and the like, which draw from the global generators: the same in a run that was resumed."""
        seed = stream(self.config.seed, "networks", self.step, rank())
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def learning_rate(self, step: int) -> float:
        config = self.config
        return learning_rate(
            step,
            peak=config.learning_rate,
            epochs=config.epochs,
            steps_per_epoch=self.plan.steps_per_epoch,
            schedule=config.lr_schedule,
            drops=config.lr_drops,
            update=config.lr_update,
            warmup_epochs=config.warmup_epochs,
            warmup_kind=config.warmup_kind,
        )

    def report(
        self, step: StepOutput, log: Log | None, listener: Listener, online: Callable[[], dict[str, float]] | None
    ) -> None:
        """Write a line; stop at a NaN, warn of what looks wrong. All ranks call it, and the first speaks for all."""
        record: dict[str, Any] = {"step": self.step, "epoch": self.epoch}
        average(self.meter.sums.values())
        record |= {name: round(value, 6) for name, value in self.meter.read().items()}
        record["lr"] = self.learning_rate(self.step - 1)
        if self.device.type == "cuda":
            record["memory_mib"] = torch.cuda.max_memory_allocated(self.device) // 2**20
        check_finite(record.get("total_loss", record["loss"]), self.step, self.run.last_good())
        every = self.config.knn_every
        if online is not None and every and self.epoch_is_over and self.epoch % every == 0:
            self.average_statistics()
            try:
                record |= online()
            except (UnitsphereError, torch.OutOfMemoryError) as error:  # a run must not die of being looked at
                listener.warn(f"online k-NN failed: {error}")
        embedding = gather(step.embedding.detach())  # of the whole batch: the same for any number of ranks
        if log is None:
            return
        record |= {name: round(value, 6) for name, value in spread(embedding).items()}
        log.write(record)
        listener.line(record)
        forces = "singular_weight" in type(self.config).model_fields
        for warning in warnings(record, len(embedding), forces):
            listener.warn(warning)

    def due(self) -> bool:
        """Whether a checkpoint is due: by epoch, by minutes, or because the run is over."""
        config = self.config
        minutes = (time.monotonic() - self.saved_at) / 60
        if config.save_minutes is not None and minutes > config.save_minutes:
            return True
        if not self.epoch_is_over:
            return False
        if self.step == self.plan.steps or self.epoch in config.keep_epochs:
            return True
        # Short epochs would be spent on writing.
        return minutes > 1 if config.save_every is None else self.epoch % config.save_every == 0
