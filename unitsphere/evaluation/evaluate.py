"""`unitsphere evaluate`: a backbone and labelled images in, a number out."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from torch import nn

from unitsphere.common.devices import memory_errors, pick_device
from unitsphere.common.errors import UsageError, check_word, nearest
from unitsphere.common.terminal import bars, warn
from unitsphere.data.images import Images
from unitsphere.data.named import same_data
from unitsphere.data.source import Data, open_images
from unitsphere.evaluation.protocols import JUDGES, Verdict
from unitsphere.evaluation.subject import Subject
from unitsphere.runs.loading import ARCHITECTURE, Loaded, Spec, load

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
    k: int | Sequence[int] | None = None,
    temperature: float | None = None,
    row: str | None = None,
    lr: float | Sequence[float] | None = None,
    epochs: int | None = None,
    augment: bool | None = None,
    encoder_lr: float | Sequence[float] | None = None,
    fraction: float | None = None,
    labelled: str | os.PathLike[str] | None = None,
    **architecture: Any,
) -> dict[str, Any]:
    """Judge `what` (a run, a checkpoint, a file of weights, `random`, `torchvision:NAME`, a module) on `data`.

    protocol, and what may be asked of it:
    `knn`: k (default: 20 and 200, or what the images allow), temperature (0.1).
    `linear`, `transfer`: row of PROTOCOLS, lr, epochs, augment for the faithful form.
    `finetune`: row of FINE_TUNING, lr (of the classifier), encoder_lr (0 freezes), epochs.
    `semi`: the same, and which labels may be used: a stratified fraction, or a list of images (labelled).
    `svm`: nothing; an image may have several labels.

    holdout and max_broken are the run's own unless given, and so are the classes on the run's own data. architecture:
    backbone, stem, image_size, channels for what is no run. The result is returned and, for a run, added to its
    results.json. Numbers are percent, of the last epoch; largest_class is the percentage of the largest of the test
    images' classes.
    """
    check_word("protocol", protocol, JUDGES)
    check_features(features)
    settings = {
        "k": several(k), "temperature": temperature, "row": row, "lr": several(lr), "epochs": epochs,
        "augment": augment, "encoder_lr": several(encoder_lr), "fraction": fraction, "labelled": labelled,
    }  # fmt: skip
    given = {name: value for name, value in settings.items() if value is not None}
    judge = JUDGES[protocol]
    refuse_others(protocol, judge, given)
    refuse_unknown(protocol, judge, architecture)
    loaded = load(what, features=features, seed=seed, **architecture)
    holdout, classes = division(loaded, data, holdout, classes)
    with bars() as progress, memory_errors(MEMORY_ADVICE):
        subject = Subject(loaded, pick_device(device), batch_size, progress, max_broken)
        train, test = (open_images(data, split, holdout=holdout, classes=classes) for split in ("train", "val"))
        check_classes(train, test)
        verdict = judge(subject, train, test, seed, **given)
    result = {
        "protocol": protocol,
        "data": data_name(data),
        "value": {name: round(number, 2) for name, number in verdict.value.items()},
        "epoch": loaded.epoch,
        "seed": loaded.seed if loaded.seed is not None else seed,
        "evaluation_seed": seed,
        "backbone": loaded.name,
        "features": features,
        "constants": {"holdout": holdout, "classes": classes, **verdict.constants},
        **(loaded.record.caveats if loaded.record else {}),
        **images_of(verdict, test),
    }
    if loaded.run is not None:
        try:
            loaded.run.add_result(result)
        except (OSError, ValueError) as error:  # what was found out is not lost for it
            warn(f"results.json of {loaded.run.path} could not be added to: {error}")
    return result


def several(value: Any) -> Any:
    """One number is a list of one."""
    return [value] if isinstance(value, int | float) else value


def refuse_others(protocol: str, judge: Callable[..., Any], given: dict[str, Any]) -> None:
    """What is asked of a protocol that does not take it would otherwise be ignored in silence."""
    for name in given:
        if name not in keywords(judge):
            takes = listed(keywords(judge)) or "nothing of the kind"
            raise UsageError(f"{listed([name])}: protocol {protocol} does not take it; it takes {takes}.")


def refuse_unknown(protocol: str, judge: Callable[..., Any], architecture: Collection[str]) -> None:
    """Said here with all that there is to ask: `load` knows what weights take, and nothing else."""
    for name in architecture:
        if name not in ARCHITECTURE:
            raise UsageError(
                f"{name}: there is no such setting.{nearest(name, [*keywords(evaluate), *ARCHITECTURE])} "
                f"Of {protocol}: {listed(keywords(judge)) or 'nothing'}. Of weights: {listed(ARCHITECTURE)}."
            )


def listed(names: Collection[str]) -> str:
    return ", ".join("row (--as)" if name == "row" else name for name in names)


def keywords(function: Callable[..., Any]) -> list[str]:
    """What it takes by name alone: of a judge, what may be asked of its protocol."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def images_of(verdict: Verdict, test: Images) -> dict[str, Any]:
    """How many images taught and judged, of which classes, and which of them could not be read."""
    broken = verdict.train.loader.broken | verdict.test.loader.broken
    return {
        "images": {"train": verdict.train.readable, "test": verdict.test.readable},
        **judged_classes(test, verdict.test.loader.broken),
        **({"broken": broken} if broken else {}),
    }


def judged_classes(test: Images, broken: Collection[str]) -> dict[str, Any]:
    """How many classes the images that were judged have, and the percentage of the largest, which is right for whoever
    answers nothing else; of one label an image."""
    if test.labels is None or test.multi_label:
        return {}
    readable = np.array([name not in broken for name in test.names])
    counts = np.unique(test.labels[readable], return_counts=True)[1]
    return {"classes": len(counts), "largest_class": round(100 * float(counts.max() / counts.sum()), 2)}


def check_features(features: str) -> None:
    check_word("features", features, ("backbone", "embedding"))


def check_classes(train: Images, test: Images) -> None:
    """Raises UsageError where a label means one class to teach and another to judge. Either may lack the last ones."""
    for label, (taught, judged) in enumerate(zip(train.classes or (), test.classes or (), strict=False)):
        if taught != judged:
            raise UsageError(
                f"data: label {label} of {train.name} is {taught!r} in the training images and {judged!r} in the test "
                "images. Both must have the same classes in the same order: number them, or name them alike."
            )


def data_name(data: Data) -> str:
    """As runs and results record it."""
    return os.fspath(data) if isinstance(data, str | os.PathLike) else "custom"


def division(
    loaded: Loaded, data: Data, holdout: float | None, classes: Sequence[str] | None
) -> tuple[float, Sequence[str] | None]:
    """The held-out share and the classes: what was asked, else the run's own, so that no training image is tested on.

    The classes of a run are those of its own data; other data may not have them.
    """
    own = loaded.record
    if holdout is None:
        holdout = own.holdout if own else 0.1
    if classes is None and own and same_data(own.data, data_name(data)):
        classes = own.classes
    return holdout, classes
