"""When a run is saved, what a checkpoint holds, and how a run is taken up again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unitsphere.common.distributed import average, rank
from unitsphere.common.errors import UsageError
from unitsphere.config.config import FREE_ON_RESUME, Config
from unitsphere.modules.norms import running_statistics
from unitsphere.runs.checkpoint import part
from unitsphere.runs.run import Run
from unitsphere.training.step import PlainStep
from unitsphere.training.telemetry import Meter, check_finite, check_state
from unitsphere.weights.files import Damaged, load_tensors


@dataclass
class Checkpointer:
    """Saves a run and restores it. data: tells the images of the run from others, for a resume."""

    run: Run
    config: Config
    data: dict[str, Any]
    steps_per_epoch: int
    trained: PlainStep  # what it changes is the state of the run
    meter: Meter
    saved_step: int = -1
    saved_at: float = field(default_factory=time.monotonic)

    def due(self, step: int, epoch: int, epoch_is_over: bool) -> bool:
        """Return whether a checkpoint is due after this step: by minutes, by epoch, or because the run is over."""
        config = self.config
        minutes = (time.monotonic() - self.saved_at) / 60
        if config.save_minutes is not None and minutes > config.save_minutes:
            return True
        if not epoch_is_over:
            return False
        if epoch == config.epochs or epoch in config.keep_epochs:
            return True
        # Short epochs would be spent on writing.
        return minutes > 1 if config.save_every is None else epoch % config.save_every == 0

    def save(self, step: int) -> None:
        """Write a checkpoint after this step, once, but none with a loss or weight that is infinite or no number.

        All ranks call it, and the first writes.
        """
        if step == self.saved_step:
            return
        # Running statistics are linear in those of each batch: their mean over ranks is what one rank would have.
        average(running_statistics(self.trained.method))
        sums, meter = self.meter.sums, self.meter
        average(sums.values())
        self.saved_at, self.saved_step = time.monotonic(), step
        if rank() > 0:
            return
        if meter.steps:
            check_finite(float(sums.get("total_loss", sums["loss"])), step, self.run.last_good())
        tensors = self.trained.state()
        check_state(tensors.values(), step, self.run.last_good())
        tensors |= {f"meter.{name}": value for name, value in sums.items()}
        meta = {
            "epoch": (step - 1) // self.steps_per_epoch + 1,  # of the last step done, from 1; 0 before the first
            "meter_steps": meter.steps,
            "data": self.data,
            "config": self.config.model_dump(mode="json"),
        }
        if meter.given:
            meta["meter_given"] = meter.given
        self.run.save(step, tensors, meta)
        self.run.prune(self.config.keep_last, {epoch * self.steps_per_epoch for epoch in self.config.keep_epochs})

    def restore(self) -> int:
        """Take up the latest checkpoint that is whole and return how many steps it has done."""
        return self.run.first_whole(self.take_up)

    def take_up(self, path: Path) -> int:
        """Take up this checkpoint and return its step. Raises Damaged if it is not one of this run."""
        tensors, meta = load_tensors(path)
        try:
            if meta["data"] != self.data:
                raise UsageError(
                    f"data: the run was trained on {meta['data']['images']:,} images, and these are other ones "
                    f"({self.data['images']:,}). A resumed run needs the same images under the same names."
                )
            self.trained.restore(tensors)
            device = next(self.trained.method.parameters()).device
            sums = {name: value.to(device) for name, value in part(tensors, "meter.").items()}
            self.meter.restore(sums, meta["meter_steps"], meta.get("meter_given", {}))
            self.saved_step = int(meta["step"])
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"{path} is damaged: it does not hold what this run trains: {error}") from error
        return self.saved_step


def refuse_edited(run: Run, config: Config) -> None:
    """Refuse a configuration of a run that is not the one its latest checkpoint was trained with, field by field."""
    if not run.checkpoints():
        return
    _, meta = run.latest(tensors=False)
    trained, now = meta.get("config"), config.model_dump(mode="json")
    if not isinstance(trained, dict):
        return
    kept = [name for name in trained if name in now and name not in FREE_ON_RESUME]
    edited = [name for name in kept if now[name] != trained[name]]
    if edited:
        lines = [f"{name}: it is {now[name]!r} now, and was {trained[name]!r} in training." for name in edited]
        raise UsageError(
            "\n".join(
                [
                    *lines,
                    f"{run.config_file} was edited after the run was begun: it differs from the configuration in the "
                    "checkpoint. Put these fields back to resume, or start a new run with --config, in another folder.",
                ]
            )
        )
