"""CIFAR-10 from images to a backbone: symmetric MoCo, ResNet-18, batch 512, augmentation and k-NN included.

Both contenders train for some epochs, and after each of them the same training images vote on the same test images
(unitsphere's online k-NN). The clock never stops between the ends of two epochs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import unitsphere
from benchmarks.measuring import Results, Row
from benchmarks.steps import settings
from unitsphere.common.machine import worker_count
from unitsphere.config.config import Config
from unitsphere.data.images import Images, evenly
from unitsphere.data.source import open_images
from unitsphere.features.knn import knn
from unitsphere.images.decode import decode
from unitsphere.training.online import BANK_IMAGES, HELD_OUT_IMAGES, ONLINE_K

EPOCHS = {"lightly": 4, "unitsphere": 12}  # of which the first is not counted: it starts the workers, or compiles
SECTION = "end to end"


@dataclass(frozen=True)
class Decoded:
    images: np.ndarray  # (N, H, W, 3) uint8
    labels: np.ndarray


def compare_runs(results: Results, data: Path, tiny: bool) -> None:
    """data: CIFAR-10 as a pack or a folder."""
    config = settings("resnet18", tiny, symmetric=True)
    results.section(
        SECTION,
        f"CIFAR-10, symmetric MoCo, resnet18, batch {config.batch_size}, queue {config.queue_size}, {config.bn_groups} "
        f"BN groups, views and k-NN ({BANK_IMAGES:,} on {HELD_OUT_IMAGES:,} images after each epoch) included; "
        f"{worker_count()} workers for lightly",
    )
    decoded = cache(lambda split, limit: decode_split(data, split, limit))
    epochs = dict.fromkeys(EPOCHS, 2) if tiny else EPOCHS
    results.add(SECTION, "lightly", partial(run_lightly, config, decoded, results.device, epochs["lightly"]))
    results.add(SECTION, "unitsphere", partial(run_unitsphere, config, data, results.device, epochs["unitsphere"]))


def run_lightly(config: Config, decoded: Any, device: torch.device, epochs: int) -> Row:
    from benchmarks.peers import lightly_moco

    train, bank, queries = decoded("train", None), decoded("train", BANK_IMAGES), decoded("val", HELD_OUT_IMAGES)
    on_device = [torch.from_numpy(split.images).to(device) for split in (bank, queries)]
    ends, accuracies = [], []

    def after_epoch(backbone: nn.Module) -> None:
        known, asked = (lightly_moco.features(backbone, images) for images in on_device)
        k = min(ONLINE_K, len(known))
        accuracies.append(knn(known, bank.labels, asked, queries.labels, k=[k], device=device)[k])
        ends.append(time.time())

    started = time.time()
    lightly_moco.pretrain(
        train.images,
        epochs=epochs,
        batch_size=config.batch_size,
        workers=worker_count(),
        device=device,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        after_epoch=after_epoch,
        queue_size=config.queue_size,
        temperature=config.temperature,
        momentum=config.key_momentum,
        splits=config.bn_groups,
    )
    return row(len(train.images) // config.batch_size * config.batch_size, started, ends, accuracies)


def run_unitsphere(config: Config, data: Path, device: torch.device, epochs: int) -> Row:
    """The run's own TensorBoard events tell when each epoch was over, its k-NN included."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    own = {"epochs": epochs, "knn_every": 1, "device": device.type, "compile": device.type == "cuda"}
    fields = config.model_dump(mode="json", exclude={"data", "lr", "method"}) | own
    with tempfile.TemporaryDirectory() as scratch:
        started = time.time()
        run = unitsphere.pretrain(config.method, data=data, out=Path(scratch) / "run", **fields)
        events = EventAccumulator(str(run.path / "events"))
        events.Reload()
    found = events.Scalars("knn")
    images = len(open_images(data, "train")) // config.batch_size * config.batch_size
    return row(images, started, [event.wall_time for event in found], [event.value for event in found])


def row(images: int, started: float, ends: list[float], accuracies: list[float]) -> Row:
    """images: of an epoch. The first epoch holds all that is done once, the reading of the images included."""
    seconds = np.diff([started, *ends]).tolist()
    return {
        "images_per_second": round(images / statistics.median(seconds[1:])),
        "images_per_second_overall": round(images * len(seconds) / sum(seconds)),
        "seconds_to_start": round(seconds[0], 1),
        "seconds_of_epochs": [round(each, 2) for each in seconds],
        "knn": round(accuracies[-1], 2),
    }


def decode_split(data: Path, split: str, limit: int | None) -> Decoded:
    """All images of a split, or so many evenly spaced."""
    images: Images = open_images(data, split)
    indices = evenly(len(images), limit or len(images)).tolist()
    with ThreadPoolExecutor(worker_count()) as pool:
        arrays = list(pool.map(lambda index: decode(images.read(index), channels=3), indices))
    if images.labels is None:
        raise ValueError(f"{data}: labelled images are needed")
    return Decoded(np.stack(arrays), images.labels[indices])
