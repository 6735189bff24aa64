"""The protocol `knn`: training images vote on the classes of test images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unitsphere.common.errors import UsageError
from unitsphere.evaluation.backbone import JudgedBackbone, Judgement, LabelledImages
from unitsphere.evaluation.settings import KnnSettings
from unitsphere.features.knn import knn

USUAL_K = (20, 200)


@dataclass(frozen=True)
class KnnModel:
    """The voters: features (B, F) and labels (B,), with the names of the classes where they have some."""

    bank: Tensor
    labels: np.ndarray
    classes: tuple[str, ...] | None
    k: tuple[int, ...]
    temperature: float


def judge(backbone: JudgedBackbone, data: LabelledImages, settings: KnnSettings) -> Judgement:
    """Give the accuracy for each k; for none asked for, of the usual ones or as many as there are images."""
    asked = settings.k
    if asked is not None and (not asked or min(asked) < 1 or max(asked) > len(data.train)):
        count = len(data.train)
        raise UsageError(f"k: {list(asked)} was given; with {count} images to search, 1 to {count} is allowed.")
    train, test = backbone.open_labelled(data)
    dtype = torch.bfloat16 if backbone.precision == "bf16" else torch.float32  # a bank may fill the memory
    bank, labels = backbone.frozen_features(train, "features of the bank", dtype)
    queries, truth = backbone.frozen_features(test, "features to judge")
    if asked is None:
        asked = tuple(sorted({min(number, len(bank)) for number in USUAL_K}))
    bank = backbone.where_it_fits(bank)
    found = knn(bank, labels, queries, truth, k=asked, temperature=settings.temperature, device=backbone.device)
    return Judgement(
        value={f"k={number}": accuracy for number, accuracy in found.items()},
        constants={"k": list(found), "temperature": settings.temperature},
        train=train,
        test=test,
        model=KnnModel(bank, labels, data.train.classes, asked, settings.temperature),
    )
