"""The names of the built-in backbones. No torch in here, so that a wrong name is refused at once."""

from __future__ import annotations

from antipode.errors import UsageError, nearest

TINY = "resnet-tiny"
RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "wide_resnet50_2")
CUSTOM = "custom"  # a module given from Python


def check_backbone(name: str) -> None:
    """Refuse what can be no backbone. Whether timm or a package knows the name is found out later."""
    known = (TINY, *RESNETS)
    if name not in known and ":" not in name and name != CUSTOM:
        raise UsageError(
            f"backbone: {name!r} is not known.{nearest(name, known)} Allowed: {', '.join(known)}, timm:NAME, "
            "package:function."
        )
