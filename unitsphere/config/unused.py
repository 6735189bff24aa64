"""Fields that have no effect beside the others. The run says so; it refuses none, since a sweep may cross them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from unitsphere.config.config import Config
from unitsphere.modules.names import RESNETS, WIDE
from unitsphere.views.policies import Policy

__all__ = ["UNUSED", "Unused"]


class Unused(NamedTuple):
    """fields: these do nothing when `when` holds of the configuration, because of `because`."""

    fields: Iterable[str]
    when: Callable[[Any], bool]
    because: str


UNUSED = (
    Unused(("normalise",), lambda c: c.mean is not None, "mean and std are given"),
    Unused(("blur_sigma",), lambda c: c.blur == 0, "blur is 0"),
    Unused(("stem", "zero_init_residual"), lambda c: c.backbone not in (*RESNETS, *WIDE), "it is for built-in ResNets"),
    Unused(("lr_drops",), lambda c: c.lr_schedule != "step", "lr_schedule is not step"),
    Unused(("warmup_kind",), lambda c: c.warmup_epochs == 0, "warmup_epochs is 0"),
    Unused(Policy.__dataclass_fields__, lambda c: c.views == "custom", "the views are given from Python"),
)


def why_unused(config: Config, field: str, rules: Iterable[Unused]) -> str:
    """Say why a field has no effect in this configuration; empty where it has one."""
    return next((rule.because for rule in rules if field in rule.fields and rule.when(config)), "")
