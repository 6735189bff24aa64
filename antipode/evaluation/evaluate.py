"""`antipode evaluate`: a frozen backbone and labelled images in, a number out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from antipode.data.loader import Loader
from antipode.data.machine import free_memory
from antipode.data.source import Data, Images, open_images
from antipode.devices import memory_errors, pick_device, pick_precision
from antipode.errors import UsageError, nearest
from antipode.evaluation.features import AugmentedFeatures, CachedFeatures, extract
from antipode.evaluation.inputs import class_numbers, usable_rows
from antipode.evaluation.knn import knn
from antipode.evaluation.linear import PROTOCOLS, LinearProtocol, LinearResult, linear
from antipode.loading import Loaded, Spec, load
from antipode.terminal import MakeProgress, bars

USUAL_K = (20, 200)
MEMORY_ADVICE = "Lower --batch-size, or --image-size for what is no run."


def evaluate(
    what: Spec | nn.Module,
    *,
    protocol: str,
    data: Data,
    features: str = "backbone",
    batch_size: int | None = None,
    device: str = "auto",
    holdout: float | None = None,
    classes: Sequence[str] | None = None,
    max_broken: float | None = None,
    seed: int = 0,
    k: Sequence[int] | None = None,
    temperature: float = 0.1,
    row: str = "moco",
    lr: Sequence[float] | None = None,
    epochs: int | None = None,
    augment: bool = False,
    **architecture: Any,
) -> dict[str, Any]:
    """Judge `what` (a run, a checkpoint, a file of weights, `random`, `torchvision:NAME`, a module) on `data`.

    protocol: `knn` with k (default: 20 and 200, or what the images allow) and temperature, or `linear` with the row
    of PROTOCOLS, lr, epochs, and augment for the faithful form. holdout and max_broken are the run's own unless given,
    and so are the classes on the run's own data. architecture: backbone, stem, image_size, channels for what is no run.
    The result is returned and, for a run, added to its results.json. Numbers are percent, of the last epoch.
    """
    check_word("protocol", protocol, ("knn", "linear"))
    check_features(features)
    rules = linear_protocol(row, lr, epochs) if protocol == "linear" else None
    loaded = load(what, features=features, seed=seed, **architecture)
    holdout, classes = division(loaded, data, holdout, classes)
    constants: dict[str, Any] = {"holdout": holdout, "classes": classes}
    with bars() as progress, memory_errors(MEMORY_ADVICE):
        subject = Subject(loaded, pick_device(device), batch_size, progress, max_broken)
        train, test = (subject.open(data, split, holdout, classes) for split in ("train", "val"))
        if rules is None:
            check_k(k, len(train.images))
            accuracies = subject.knn(train, test, k, temperature)
            value = {f"k={number}": accuracy for number, accuracy in accuracies.items()}
            constants |= {"k": list(accuracies), "temperature": temperature}
        else:
            found = subject.linear(train, test, rules, seed, augment)
            chosen = found.chosen
            value = {"top1": chosen.top1} | ({} if chosen.top5 is None else {"top5": chosen.top5})
            constants |= {**asdict(rules), "row": row, "augment": augment, "chosen_lr": chosen.lr}
    broken = train.loader.broken | test.loader.broken
    result = {
        "protocol": protocol,
        "data": data_name(data),
        "value": {name: round(number, 2) for name, number in value.items()},
        "epoch": loaded.epoch,
        "seed": loaded.seed if loaded.seed is not None else seed,
        "evaluation_seed": seed,
        "backbone": loaded.name,
        "features": features,
        "constants": constants,
        "images": {"train": train.readable, "test": test.readable},
        **({"broken": broken} if broken else {}),
    }
    if loaded.run is not None:
        loaded.run.add_result(result)
    return result


def check_word(field: str, word: str, allowed: tuple[str, ...]) -> None:
    if word not in allowed:
        raise UsageError(f"{field}: {word!r} is not known.{nearest(word, allowed)} Allowed: {', '.join(allowed)}.")


def check_features(features: str) -> None:
    check_word("features", features, ("backbone", "embedding"))


def data_name(data: Data) -> str:
    """As runs and results record it."""
    return os.fspath(data) if isinstance(data, str | os.PathLike) else "custom"


def division(
    loaded: Loaded, data: Data, holdout: float | None, classes: Sequence[str] | None
) -> tuple[float, Sequence[str] | None]:
    """The held-out share and the classes: what was asked, else the run's own, so that no training image is tested on.

    The classes of a run are those of its own data; other data may not have them.
    """
    own = loaded.run.config if loaded.run is not None else None
    if holdout is None:
        holdout = own.holdout if own else 0.1
    if classes is None and own and os.path.abspath(own.data) == os.path.abspath(data_name(data)):
        classes = own.classes
    return holdout, classes


def check_k(k: Sequence[int] | None, bank: int) -> None:
    """Refuse before anything is computed what cannot be."""
    if k is not None and (not k or min(k) < 1 or max(k) > bank):
        raise UsageError(f"k: {list(k)} was given; with {bank} images to search, 1 to {bank} is allowed.")


def linear_protocol(row: str, lr: Sequence[float] | None, epochs: int | None) -> LinearProtocol:
    """A row of PROTOCOLS with other rates, or another length at which the drops keep their places."""
    if row not in PROTOCOLS:
        raise UsageError(f"as: {row!r} is not known.{nearest(row, PROTOCOLS)} Allowed: {', '.join(PROTOCOLS)}.")
    rules = PROTOCOLS[row]
    if epochs is not None:
        if epochs < 1:
            raise UsageError(f"epochs: given {epochs}; it must be at least 1.")
        drops = tuple(round(drop * epochs / rules.epochs) for drop in rules.drops)
        rules = replace(rules, epochs=epochs, drops=drops)
    if lr is not None:
        if min(lr) <= 0:
            raise UsageError(f"lr: given {list(lr)}; rates must be greater than 0.")
        rules = replace(rules, lr=tuple(lr))
    return rules


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

    @property
    def precision(self) -> str:
        return pick_precision("auto", self.device)

    def open(self, data: Data, split: str, holdout: float, classes: Sequence[str] | None) -> Split:
        """A labelled split: labels are asked for before anything is computed."""
        images = open_images(data, split, holdout=holdout, classes=classes)
        class_numbers(images.labels, f"the {split} images of {images.name}")
        return Split(images, self.loader(images))

    def loader(self, images: Images) -> Loader:
        """Photos much larger than the input are decoded at a reduced scale."""
        seen, run = self.loaded.preprocess, self.loaded.run
        allowed = run.config.max_broken if run is not None else 0.01
        return Loader(
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

    def labelled(self, split: Split, title: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Any]:
        assert split.images.labels is not None  # seen to by `open`
        features = self.features(split.loader, title, dtype)
        rows = usable_rows(features)
        usable = features if len(rows) == len(features) else features[rows]  # no copy of what may fill the memory
        return usable, split.images.labels[rows.numpy()]

    def knn(self, train: Split, test: Split, k: Sequence[int] | None, temperature: float) -> dict[int, float]:
        """Accuracy for each k; without one asked for, for the usual ones or as many images as there are."""
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32  # a bank may fill the memory
        bank, bank_labels = self.labelled(train, "features of the bank", dtype)
        queries, truth = self.labelled(test, "features to judge")
        asked = sorted({min(number, len(bank)) for number in USUAL_K}) if k is None else k
        if bank.nbytes < free_memory(self.device) / 4:  # else it travels in chunks
            bank = bank.to(self.device)
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
            source = CachedFeatures(features.to(self.device))
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
