"""What evaluation costs: features, k-NN, linear probes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from benchmarks.measuring import Results, Row, milliseconds
from benchmarks.steps import on_device, settings
from unitsphere.common.devices import pick_precision
from unitsphere.data.loader import Loader
from unitsphere.data.python_data import from_array
from unitsphere.evaluation.linear import linear
from unitsphere.evaluation.recipes import LINEAR_RECIPES
from unitsphere.features.extract import CachedFeatures, extract, forward, frozen
from unitsphere.features.knn import knn
from unitsphere.views.evaluation import Preprocess

CLASSES = 10
RATES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
PROBE_EPOCHS = 5


def time_evaluation(results: Results, tiny: bool) -> None:
    device = results.device
    bank, queries, k = (500, 100, 20) if tiny else (50_000, 10_000, 200)
    backbone = "resnet-tiny, 16x16" if tiny else "resnet18 with the small stem, 32x32"
    results.section("features", f"{bank:,} resident images, {backbone}")
    for batch in (256, 1024):
        results.add("features", f"forward passes alone, batch {batch}", partial(time_forward, device, tiny, batch))
    for size in (256, None):
        name = f"unitsphere extract, batch {size or 'of its own choice'}"
        results.add("features", name, partial(time_extract, device, tiny, bank, size))
    results.section("knn", f"{queries:,} queries on {bank:,} images, k {k}; the bank on the device, queries on the CPU")
    for dim in (128, 512):
        results.add("knn", f"{dim} dimensions", partial(time_knn, device, bank, queries, dim, k))
    results.section("linear", f"{PROBE_EPOCHS} epochs on {bank:,} cached features of 512 dimensions, batch 256")
    for rates in (RATES[-1:], RATES):
        name = "1 rate" if len(rates) == 1 else f"{len(rates)} rates, chosen on a tenth and trained again"
        results.add("linear", name, partial(time_linear, device, bank, rates))


def time_forward(device: torch.device, tiny: bool, batch: int) -> Row:
    """The most that extraction can reach: the same network on one batch that is ready."""
    config = settings("resnet18", tiny)
    backbone = on_device(config, device, compiled=False).backbone
    images = torch.randn(batch, 3, config.image_size, config.image_size, device=device)
    precision = pick_precision("auto", device)
    with frozen(backbone):
        ms = milliseconds(lambda: forward(backbone, images, precision), device)
    return {"ms": round(ms, 3), "images_per_second": round(1e3 * batch / ms)}


def time_extract(device: torch.device, tiny: bool, count: int, batch: int | None) -> Row:
    config = settings("resnet18", tiny)
    backbone = on_device(config, device, compiled=False).backbone
    size = config.image_size
    pixels = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    loader = Loader(from_array(pixels), device=device, resident=True)
    preprocess = Preprocess(size, size, (0.5,) * 3, (0.25,) * 3)
    precision = pick_precision("auto", device)
    work = partial(extract, backbone, loader, preprocess, batch_size=batch, device=device, precision=precision)
    ms = milliseconds(work, device, warm_up=1, rounds=3)
    return {"ms": round(ms, 2), "images_per_second": round(1e3 * count / ms)}


def time_knn(device: torch.device, bank: int, queries: int, dim: int, k: int) -> Row:
    random = torch.Generator().manual_seed(0)
    features, labels = torch.randn(bank, dim, generator=random), torch.randint(CLASSES, (bank,), generator=random)
    asked, truth = torch.randn(queries, dim, generator=random), torch.randint(CLASSES, (queries,), generator=random)
    work = partial(knn, features.to(device), labels, asked, truth, k=[k])
    return {"ms": round(milliseconds(work, device, warm_up=1, rounds=3), 2)}


def time_linear(device: torch.device, count: int, rates: tuple[float, ...]) -> Row:
    random = torch.Generator().manual_seed(0)
    features, labels = torch.randn(count, 512, generator=random), torch.randint(CLASSES, (count,), generator=random)
    rules = replace(LINEAR_RECIPES["moco"], lr=rates, epochs=PROBE_EPOCHS, drops=())
    source = CachedFeatures(features.to(device))
    test, test_labels = features[: count // 5], labels[: count // 5]
    work = partial(linear, source, labels, test, test_labels, rules, device=device)
    return {"ms": round(milliseconds(work, device, warm_up=1, rounds=3), 2)}
