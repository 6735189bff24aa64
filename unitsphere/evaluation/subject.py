"""The backbone under judgement, and the images it is judged on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unitsphere.common.devices import pick_precision
from unitsphere.common.errors import UsageError
from unitsphere.common.machine import free_memory
from unitsphere.common.terminal import MakeProgress
from unitsphere.data.loader import Loader
from unitsphere.data.sharing import loader as loader_of
from unitsphere.data.source import Images
from unitsphere.evaluation.finetune import FineTuned, FineTuning, finetune
from unitsphere.evaluation.linear import LinearProtocol, LinearResult, linear
from unitsphere.features.extract import AugmentedFeatures, CachedFeatures, extract
from unitsphere.features.inputs import class_numbers, usable_rows
from unitsphere.features.knn import knn
from unitsphere.runs.loading import Loaded

USUAL_K = (20, 200)


@dataclass(frozen=True)
class Split:
    images: Images
    loader: Loader

    @property
    def readable(self) -> int:
        return len(self.images) - len(self.loader.broken)


@dataclass(frozen=True)
class Subject:
    """The backbone under judgement, on its device."""

    loaded: Loaded
    device: torch.device
    batch_size: int | None
    progress: MakeProgress
    max_broken: float | None = None  # None: the run's own

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError(f"batch_size: given {self.batch_size}; it must be at least 1.")

    @property
    def precision(self) -> str:
        return pick_precision("auto", self.device)

    def classified(self, images: Images, which: str) -> Split:
        """A split with one label an image: labels are asked for before anything is computed."""
        class_numbers(images.labels, f"the {which} images of {images.name}")
        return self.split(images)

    def split(self, images: Images) -> Split:
        return Split(images, self.loader(images))

    def loader(self, images: Images) -> Loader:
        """Photos much larger than the input are decoded at a reduced scale."""
        seen, config = self.loaded.preprocess, self.loaded.record
        allowed = config.max_broken if config is not None else 0.01
        return loader_of(
            images,
            channels=seen.channels,
            depth=seen.depth,
            reduce_to=2 * seen.resize,
            device=self.device,
            max_broken=allowed if self.max_broken is None else self.max_broken,
        )

    def features(self, loader: Loader, title: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """(N, F) of all images; NaN where one could not be read."""
        return extract(
            self.loaded.backbone,
            loader,
            self.loaded.preprocess,
            batch_size=self.batch_size,
            device=self.device,
            precision=self.precision,
            dtype=dtype,
            progress=self.progress(title, len(loader)),
        )

    def labelled(self, split: Split, title: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, np.ndarray]:
        """Features and labels of the images that could be read."""
        assert split.images.labels is not None  # seen to before a split is opened
        features = self.features(split.loader, title, dtype)
        rows = usable_rows(features)
        usable = features if len(rows) == len(features) else features[rows]  # no copy of what may fill the memory
        return usable, split.images.labels[rows.numpy()]

    def brought(self, features: Tensor) -> Tensor:
        """On the device, if that leaves most of its free memory; else they stay, and travel a part at a time."""
        return features.to(self.device) if features.nbytes < free_memory(self.device) / 4 else features

    def knn(self, train: Split, test: Split, k: Sequence[int] | None, temperature: float) -> dict[int, float]:
        """Accuracy for each k; without one asked for, for the usual ones or as many images as there are."""
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32  # a bank may fill the memory
        bank, bank_labels = self.labelled(train, "features of the bank", dtype)
        queries, truth = self.labelled(test, "features to judge")
        asked = sorted({min(number, len(bank)) for number in USUAL_K}) if k is None else k
        bank = self.brought(bank)
        return knn(bank, bank_labels, queries, truth, k=asked, temperature=temperature, device=self.device)

    def linear(self, train: Split, test: Split, rules: LinearProtocol, seed: int, augment: bool) -> LinearResult:
        queries, truth = self.labelled(test, "features to judge")
        total = rules.epochs * (2 if len(rules.lr) > 1 else 1)
        source: CachedFeatures | AugmentedFeatures
        if augment:
            loaded = self.loaded
            source = AugmentedFeatures(loaded.backbone, train.loader, loaded.preprocess, self.device, self.precision)
            labels = train.images.labels
        else:
            features, labels = self.labelled(train, "features to train on")
            source = CachedFeatures(self.brought(features))
        return linear(
            source,
            labels,
            queries,
            truth,
            rules,
            seed=seed,
            device=self.device,
            progress=self.progress("linear", total),
        )

    def finetune(self, train: Split, test: Split, rules: FineTuning, seed: int) -> FineTuned:
        return finetune(
            self.loaded.backbone,
            train.loader,
            test.loader,
            self.loaded.preprocess,
            rules,
            seed=seed,
            device=self.device,
            precision=self.precision,
            progress=self.progress("fine-tuning", rules.images(len(train.images))),
        )
