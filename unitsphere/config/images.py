"""What a configuration says of its images: how pixels are normalised, and which policies make the views."""

from __future__ import annotations

from dataclasses import replace

from unitsphere.common.errors import UsageError
from unitsphere.config.config import Config
from unitsphere.config.layers import Patch
from unitsphere.views.policies import POLICIES, VIEWS, Policy

Statistics = tuple[tuple[float, ...], tuple[float, ...]]

# Mean and deviation by name, in [0, 1]; `half` is for data without statistics of its own.
NORMALISATIONS: dict[str, Statistics] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "half": ((0.5,), (0.25,)),
}


def normalisation(config: Config) -> Statistics | None:
    """Mean and deviation that are given or named; None where they are to be computed from the images."""
    if config.mean is not None and config.std is not None:
        return config.mean, config.std
    return None if config.normalise == "computed" else named_normalisation(config.normalise, config.channels)


def named_normalisation(name: str, channels: int) -> Statistics:
    """Mean and deviation for so many channels, by name."""
    mean, std = NORMALISATIONS[name]
    if len(mean) == 1:
        return mean * channels, std * channels
    if len(mean) != channels:
        raise UsageError(f"normalise: {name} is for {len(mean)} channels and there are {channels}. Use computed.")
    return mean, std


def policies(config: Config) -> list[Policy]:
    """The policies of the first view, the second ..., with the parameters that the configuration changes in all of
    them. Where there are more views than policies, they take turns."""
    base = [POLICIES[name] for name in VIEWS.get(config.views, (config.views,)) if name != "custom"]
    changes: Patch = {
        name: getattr(config, name) for name in Policy.__dataclass_fields__ if getattr(config, name, None) is not None
    }
    try:
        return [replace(policy, **changes) for policy in base]
    except ValueError as error:
        raise UsageError(str(error)) from None
