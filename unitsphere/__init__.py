"""unitsphere learns image representations without labels.

import unitsphere

run = unitsphere.pretrain("moco-v2", data="./photos", out="runs/photos")
backbone = unitsphere.load_backbone(run)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unitsphere.common.version import __version__

if TYPE_CHECKING:
    from unitsphere.analysis.analyse import analyse
    from unitsphere.common.allocator import fast_cpu
    from unitsphere.common.errors import UnitsphereError, UsageError
    from unitsphere.config.config import Config
    from unitsphere.config.fields import Section
    from unitsphere.evaluation.embed import embed
    from unitsphere.evaluation.evaluate import evaluate
    from unitsphere.jobs.pretrain import pretrain
    from unitsphere.methods.declaration import About, Method
    from unitsphere.methods.learners.learner import Learner, StepOutput
    from unitsphere.runs.loading import load_backbone, load_transform
    from unitsphere.training.hooks import StopTraining

# Loaded when first used, so that `import unitsphere` and `unitsphere --help` do not wait for torch.
_WHERE = {
    "analyse": "unitsphere.analysis.analyse",
    "pretrain": "unitsphere.jobs.pretrain",
    "evaluate": "unitsphere.evaluation.evaluate",
    "embed": "unitsphere.evaluation.embed",
    "load_backbone": "unitsphere.runs.loading",
    "load_transform": "unitsphere.runs.loading",
    "UnitsphereError": "unitsphere.common.errors",
    "UsageError": "unitsphere.common.errors",
    "StopTraining": "unitsphere.training.hooks",
    "fast_cpu": "unitsphere.common.allocator",
    "About": "unitsphere.methods.declaration",
    "Method": "unitsphere.methods.declaration",
    "Config": "unitsphere.config.config",
    "Section": "unitsphere.config.fields",
    "Learner": "unitsphere.methods.learners.learner",
    "StepOutput": "unitsphere.methods.learners.learner",
}
__all__ = [
    "About", "Config", "Learner", "Method", "Section", "StepOutput", "StopTraining", "UnitsphereError", "UsageError",
    "__version__", "analyse", "embed", "evaluate", "fast_cpu", "load_backbone", "load_transform", "pretrain",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'unitsphere' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
