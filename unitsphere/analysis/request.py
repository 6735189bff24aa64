"""What every analysis is told, and which images it looks at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unitsphere.common.devices import pick_precision
from unitsphere.common.errors import UsageError, check_word
from unitsphere.common.randomness import generator
from unitsphere.common.terminal import MakeProgress
from unitsphere.config.config import Config
from unitsphere.data.source import Data, Images, refuse_unnamed_source
from unitsphere.evaluation.backbone import JudgedBackbone
from unitsphere.modules.names import CUSTOM
from unitsphere.runs.loading import from_checkpoint
from unitsphere.runs.run import Run
from unitsphere.training.make_views import make_views_of
from unitsphere.training.prepare import open_split
from unitsphere.views.views import MakeViews
from unitsphere.weights.files import load_tensors

CPU = torch.device("cpu")


def quiet(title: str, total: int) -> Callable[[int], None]:
    return lambda done: None


@dataclass(frozen=True)
class AnalysisRequest:
    """data: where the images are, if not where the run had them. seed: of the analysis's own draws, so that runs with
    other seeds are asked about the same images in the same views. progress: shows how far it is. latest_only: look at
    the last of the checkpoints alone."""

    data: Data | None = None
    device: torch.device = CPU
    seed: int = 0
    batch_size: int = 256
    progress: MakeProgress = quiet
    latest_only: bool = False

    def images(self, run: Run, split: str, limit: int | None = None) -> Images:
        """Those of a split, or `limit` of them drawn by the seed. The split is the run's own: of the images it trained
        on, `val` has those it did not see."""
        check_word("split", split, ("train", "val"))
        if limit is not None and limit < 2:
            raise UsageError(f"images: given {limit}; at least 2 are needed.")
        config = run.config
        if self.data is None and config.data == CUSTOM:
            raise UsageError(f"data: {run.path} was trained on data given from Python: give the same data again.")
        refuse_unnamed_source(config.data, self.data)
        found = open_split(config, config.data if self.data is None else self.data, split)
        if limit is None or limit >= len(found):
            return found
        chosen = torch.randperm(len(found), generator=generator(self.seed, "analysis-images"))[:limit]
        return found.subset(chosen.sort().values.numpy())

    def views(self, config: Config, count: int) -> MakeViews:
        """The run's own augmentation, drawn by the analysis's seed."""
        if config.views == CUSTOM:
            raise UsageError("views: the run was trained with views given from Python, which it cannot make again.")
        return make_views_of(config.model_copy(update={"seed": self.seed}), count, None)

    def backbone(self, run: Run, checkpoint: Path, features: str) -> JudgedBackbone:
        """The frozen backbone of a checkpoint (features "backbone"), or backbone and head ("embedding")."""
        loaded = from_checkpoint(*load_tensors(checkpoint), name=str(checkpoint), features=features, run=run)
        precision = pick_precision("auto", self.device)
        return JudgedBackbone(loaded, self.device, precision, self.batch_size, self.progress, run.config.max_broken)

    def checkpoints(self, run: Run) -> list[Path]:
        """Those that the run keeps, the latest last; at least one."""
        found = [path for _, path in run.checkpoints()]
        if not found:
            raise UsageError(f"{run.path} has no checkpoint yet.")
        return found[-1:] if self.latest_only else found


def numbers(values: Tensor) -> list[float]:
    """For JSON: six digits say all that was measured."""
    return [float(f"{value:.6g}") for value in values.tolist()]


def three(mixing: Sequence[int]) -> Sequence[int]:
    """MoCHi's (N, s, s')."""
    if len(mixing) != 3:
        raise UsageError(f"mixing: given {list(mixing)}; three numbers are needed, (N, s, s') such as 1024,1024,128.")
    return mixing


def number(value: Tensor | float) -> float:
    return float(f"{float(value):.6g}")
