"""`antipode evaluate`: a frozen backbone and labelled images in, a number out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from antipode.data.loader import Loader
from antipode.data.machine import free_memory
from antipode.data.source import Data, Images, open_images
from antipode.devices import pick_device, pick_precision
from antipode.errors import UsageError, nearest
from antipode.evaluation.features import AugmentedFeatures, CachedFeatures, extract
from antipode.evaluation.inputs import usable_rows
from antipode.evaluation.knn import knn
from antipode.evaluation.linear import PROTOCOLS, LinearProtocol, LinearResult, linear
from antipode.loading import Loaded, Spec, load
from antipode.terminal import MakeProgress, bars


def evaluate(
    what: Spec | nn.Module,
    *,
    protocol: str,
    data: Data,
    features: str = "backbone",
    batch_size: int = 256,
    device: str = "auto",
    holdout: float = 0.1,
    seed: int = 0,
    k: Sequence[int] = (20, 200),
    temperature: float = 0.1,
    row: str = "moco",
    lr: Sequence[float] | None = None,
    epochs: int | None = None,
    augment: bool = False,
    **architecture: Any,
) -> dict[str, Any]:
    """Judge `what` (a run, a checkpoint, a file of weights, `random`, `torchvision:NAME`, a module) on `data`.

    protocol: `knn` with k and temperature, or `linear` with the row of PROTOCOLS, lr, epochs, and augment for the
    faithful form. architecture: backbone, stem, image_size, channels for what is no run. The result is returned
    and, for a run, added to its results.json. Numbers are percent, of the last epoch.
    """
    if protocol not in ("knn", "linear"):
        raise UsageError(
            f"protocol: {protocol!r} is not known.{nearest(protocol, ['knn', 'linear'])} Allowed: knn, linear."
        )
    rules = linear_protocol(row, lr, epochs) if protocol == "linear" else None
    loaded = load(what, features=features, seed=seed, **architecture)
    with bars() as progress:
        subject = Subject(loaded, pick_device(device), batch_size, progress)
        train, test = (subject.open(data, split, holdout) for split in ("train", "val"))
        if rules is None:
            constants: dict[str, Any] = {"k": list(k), "temperature": temperature}
            value = subject.knn(train, test, k, temperature)
        else:
            found = subject.linear(train, test, rules, seed, augment)
            chosen = found.chosen
            constants = {**asdict(rules), "row": row, "augment": augment, "chosen_lr": chosen.lr}
            value = {"top1": chosen.top1} | ({} if chosen.top5 is None else {"top5": chosen.top5})
    result = {
        "protocol": protocol,
        "data": data if isinstance(data, str) else "custom",
        "value": {name: round(number, 2) for name, number in value.items()},
        "epoch": loaded.epoch,
        "seed": loaded.seed if loaded.seed is not None else seed,
        "backbone": loaded.name,
        "features": features,
        "constants": constants | {"holdout": holdout},
        "images": {"train": len(train.images), "test": len(test.images)},
    }
    if loaded.run is not None:
        loaded.run.add_result(result)
    return result


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


@dataclass(frozen=True)
class Subject:
    """The backbone under judgement, on its device."""

    loaded: Loaded
    device: torch.device
    batch_size: int
    progress: MakeProgress

    @property
    def precision(self) -> str:
        return pick_precision("auto", self.device)

    def open(self, data: Data, split: str, holdout: float) -> Split:
        images = open_images(data, split, holdout=holdout)
        return Split(images, self.loader(images))

    def loader(self, images: Images) -> Loader:
        """Photos much larger than the input are decoded at a reduced scale."""
        seen = self.loaded.preprocess
        return Loader(images, channels=seen.channels, depth=seen.depth, reduce_to=2 * seen.resize, device=self.device)

    def features(self, loader: Loader, title: str) -> Tensor:
        """(N, F) of all images; NaN where one could not be read."""
        return extract(
            self.loaded.backbone,
            loader,
            self.loaded.preprocess,
            batch_size=self.batch_size,
            device=self.device,
            precision=self.precision,
            progress=self.progress(title, len(loader)),
        )

    def labelled(self, split: Split, title: str) -> tuple[Tensor, Any]:
        if split.images.labels is None:
            raise UsageError(
                f"data: {split.images.name} has no labels, and this protocol needs them. Sort the images into one "
                "sub-folder a class, or look at them with `antipode embed`."
            )
        features = self.features(split.loader, title)
        rows = usable_rows(features)
        return features[rows], split.images.labels[rows.numpy()]

    def knn(self, train: Split, test: Split, k: Sequence[int], temperature: float) -> dict[str, float]:
        bank, bank_labels = self.labelled(train, "features of the bank")
        queries, truth = self.labelled(test, "features to judge")
        if bank.nbytes < free_memory(self.device) / 4:  # else it travels in chunks
            bank = bank.to(self.device)
        found = knn(bank, bank_labels, queries, truth, k=k, temperature=temperature, device=self.device)
        return {f"k={number}": accuracy for number, accuracy in found.items()}

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
