"""The learning rate as a function of the position in the run."""

from __future__ import annotations

import math
from collections.abc import Sequence


def learning_rate(
    step: int,
    *,
    peak: float,
    epochs: int,
    steps_per_epoch: int,
    schedule: str = "cosine",
    drops: Sequence[float] = (),
    update: str = "epoch",
    warmup_epochs: float = 0.0,
) -> float:
    """The rate of step `step` (from 0).

    cosine: from peak to 0 over what the warm-up leaves; step: times 0.1 at each drop, an epoch (or, below 1, a
    share of the run); constant. `update` says whether the rate changes each epoch, as in MoCo, or each step. The
    warm-up is linear and reaches the peak with its last step.
    """
    warmup_steps = warmup_epochs * steps_per_epoch
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    epoch = step / steps_per_epoch if update == "step" else step // steps_per_epoch
    if schedule == "cosine":
        done = max(0.0, epoch - warmup_epochs) / (epochs - warmup_epochs)
        return peak * 0.5 * (1.0 + math.cos(math.pi * done))
    if schedule == "step":
        passed = sum(epoch >= (drop * epochs if drop < 1 else drop) for drop in drops)
        return peak * 0.1**passed
    return peak
