"""The protocols: each takes a backbone, training and test images, and says how good the one is on the others.

What a protocol's papers settled differently are rows of data (PROTOCOLS, FINE_TUNING); the keywords of each function
here are what a user may ask of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np

from unitsphere.common.errors import UsageError, check_word
from unitsphere.common.extras import require
from unitsphere.data.images import Images
from unitsphere.evaluation.finetune import FINE_TUNING, FineTuning
from unitsphere.evaluation.labelled import listed_part, stratified_fraction
from unitsphere.evaluation.linear import PROTOCOLS, LinearProtocol, count_classes
from unitsphere.evaluation.subject import Split, Subject
from unitsphere.evaluation.svm import VOC2007, check_marks, svm
from unitsphere.features.inputs import class_marks, class_numbers
from unitsphere.features.knn import check_temperature

TRANSFER = ("inaturalist2018", "places205")  # data with rows of PROTOCOLS that are named after them
FEW = 0.03  # a share of labels nearer to 1 % than to 10 %: the encoder is frozen
SMALL = 64  # inputs up to this size are fine-tuned on larger crops, as they are pre-trained on views of their own
Rules = TypeVar("Rules", bound=LinearProtocol)


@dataclass(frozen=True)
class Verdict:
    """value: percent by name; constants: what it depends on; train, test: the images it comes from."""

    value: dict[str, float]
    constants: dict[str, Any]
    train: Split
    test: Split


def judge_knn(
    subject: Subject,
    train: Images,
    test: Images,
    seed: int,
    *,
    k: Sequence[int] | None = None,
    temperature: float = 0.1,
) -> Verdict:
    """k: None for the usual ones, or what the images allow."""
    if k is not None and (not k or min(k) < 1 or max(k) > len(train)):
        raise UsageError(f"k: {list(k)} was given; with {len(train)} images to search, 1 to {len(train)} is allowed.")
    check_temperature(temperature)
    bank, queries = subject.classified(train, "training"), subject.classified(test, "test")
    accuracies = subject.knn(bank, queries, k, temperature)
    value = {f"k={number}": accuracy for number, accuracy in accuracies.items()}
    return Verdict(value, {"k": list(accuracies), "temperature": temperature}, bank, queries)


def judge_linear(
    subject: Subject,
    train: Images,
    test: Images,
    seed: int,
    *,
    row: str = "moco",
    lr: Sequence[float] | None = None,
    epochs: int | None = None,
    augment: bool = False,
) -> Verdict:
    """augment: the faithful form, with fresh views in every epoch."""
    rules = adapted(PROTOCOLS, row, lr, epochs)
    known, asked = subject.classified(train, "training"), subject.classified(test, "test")
    refuse_unknown_classes(known.images, asked.images)
    chosen = subject.linear(known, asked, rules, seed, augment).chosen
    constants = {**asdict(rules), "row": row, "augment": augment, "chosen_lr": chosen.lr}
    return Verdict(tops(chosen.top1, chosen.top5), constants, known, asked)


def judge_transfer(
    subject: Subject,
    train: Images,
    test: Images,
    seed: int,
    *,
    row: str | None = None,
    lr: Sequence[float] | None = None,
    epochs: int | None = None,
    augment: bool = False,
) -> Verdict:
    """`linear` with MSBReg's settings for this data set; other data have those of iNaturalist, the longer ones."""
    if row is None:
        row = train.name if train.name in TRANSFER else "inaturalist2018"
    return judge_linear(subject, train, test, seed, row=row, lr=lr, epochs=epochs, augment=augment)


def judge_semi(
    subject: Subject,
    train: Images,
    test: Images,
    seed: int,
    *,
    fraction: float | None = None,
    labelled: str | os.PathLike[str] | None = None,
    row: str | None = None,
    lr: Sequence[float] | None = None,
    encoder_lr: Sequence[float] | None = None,
    epochs: int | None = None,
) -> Verdict:
    """Fine-tuning on the part of the training images that a list names, or on a stratified fraction of them."""
    if (fraction is None) == (labelled is None):
        raise UsageError("semi: give one of --fraction SHARE (0.01 and 0.1 are usual) and --labelled FILE.")
    if labelled is not None:
        part = listed_part(train, test, labelled)
    else:
        assert fraction is not None
        part = stratified_fraction(train, fraction, seed)
    if row is None:
        row = "msbreg-1%" if len(part) / len(train) < FEW else "msbreg-10%"
    verdict = judge_finetune(subject, part, test, seed, row=row, lr=lr, encoder_lr=encoder_lr, epochs=epochs)
    which = {"fraction": fraction, "labelled": None if labelled is None else os.fspath(labelled)}
    return replace(verdict, constants=verdict.constants | which)


def judge_finetune(
    subject: Subject,
    train: Images,
    test: Images,
    seed: int,
    *,
    row: str = "full",
    lr: Sequence[float] | None = None,
    encoder_lr: Sequence[float] | None = None,
    epochs: int | None = None,
) -> Verdict:
    """subject.batch_size: the images of a step. The row's rates follow it in proportion; given ones do not."""
    rules, loaded = adapted(FINE_TUNING, row, None, epochs), subject.loaded
    if subject.batch_size is not None:
        rules = per_batch(rules, subject.batch_size)
    if loaded.preprocess.size <= SMALL:
        rules = replace(rules, views="supervised-small")
    if lr is not None:
        rules = replace(rules, lr=positive("lr", lr))
    if encoder_lr is not None:
        rules = replace(rules, encoder_lr=positive("encoder_lr", encoder_lr, or_zero=True))
    if not list(loaded.backbone.parameters()):  # pixels
        if encoder_lr is not None and any(encoder_lr):
            given = list(encoder_lr)
            raise UsageError(f"encoder_lr: given {given}, but nothing in {loaded.name} can be trained. Leave it out.")
        rules = replace(rules, encoder_lr=(0.0,))
    known, asked = subject.classified(train, "training"), subject.classified(test, "test")
    found = subject.finetune(known, asked, rules, seed)
    chosen = {"chosen_lr": found.chosen.lr, "chosen_encoder_lr": found.chosen.encoder_lr}
    return Verdict(tops(found.top1, found.top5), {**asdict(rules), "row": row, **chosen}, known, asked)


def judge_svm(subject: Subject, train: Images, test: Images, seed: int) -> Verdict:
    """Where an image has one label, it shows that class and no other; then also the accuracy of the highest score."""
    require("scikit-learn", "svm")
    classes = train.classes or numbered(train)
    train_marks, test_marks = (marks_of(each, classes, which) for each, which in ((train, "training"), (test, "test")))
    if not (train.multi_label or test.multi_label):
        refuse_unknown_classes(train, test)
    check_marks(train_marks, test_marks, classes)
    known = subject.split(replace(train, labels=train_marks))
    asked = subject.split(replace(test, labels=test_marks))
    features, marks = subject.labelled(known, "features to train on")
    queries, truth = subject.labelled(asked, "features to judge")
    show = subject.progress("machines", len(classes))
    found = svm(features, marks, queries, truth, classes, VOC2007, seed=seed, progress=show)
    value = {"mAP": float(np.mean(found.eleven_points)), "mAP_area": float(np.mean(found.area))}
    if not test.multi_label:
        value["top1"] = 100 * float(np.mean(found.scores.argmax(1) == truth.argmax(1)))
    per_class = {
        name: {"cost": cost, "AP": round(eleven, 2), "AP_area": round(area, 2)}
        for name, cost, eleven, area in zip(classes, found.costs, found.eleven_points, found.area, strict=True)
    }
    about = {"mAP": "VOC 2007: precision at 11 recalls", "mAP_area": "VOC 2010: area under precision by recall"}
    return Verdict(value, {**asdict(VOC2007), **about, "per_class": per_class}, known, asked)


def refuse_unknown_classes(train: Images, test: Images) -> None:
    """Images of a class that was never taught cannot be judged right."""
    count_classes(*(class_numbers(images.labels, images.name) for images in (train, test)))


def numbered(images: Images) -> tuple[str, ...]:
    """Names for classes that have none."""
    if images.labels is None:
        return ()
    return tuple(map(str, range(images.labels.shape[1] if images.multi_label else int(images.labels.max()) + 1)))


def marks_of(images: Images, classes: Sequence[str], which: str) -> np.ndarray:
    return class_marks(images.labels, len(classes), f"the {which} images of {images.name}")


JUDGES: dict[str, Callable[..., Verdict]] = {
    "knn": judge_knn,
    "linear": judge_linear,
    "transfer": judge_transfer,
    "semi": judge_semi,
    "finetune": judge_finetune,
    "svm": judge_svm,
}


def tops(top1: float, top5: float | None) -> dict[str, float]:
    return {"top1": top1} | ({} if top5 is None else {"top5": top5})


def adapted(rows: dict[str, Rules], row: str, lr: Sequence[float] | None, epochs: int | None) -> Rules:
    """A row with other rates, or with another length at which the drops keep their places."""
    check_word("row (--as)", row, rows)
    rules = rows[row]
    if epochs is not None:
        if epochs < 1:
            raise UsageError(f"epochs: given {epochs}; it must be at least 1.")
        drops = tuple(max(1, round(drop * epochs / rules.epochs)) for drop in rules.drops)
        rules = replace(rules, epochs=epochs, drops=drops)
    return rules if lr is None else replace(rules, lr=positive("lr", lr))


def positive(field: str, rates: Sequence[float], or_zero: bool = False) -> tuple[float, ...]:
    if not rates or not all(0 < rate < math.inf or (rate == 0 and or_zero) for rate in rates):
        allowed = "numbers of at least 0 (0 freezes)" if or_zero else "numbers greater than 0"
        raise UsageError(f"{field}: given {list(rates)}; rates must be {allowed}.")
    return tuple(rates)


def per_batch(rules: FineTuning, batch_size: int) -> FineTuning:
    """The row for steps of another number of images: the rates are in proportion to it."""
    scale = batch_size / rules.batch_size
    lr, encoder_lr = (tuple(scale * rate for rate in rates) for rates in (rules.lr, rules.encoder_lr))
    return replace(rules, batch_size=batch_size, lr=lr, encoder_lr=encoder_lr)
