"""The names of the built-in backbones and norms. No torch in here, so that a wrong name is refused at once."""

from __future__ import annotations

from typing import Literal, get_args

from unitsphere.common.errors import UsageError, nearest
from unitsphere.common.outside import installed_names

TINY = "resnet-tiny"
RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "wide_resnet50_2")  # torchvision's
WIDE = {"resnet50x2": 2, "resnet50x4": 4}  # how many times as wide as ResNet-50, in every layer
BUILT_IN = (TINY, *RESNETS, *WIDE)
BACKBONES = "unitsphere.backbones"  # entry points of other packages
CUSTOM = "custom"  # a module given from Python
Norm = Literal["batch", "layer", "group", "standardised"]
NORMS: tuple[Norm, ...] = get_args(Norm)


def check_backbone(name: str) -> None:
    """Refuse what can be no backbone. Whether timm or a package knows the name is found out later."""
    if name not in BUILT_IN and ":" not in name and name != CUSTOM and name not in installed_names(BACKBONES):
        raise UsageError(
            f"backbone: {name!r} is not known.{nearest(name, BUILT_IN)} Allowed: {', '.join(BUILT_IN)}, timm:NAME, "
            "package:function."
        )
