"""The learning rate as a function of the position in the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["learning_rate"]

FIRST = 1e-3  # of the rate, in the first step of a warm-up of the kind `times`


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
    warmup_kind: str = "before",
) -> float:
    """The rate of step `step` (from 0).

    cosine: from peak to 0 over what the warm-up leaves; step: times 0.1 at each drop, an epoch (or, below 1, a
    share of the run); constant. `update` says whether the rate changes each epoch, as in MoCo, or each step. The
    warm-up is linear and reaches the peak with its last step; of the kind `times` it begins at a thousandth and
    multiplies a schedule that begins with the run (SiMo).
    """
    warmup_steps = warmup_epochs * steps_per_epoch
    if warmup_kind == "times" and warmup_steps:
        peak *= min(1.0, FIRST + (1 - FIRST) * step / warmup_steps)
        warmup_epochs = 0
    elif step < warmup_steps:
        return peak * min(1.0, (step + 1) / warmup_steps)
    epoch = step / steps_per_epoch if update == "step" else step // steps_per_epoch
    if schedule == "cosine":
        done = max(0.0, epoch - warmup_epochs) / (epochs - warmup_epochs)
        return peak * 0.5 * (1.0 + math.cos(math.pi * done))
    if schedule == "step":
        passed = sum(epoch >= (drop * epochs if drop < 1 else drop) for drop in drops)
        return peak * 0.1**passed
    return peak
