"""The loop: for each batch it makes the views, takes a step, measures, reports, saves and stops.

The step number is all the state that the loop has of its own. The order of the images, the views and the permutations
are functions of (seed, step), so a resumed run goes on exactly where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from unitsphere.common.devices import send
from unitsphere.common.distributed import any_rank, average, averaging_gradients, barrier, rank, world
from unitsphere.common.errors import UsageError
from unitsphere.common.randomness import generator, stream
from unitsphere.common.stopping import Stopped
from unitsphere.config.config import Config
from unitsphere.data.loader import Loader
from unitsphere.methods.learners.learner import Learner, Moment
from unitsphere.modules.norms import running_statistics
from unitsphere.optimisation.optimisers import build_optimizer
from unitsphere.optimisation.schedules import learning_rate
from unitsphere.runs.run import Run
from unitsphere.training.checkpointer import Checkpointer
from unitsphere.training.hooks import Hook, Hooks
from unitsphere.training.step import PlainStep, RecordedStep, TakeStep
from unitsphere.training.telemetry import Listener, Meter, Reporter
from unitsphere.views.views import MakeViews


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

    @cached_property
    def steps_per_epoch(self) -> int:
        return self.images // self.batch_size

    @cached_property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def batches(self, start: int, rank: int = 0, ranks: int = 1) -> Iterator[Tensor]:
        """Give the image indices (batch_size / ranks,) of one rank, for step `start` and all after it."""
        share = self.batch_size // ranks
        for epoch in range(start // self.steps_per_epoch, self.epochs):
            order = torch.randperm(self.images, generator=generator(self.seed, "order", epoch))
            for step in range(max(start, epoch * self.steps_per_epoch), (epoch + 1) * self.steps_per_epoch):
                first = (step - epoch * self.steps_per_epoch) * self.batch_size + rank * share
                yield order[first : first + share]


class Training:
    """One run: what it trains, how far it is, and the loop that takes it further."""

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
        """data: tells the images from others, for a resume."""
        self.run, self.config, self.method, self.plan, self.device = run, config, method, plan, device
        self.plain_step = PlainStep(
            method,
            build_optimizer(config, method),
            precision=precision,
            clip_norm=config.clip_norm,
            forward=averaging_gradients(method),
        )
        self.meter = Meter()
        self.checkpointer = Checkpointer(run, config, data, plan.steps_per_epoch, self.plain_step, self.meter)
        self.rate_of = partial(
            learning_rate,
            peak=config.learning_rate,
            epochs=config.epochs,
            steps_per_epoch=plan.steps_per_epoch,
            schedule=config.lr_schedule,
            drops=config.lr_drops,
            update=config.lr_update,
            warmup_epochs=config.warmup_epochs,
            warmup_kind=config.warmup_kind,
        )
        self.record = False  # replay the step as a CUDA graph
        self.compiles = False  # the first step compiles, and says how long it took
        self.step = 0  # steps done

    def resume(self) -> None:
        """Take up the latest checkpoint."""
        self.step = self.checkpointer.restore()

    def train(
        self,
        loader: Loader,
        make_views: MakeViews,
        listener: Listener,
        should_stop: Callable[[], str],
        online: Callable[[], dict[str, float]] | None = None,
        *,
        on_step: Hook | None = None,
        on_epoch: Hook | None = None,
    ) -> None:
        """Run to the end, or save and raise Stopped if a signal or a hook asks for it.

        should_stop: says who asks to stop, if anybody does. online: evaluates the backbone at the end of an epoch.
        on_step, on_epoch: hooks of the user's (`unitsphere.training.hooks`), which are called on the first rank.
        """
        hooks = Hooks(on_step, on_epoch) if rank() == 0 else Hooks()
        look = None if online is None else partial(self.look, online)
        self.method.train()
        if self.step == 0 and 0 in self.config.keep_epochs:
            self.checkpointer.save(0)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with Reporter(self.run, self.config, self.meter, hooks, listener, look, self.step) as reporter:
            self.take_steps(loader, make_views, reporter, should_stop)

    def take_steps(
        self, loader: Loader, make_views: MakeViews, reporter: Reporter, should_stop: Callable[[], str]
    ) -> None:
        """Take all steps that are left, until somebody asks to stop."""
        method, config, plan, device, hooks = self.method, self.config, self.plan, self.device, reporter.hooks
        place, ranks, seed = rank(), world(), config.seed
        labels = loader.images.labels if method.labels else None
        take: TakeStep = self.plain_step
        recorded: int | None = None  # the phase of the method that was recorded
        waiting_since = time.perf_counter()
        for indices, canvas in loader.batches(plan.batches(self.step, place, ranks)):
            arrived = time.perf_counter()
            moment = Moment(self.step, plan.steps, self.step // plan.steps_per_epoch, plan.epochs)
            views = make_views(canvas, "views", self.step, place, ranks)

            # Beside the views a step takes what the method draws. Dropout and the like draw from torch's generators,
            # which are seeded for each step, so that a resumed run draws the same.
            networks = stream(seed, "networks", self.step, place)
            torch.default_generator.manual_seed(networks)
            if device.type == "cuda":
                torch.cuda.manual_seed(networks)
            drawn = method.inputs(plan.batch_size, moment, generator(seed, "step", self.step))
            if labels is not None:
                drawn["labels"] = torch.from_numpy(labels[indices.numpy()])
            inputs = {name: send(tensor, device) for name, tensor in drawn.items()}

            # The step. It is recorded anew when it becomes another computation, as MoCHi's does when it begins to mix.
            if self.record and (phase := method.phase(moment)) != recorded:
                take = self.plain_step  # frees the memory of the earlier recording
                take, recorded = RecordedStep(self.plain_step, views, inputs), phase
            output = take(views, inputs, rate := self.rate_of(self.step))
            self.step += 1
            if self.compiles:
                float(output.loss.detach())  # waits for the device
                reporter.listener.say(f"compiled: the first step took {time.perf_counter() - arrived:.0f} s")
                self.compiles = False

            # Measure it, and report.
            epoch, epoch_is_over = moment.epoch + 1, self.step % plan.steps_per_epoch == 0
            record = {"step": self.step, "epoch": epoch, "lr": rate}
            reporter.measure(record, output.health, len(indices) * ranks, arrived - waiting_since)
            if epoch_is_over or self.step % config.log_every == 0:
                reporter.report(record, output, epoch_is_over)

            # Save and stop: all ranks do what one of them wants.
            due = self.checkpointer.due(self.step, epoch, epoch_is_over)
            who = should_stop()
            stop = hooks.error is not None or ((bool(who) or hooks.stop) and self.step < plan.steps)
            if ranks > 1:
                stop, due = any_rank(stop, due)
            try:
                if stop or due:
                    self.checkpointer.save(self.step)
                if stop:
                    barrier()  # torchrun ends all ranks soon after the first: the checkpoint must be whole by then
            finally:
                if hooks.error is not None:
                    raise hooks.failure(self.step, self.run.last_good())
            if stop:
                why = f" It was stopped by: {who}." if who else ""
                raise Stopped(f"stopped after step {self.step} (epoch {epoch}); --resume goes on from there.{why}")
            waiting_since = time.perf_counter()

    def look(self, online: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Evaluate the backbone with the running statistics that one rank would have."""
        average(running_statistics(self.method))
        return online()
