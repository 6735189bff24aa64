"""Whose tensors these are: a backbone's weights under whatever names they stand."""

from __future__ import annotations

from collections.abc import Set

from torch import Tensor, nn

from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.modules.backbones import timm_backbone, torchvision_backbone
from unitsphere.modules.names import RESNETS
from unitsphere.weights.files import not_finite


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def fill(module: nn.Module, tensors: dict[str, Tensor], name: str) -> None:
    """Load a backbone's weights under whatever prefix they stand; a classifier's own weights are ignored."""
    wanted = module.state_dict()
    first = next(iter(wanted))
    prefixes = [key.removesuffix(first) for key in tensors if key.endswith(first)]
    for prefix in sorted(prefixes, key=len):
        found = {key: value for key, value in part(tensors, prefix).items() if key in wanted}
        counters = {key for key in wanted if key.endswith("num_batches_tracked")}
        if found.keys() | counters >= wanted.keys():
            refuse_no_numbers(found, wanted, name)
            refuse_lost_statistics(part(tensors, prefix).keys() - wanted.keys(), wanted.keys(), name)
            try:
                module.load_state_dict(found, strict=False)
                return
            except RuntimeError as error:
                raise UsageError(f"{name} does not fit the backbone: {error}") from error
    missing = [key for key in wanted if key not in tensors]
    raise UsageError(
        f"{name} does not fit the backbone: {len(missing)} of {len(wanted)} weights are missing, "
        f"{missing[0]} among them."
    )


def refuse_no_numbers(found: dict[str, Tensor], wanted: dict[str, Tensor], name: str) -> None:
    """Nothing can be learnt from weights that are infinite or no numbers. A mask may be, as it is in a fresh module."""
    if lost := not_finite({key: value for key, value in found.items() if not_finite({key: wanted[key]}) is None}):
        raise UsageError(f"{name} has weights that are infinite or no numbers, {lost} among them: take others.")


def refuse_lost_statistics(unused: Set[str], wanted: Set[str], name: str) -> None:
    """Weights that were trained under batch norm compute something else under a norm that has no statistics."""
    norms = [key.removesuffix("running_mean") for key in unused if key.endswith("running_mean")]
    lost = sorted(norm for norm in norms if f"{norm}weight" in wanted)
    if lost:
        raise UsageError(
            f"{name} does not fit the backbone: it has {len(lost)} batch norms ({lost[0].removesuffix('.')} is one) "
            "where the backbone has another norm. Use --norm batch, or begin without these weights."
        )


def published(name: str, channels: int) -> nn.Module | None:
    """A backbone with its published weights: timm:NAME, torchvision:NAME, or the name of a torchvision ResNet alone.
    None for any other name."""
    if name.startswith("timm:"):
        return timm_backbone(name.removeprefix("timm:"), channels, pretrained=True)
    short = name.removeprefix("torchvision:")
    if short not in RESNETS:
        return None
    if channels != 3:
        raise UsageError(f"channels: given {channels}, but the weights of {name} are for 3.")
    try:
        return torchvision_backbone(short, 3, "imagenet", weights="DEFAULT")
    except OSError as error:
        raise UnitsphereError(f"the weights of torchvision's {short} cannot be downloaded: {error}") from error
