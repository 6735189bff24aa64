"""Settings that have no effect beside the others. Said, not refused: a sweep may cross them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from unitsphere.config.families import Config
from unitsphere.config.fields import MixingFields
from unitsphere.modules.names import RESNETS, WIDE
from unitsphere.views.policies import Policy


class Idle(NamedTuple):
    """fields: those that do nothing when `when` holds of the configuration."""

    fields: Iterable[str]
    when: Callable[[Any], bool]
    because: str


def one_view(config: Any) -> bool:
    """Whether the loss has a gradient for one view of an image alone."""
    return getattr(config, "key_encoder", None) == "slow" and not config.symmetric


IDLE = (
    Idle({*MixingFields.model_fields} - {"pairs", "with_query"}, lambda c: not c.mixes, "nothing is mixed"),
    Idle(("mix_in", "mix_weigh", "mix_detach"), lambda c: c.with_query == 0, "with_query is 0"),
    Idle(("mix_distinct",), lambda c: c.pairs == 0, "pairs is 0"),
    Idle(("alpha_on",), lambda c: c.alpha is None or not c.mixes, "it is for alpha with mixed negatives"),
    Idle(
        ("variance_weight", "variance_ramp", "normalise_mean", "positives"),
        lambda c: c.keys == 1,
        "keys is 1",
    ),
    Idle(("variance_weight", "variance_ramp"), lambda c: c.positives != "joint", "each key has a term of its own"),
    Idle(("variance_ramp",), lambda c: c.variance_weight == 0, "variance_weight is 0"),
    Idle(("queue_size",), lambda c: c.negatives_from == "batch", "negatives_from is batch"),
    Idle(("shared_draw",), lambda c: c.negatives is None, "all negatives at hand are taken"),
    Idle(
        ("key_momentum", "momentum_schedule"),
        lambda c: getattr(c, "key_encoder", "slow") == "online",
        "key_encoder is online",
    ),
    Idle(("key_chunks",), lambda c: c.key_encoder == "online", "key_encoder is online"),
    Idle(("hidden",), lambda c: c.head == "linear", "head is linear"),
    Idle(("head_norm",), lambda c: c.head in ("linear", "mlp"), "this head has no norm"),
    Idle(("singular_form",), lambda c: c.singular_weight == 0, "singular_weight is 0"),
    Idle(("brownian_per_view",), lambda c: c.brownian_weight == 0, "brownian_weight is 0"),
    Idle(("brownian_per_view",), one_view, "the loss moves one view of an image"),
    Idle(("joint_statistics",), lambda c: "batch" not in (c.norm, c.head_norm), "no norm looks at more than one image"),
    Idle(("lr_per_view",), lambda c: c.lr is not None, "lr is given"),
    Idle(("normalise",), lambda c: c.mean is not None, "mean and std are given"),
    Idle(("blur_sigma",), lambda c: c.blur == 0, "blur is 0"),
    Idle(("stem", "zero_init_residual"), lambda c: c.backbone not in (*RESNETS, *WIDE), "it is for built-in ResNets"),
    Idle(("lr_drops",), lambda c: c.lr_schedule != "step", "lr_schedule is not step"),
    Idle(("warmup_kind",), lambda c: c.warmup_epochs == 0, "warmup_epochs is 0"),
    Idle(Policy.__dataclass_fields__, lambda c: c.views == "custom", "the views are given from Python"),
)


def idle_notes(config: Config, given: Iterable[str]) -> list[str]:
    """A line for each field among those given that changes nothing."""
    reasons = {name: idle_because(config, name) for name in given if name in type(config).model_fields}
    return [f"{name} has no effect: {reason}." for name, reason in reasons.items() if reason]


def idle_because(config: Config, field: str) -> str:
    return next((idle.because for idle in IDLE if field in idle.fields and idle.when(config)), "")
