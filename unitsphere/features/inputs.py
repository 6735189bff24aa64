"""What the protocols ask of features and labels."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Generator, Tensor

from unitsphere.common.errors import UnitsphereError, UsageError

ROWS_AT_ONCE = 16384


def class_numbers(labels: Tensor | np.ndarray | None, whose: str) -> Tensor:
    """labels as an (N,) int64 tensor on the CPU, or the reason why there is none."""
    if labels is None:
        raise UsageError(
            f"labels: {whose} have none, and this protocol needs them. Sort the images into one sub-folder "
            "per class (in PASCAL VOC's form: --data voc=PATH), or judge them without labels (unitsphere embed)."
        )
    numbers = torch.as_tensor(labels).to("cpu", torch.int64)
    if numbers.dim() != 1:
        raise UsageError(
            f"labels: {whose} may have several each, and this protocol takes one an image. For several there is svm."
        )
    without = int((numbers < 0).sum())
    if without:
        raise UsageError(f"labels: {without} of {len(numbers)} of {whose} have none. Leave those images out.")
    return numbers


def class_marks(labels: Tensor | np.ndarray | None, classes: int, whose: str) -> np.ndarray:
    """labels as (N, classes) int8: 1 the image shows the class, -1 it does not, 0 it is not to be judged by. What has
    one label an image shows its class alone."""
    if isinstance(labels, np.ndarray) and labels.ndim == 2:
        return labels
    numbers = class_numbers(labels, whose).numpy()
    return np.where(numbers[:, None] == np.arange(classes), 1, -1).astype(np.int8)


def usable_rows(features: Tensor) -> Tensor:
    """Indices, ascending on the CPU, of the features (N, F) that are finite: not those of broken images."""
    # A sum is finite only if all its terms are; in float32, since that of half-precise ones could overflow.
    sums = torch.cat([part.float().sum(1) for part in features.split(ROWS_AT_ONCE)])
    rows = sums.isfinite().nonzero()[:, 0].cpu()
    if not len(rows):
        raise UnitsphereError(
            "No image has finite features: the backbone gives NaN or infinity. The run has diverged; take an "
            "earlier checkpoint, or train with a lower learning rate."
        )
    return rows


def require_finite(features: Tensor, whose: str) -> None:
    """Raises UnitsphereError where a row is not finite: to a search, NaN is the nearest of all."""
    bad = len(features) - len(usable_rows(features))
    if bad:
        raise UnitsphereError(
            f"features: {bad} of {len(features)} of {whose} have none that are finite. Leave out the broken "
            "images (usable_rows)."
        )


def stratified_split(labels: Tensor, share: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """Indices (kept, held out), ascending: `share` of every class is held out, rounded up, but never all."""
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    members = by_class.split(labels.unique(return_counts=True)[1].tolist())
    held_out = torch.cat([m[: min(math.ceil(share * len(m)), len(m) - 1)] for m in members]).sort().values
    kept = torch.ones(len(labels), dtype=torch.bool)
    kept[held_out] = False
    return kept.nonzero()[:, 0], held_out
