"""The judged backbone, the images it is judged on, and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unitsphere.common.machine import free_memory
from unitsphere.common.terminal import MakeProgress
from unitsphere.data.images import Images
from unitsphere.data.loader import Loader
from unitsphere.data.named import same_data
from unitsphere.data.sharing import loader as loader_of
from unitsphere.evaluation.options import Options
from unitsphere.features.extract import extract
from unitsphere.features.inputs import class_numbers, usable_rows
from unitsphere.runs.loading import Loaded

__all__ = ["JudgedBackbone", "Judgement", "LabelledImages", "LinearModel"]


@dataclass(frozen=True)
class LabelledImages:
    """The images that teach, and those that are only judged."""

    train: Images
    test: Images


@dataclass(frozen=True)
class Split:
    """The images of one split, and what decodes them. loader.broken names those that could not be read."""

    images: Images
    loader: Loader


@dataclass(frozen=True)
class Judgement:
    """What a protocol found.

    value: percent by name; constants: what the values depend on; train, test: the images they come from; model: what
    was trained on the way, where something was.
    """

    value: dict[str, float]
    constants: dict[str, Any]
    train: Split
    test: Split
    model: Any = None


@dataclass(frozen=True)
class LinearModel:
    """A linear classifier of features: weight (C, F), bias (C,), names of the classes where they have some.

    unit_length: whether the features must have length 1.
    """

    weight: Tensor
    bias: Tensor
    classes: tuple[str, ...] | None
    unit_length: bool = False


@dataclass(frozen=True)
class AsTrained:
    """What an evaluation takes over from the training of a backbone."""

    holdout: float = 0.1
    classes: Sequence[str] | None = None
    max_broken: float = 0.01
    caveats: Mapping[str, Any] = field(default_factory=dict)


def as_trained(loaded: Loaded, data: str, options: Options) -> AsTrained:
    """Return the run's own division of its data and its patience with broken images, or what was asked instead.

    The classes of a run are those of its own data; other data may not have them.
    """
    own = AsTrained()
    if (run := loaded.record) is not None:
        classes = run.classes if run.classes is not None and same_data(run.data, data) else None
        own = AsTrained(run.holdout, classes, run.max_broken, run.caveats)
    asked = {name: getattr(options, name) for name in ("holdout", "classes", "max_broken")}
    return replace(own, **{name: value for name, value in asked.items() if value is not None})


@dataclass(frozen=True)
class JudgedBackbone:
    """A backbone on its device.

    precision: "bf16" or "fp32"; batch_size: images at once, None to choose; progress: makes a bar; max_broken: the
    share of unreadable images beyond which it is an error.
    """

    loaded: Loaded
    device: torch.device
    precision: str
    batch_size: int | None
    progress: MakeProgress
    max_broken: float

    def open(self, images: Images) -> Split:
        """Make images ready to be decoded. Photos much larger than the input are decoded at a reduced scale."""
        seen = self.loaded.preprocess
        loader = loader_of(
            images,
            channels=seen.channels,
            depth=seen.depth,
            reduce_to=2 * seen.resize,
            device=self.device,
            max_broken=self.max_broken,
        )
        return Split(images, loader)

    def open_labelled(self, data: LabelledImages) -> tuple[Split, Split]:
        """Open training and test images, or raise UsageError where one of them has not one label."""
        for images, which in ((data.train, "training"), (data.test, "test")):
            class_numbers(images.labels, f"the {which} images of {images.name}")
        return self.open(data.train), self.open(data.test)

    def features(self, split: Split, title: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the features (N, F) of all images; NaN where one could not be read."""
        return extract(
            self.loaded.backbone,
            split.loader,
            self.loaded.preprocess,
            batch_size=self.batch_size,
            device=self.device,
            precision=self.precision,
            dtype=dtype,
            progress=self.progress(title, split.loader.count),
        )

    def frozen_features(
        self, split: Split, title: str, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, np.ndarray]:
        """Return features (n, F) and labels (n,) or (n, C) of the images that could be read."""
        assert split.images.labels is not None  # seen to before a split is opened
        found = self.features(split, title, dtype)
        rows = usable_rows(found)
        usable = found if len(rows) == len(found) else found[rows]  # no copy of what may fill the memory
        return usable, split.images.labels[rows.numpy()]

    def where_it_fits(self, features: Tensor) -> Tensor:
        """Move features to the device if that leaves most of its free memory; else they are read a part at a time."""
        if features.device == self.device or features.nbytes >= free_memory(self.device) / 4:
            return features
        return features.to(self.device)


def accuracies(top1: float, top5: float | None) -> dict[str, float]:
    """Return accuracies by name. top5 is None where there are too few classes for it."""
    return {"top1": top1} | ({} if top5 is None else {"top5": top5})


def class_names(images: Images) -> Sequence[str]:
    """Return the names of the classes, or numbers where they have none."""
    if images.classes or images.labels is None:
        return images.classes or ()
    return tuple(map(str, range(images.labels.shape[1] if images.multi_label else int(images.labels.max()) + 1)))
