"""`unitsphere evaluate`: a backbone and labelled images in, a number out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from unitsphere.common.devices import memory_errors, pick_device, pick_precision
from unitsphere.common.errors import UsageError, nearest
from unitsphere.common.terminal import bars, warn
from unitsphere.data.images import Images
from unitsphere.data.source import Data, open_parts
from unitsphere.evaluation.backbone import JudgedBackbone, LabelledImages, Split, as_trained
from unitsphere.evaluation.options import Architecture, Options
from unitsphere.evaluation.protocols import PROTOCOLS, Protocol, find_protocol
from unitsphere.evaluation.settings import Settings, checked
from unitsphere.images.decode import MAX_PIXELS
from unitsphere.runs.loading import Spec, load

__all__ = ["evaluate"]

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
    max_pixels: int = MAX_PIXELS,
    seed: int = 0,
    verbose: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Judge a backbone on labelled images.

    what: a run, a checkpoint, a file of weights, `random`, `pixels`, `torchvision:NAME`, or a module.
    protocol: `knn`, `linear`, `transfer`, `semi`, `finetune`, `svm`; one from outside as `package.module:Name`.
    data: labelled images, as `pretrain` takes them; their `val` split is judged.
    features, batch_size, device, holdout, classes, max_broken, max_pixels: see `Options`. holdout, classes and
    max_broken are the run's own unless given, the classes on the run's own data alone.
    seed: of classifiers, held-out tenths, folds and fractions. verbose: show progress on a screen.
    settings: those of the protocol (`unitsphere evaluate --help` lists them), and for what is no run `backbone`,
    `stem`, `image_size`, `channels`.

    Returns the entry that is added to a run's results.json. Its `value` is in percent, of the last epoch;
    `largest_class` is the percentage of the largest of the test images' classes.
    """
    # First all that can be refused without opening anything.
    name_of_data = data_name(data)
    chosen = find_protocol(protocol)
    options: Options = checked(
        Options,
        {
            "features": features, "batch_size": batch_size, "device": device, "holdout": holdout, "classes": classes,
            "max_broken": max_broken, "max_pixels": max_pixels,
        },
    )  # fmt: skip
    given = {name: value for name, value in settings.items() if value is not None}
    known = {*chosen.settings.model_fields, *Architecture.model_fields}
    if others := [name for name in given if name not in known]:
        raise not_taken(others[0], protocol, chosen)
    architecture = {name: given.pop(name) for name in Architecture.model_fields if name in given}
    asked: Settings = checked(chosen.settings, {"seed": seed, **given})

    # Then the backbone and the images: a run's own division, so that no training image is tested on.
    loaded = load(what, features=features, seed=seed, **architecture)
    trained = as_trained(loaded, name_of_data, options)
    with bars(verbose) as progress, memory_errors(MEMORY_ADVICE):
        place = pick_device(device)
        precision = pick_precision("auto", place)
        backbone = JudgedBackbone(loaded, place, precision, batch_size, progress, trained.max_broken)
        parts = open_parts(data, holdout=trained.holdout, classes=trained.classes, max_pixels=max_pixels)
        images = LabelledImages(*parts)
        check_classes(images.train, images.test)
        judgement = chosen.run(backbone, images, asked)

    # Last what is written down.
    result = {
        "protocol": protocol,
        "data": name_of_data,
        "value": {name: round(number, 2) for name, number in judgement.value.items()},
        "epoch": loaded.epoch,
        "seed": loaded.seed if loaded.seed is not None else seed,
        "evaluation_seed": seed,
        "backbone": loaded.name,
        "features": features,
        "constants": {"holdout": trained.holdout, "classes": trained.classes, **judgement.constants},
        **trained.caveats,
        **images_of(judgement.train, judgement.test, images.test),
    }
    if loaded.run is not None:
        try:
            loaded.run.add_result(result)
        except (OSError, ValueError) as error:  # what was found out is not lost for it
            warn(f"results.json of {loaded.run.path} could not be added to: {error}")
    return result


def not_taken(setting: str, name: str, protocol: Protocol) -> UsageError:
    """Make the error for a setting that nothing takes, or that this protocol would ignore in silence."""
    takes = ", ".join(protocol.options) or "nothing of the kind"
    if any(setting in other.options for other in PROTOCOLS.values()):
        return UsageError(f"{setting}: protocol {name} does not take it; it takes {takes}.")
    near = nearest(setting, [*Options.model_fields, "seed", *protocol.options, *Architecture.model_fields])
    of_weights = ", ".join(Architecture.model_fields)
    return UsageError(f"{setting}: there is no such setting.{near} Of {name}: {takes}. Of weights: {of_weights}.")


def images_of(train: Split, test: Split, judged: Images) -> dict[str, Any]:
    """Say how many images taught and were judged, which of them could not be read, and, of one label an image, how many
    classes the judged ones have and the percentage of the largest: an answer that always names it is right as often."""
    untaught, unjudged = train.loader.broken, test.loader.broken
    taught, left = train.loader.count - len(untaught), test.loader.count - len(unjudged)
    about: dict[str, Any] = {"images": {"train": taught, "test": left}}
    if judged.labels is not None and judged.labels.ndim == 1:
        readable = np.array([name not in unjudged for name in judged.names])
        counts = np.unique(judged.labels[readable], return_counts=True)[1]
        about |= {"classes": len(counts), "largest_class": round(100 * float(counts.max() / counts.sum()), 2)}
    broken = untaught | unjudged
    return about | ({"broken": broken} if broken else {})


def check_classes(train: Images, test: Images) -> None:
    """Raise UsageError where a label means one class to teach and another to judge. Either may lack the last ones."""
    for label, (taught, judged) in enumerate(zip(train.classes or (), test.classes or (), strict=False)):
        if taught != judged:
            raise UsageError(
                f"data: label {label} of {train.name} is {taught!r} in the training images and {judged!r} in the test "
                "images. Both must have the same classes in the same order: number them, or name them alike."
            )


def data_name(data: Data) -> str:
    """Return what runs and results call the data."""
    return os.fspath(data) if isinstance(data, str | os.PathLike) else "custom"
