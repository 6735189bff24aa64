"""antipode learns image representations without labels.

import antipode

run = antipode.pretrain("moco-v2", data="./photos", out="runs/photos")
backbone = antipode.load_backbone(run)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from antipode.analysis.analyse import analyse
    from antipode.errors import AntipodeError, UsageError
    from antipode.evaluation.embed import embed
    from antipode.evaluation.evaluate import evaluate
    from antipode.loading import load_backbone, load_transform
    from antipode.training.pretrain import pretrain

# Loaded when first used, so that `import antipode` and `antipode --help` do not wait for torch.
_WHERE = {
    "analyse": "antipode.analysis.analyse",
    "pretrain": "antipode.training.pretrain",
    "evaluate": "antipode.evaluation.evaluate",
    "embed": "antipode.evaluation.embed",
    "load_backbone": "antipode.loading",
    "load_transform": "antipode.loading",
    "AntipodeError": "antipode.errors",
    "UsageError": "antipode.errors",
}
__all__ = [
    "AntipodeError", "UsageError", "__version__", "analyse", "embed", "evaluate", "load_backbone", "load_transform",
    "pretrain",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'antipode' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
