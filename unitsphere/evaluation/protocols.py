"""The protocols: what each is called, what may be asked of it, and where its code stands. Imports no torch.

A protocol is a model of its settings and a function `judge(backbone, data, settings)`. The options of `unitsphere
evaluate`, the checks of `unitsphere.evaluate()` and the names in studies come from the model. To add one: a model in
settings.py, a line in PROTOCOLS, and a file in this folder. Outside the package: a `Protocol`, named as
`package.module:NAME`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unitsphere.common.outside import load_named
from unitsphere.evaluation.settings import FinetuneSettings, KnnSettings, LinearSettings, SemiSettings, Settings

__all__ = ["PROTOCOLS", "Protocol", "find_protocol"]

GROUP = "unitsphere.protocols"  # entry points of other packages


@dataclass(frozen=True)
class Protocol:
    """A way to judge a backbone.

    summary: what it does, in a line. settings: the model of what may be asked. judge: takes a JudgedBackbone, the
    LabelledImages and the settings, gives a Judgement; or where it stands, "module:function", imported when it judges.
    """

    summary: str
    settings: type[Settings]
    judge: str | Callable[..., Any]

    @property
    def options(self) -> list[str]:
        """What may be asked of this protocol and not of every other."""
        return [name for name in self.settings.model_fields if name not in Settings.model_fields]

    def run(self, backbone: Any, data: Any, settings: Settings) -> Any:
        """Judge, and return the Judgement."""
        judge: Any = self.judge
        if isinstance(judge, str):
            module, _, name = judge.partition(":")
            judge = getattr(importlib.import_module(module), name)
        return judge(backbone, data, settings)


PROTOCOLS = {
    "knn": Protocol("nearest neighbours by cosine", KnnSettings, "unitsphere.evaluation.knn:judge"),
    "linear": Protocol("a linear layer on frozen features", LinearSettings, "unitsphere.evaluation.linear:judge"),
    "transfer": Protocol(
        "the same with the settings for other data", LinearSettings, "unitsphere.evaluation.linear:judge_transfer"
    ),
    "semi": Protocol("fine-tuning with few labels", SemiSettings, "unitsphere.evaluation.semi:judge"),
    "finetune": Protocol("fine-tuning with all labels", FinetuneSettings, "unitsphere.evaluation.finetune:judge"),
    "svm": Protocol("support vector machines", Settings, "unitsphere.evaluation.svm:judge"),
}


def find_protocol(name: str, field: str = "protocol") -> Protocol:
    """Return the protocol of this name, or one from outside the package. field: what the user calls the choice."""
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    found: Protocol = load_named(field, name, GROUP, expected=Protocol, known=PROTOCOLS)
    return found
