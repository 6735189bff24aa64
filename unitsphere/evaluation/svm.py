"""Linear support vector machines on frozen features, one for each class, as PASCAL VOC 2007 is judged.

Features have length 1. The machine of a class is scikit-learn's LinearSVC (squared hinge, l2), where images that show
the class weigh twice as much as those that do not. Its cost is the power of two with the best average precision,
cross-validated on the training images; it is then trained on all of them and ranks the test images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from unitsphere.common.errors import UsageError
from unitsphere.common.extras import require
from unitsphere.common.machine import worker_count
from unitsphere.common.randomness import generator
from unitsphere.evaluation.backbone import JudgedBackbone, Judgement, LabelledImages, LinearModel, class_names
from unitsphere.evaluation.linear import refuse_unknown_classes
from unitsphere.evaluation.settings import Settings
from unitsphere.features.inputs import class_marks


@dataclass(frozen=True)
class SvmRecipe:
    costs: tuple[float, ...] = tuple(2.0**power for power in range(-10, 8))
    folds: int = 3
    positive_weight: float = 2.0  # of an image that shows the class; one that does not weighs 1


VOC2007 = SvmRecipe()


def judge(backbone: JudgedBackbone, data: LabelledImages, settings: Settings) -> Judgement:
    """Train a machine for each class. Where an image has one label, it shows that class and no other; then the result
    also has the accuracy of the highest score."""
    require("scikit-learn", "svm")
    one_label = not (data.train.multi_label or data.test.multi_label)
    classes = class_names(data.train)
    train_marks, test_marks = (
        class_marks(images.labels, len(classes), f"the {which} images of {images.name}")
        for images, which in ((data.train, "training"), (data.test, "test"))
    )
    if one_label:
        refuse_unknown_classes(data)
    check_marks(train_marks, test_marks, classes)
    train, test = (
        backbone.open(replace(images, labels=marks))
        for images, marks in ((data.train, train_marks), (data.test, test_marks))
    )
    features, marks = backbone.frozen_features(train, "features to train on")
    queries, truth = backbone.frozen_features(test, "features to judge")
    show = backbone.progress("machines", len(classes))
    found = svm(features, marks, queries, truth, classes, VOC2007, seed=settings.seed, progress=show)
    value = {"mAP": float(np.mean(found.eleven_points)), "mAP_area": float(np.mean(found.area))}
    if not data.test.multi_label:
        value["top1"] = 100 * float(np.mean(found.scores.argmax(1) == truth.argmax(1)))
    per_class = {
        name: {"cost": cost, "AP": round(eleven, 2), "AP_area": round(area, 2)}
        for name, cost, eleven, area in zip(classes, found.costs, found.eleven_points, found.area, strict=True)
    }
    about = {"mAP": "VOC 2007: precision at 11 recalls", "mAP_area": "VOC 2010: area under precision by recall"}
    return Judgement(
        value=value,
        constants={**asdict(VOC2007), **about, "per_class": per_class},
        train=train,
        test=test,
        model=LinearModel(found.weight, found.bias, tuple(classes), unit_length=True),
    )


@dataclass(frozen=True)
class SvmResult:
    """Each class's chosen cost and its average precision by either rule, in percent; scores (N, C) of test images; and
    the machines themselves: weight (C, F), bias (C,)."""

    costs: tuple[float, ...]
    eleven_points: tuple[float, ...]
    area: tuple[float, ...]
    scores: np.ndarray
    weight: Tensor
    bias: Tensor


def svm(
    train: Tensor,
    train_marks: np.ndarray,
    test: Tensor,
    test_marks: np.ndarray,
    classes: Sequence[str],
    recipe: SvmRecipe = VOC2007,
    *,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> SvmResult:
    """train (N, F) with marks (N, C), test (M, F) with marks (M, C): 1 shown, -1 not shown, 0 left out.

    progress is called with the number of classes done.
    """
    require("scikit-learn", "svm")
    check_marks(train_marks, test_marks, classes)
    known, asked = (normalize(features.double(), dim=1).cpu().numpy() for features in (train, test))

    def one(number: int) -> tuple[float, float, float, np.ndarray, Any]:
        judged = train_marks[:, number] != 0
        rows, marks = known[judged], train_marks[judged, number]
        cost = best_cost(rows, marks, recipe, generator(seed, "svm-folds", number))
        machine = fit(rows, marks, cost, recipe)
        scores = machine.decision_function(asked)
        counted = test_marks[:, number] != 0
        precision, recall = ranked(scores[counted], test_marks[counted, number] > 0)
        eleven, area = eleven_point_average(precision, recall), area_average(precision, recall)
        return cost, 100 * eleven, 100 * area, scores, machine

    found = []
    with ThreadPoolExecutor(worker_count()) as pool:  # liblinear lets go of the interpreter's lock
        for done, each in enumerate(pool.map(one, range(len(classes))), 1):
            found.append(each)
            if progress:
                progress(done)
    costs, eleven, area, scores, machines = zip(*found, strict=True)
    return SvmResult(
        costs,
        eleven,
        area,
        scores=np.stack(scores, axis=1),
        weight=torch.from_numpy(np.concatenate([machine.coef_ for machine in machines])),
        bias=torch.from_numpy(np.concatenate([machine.intercept_ for machine in machines])),
    )


def check_marks(train: np.ndarray, test: np.ndarray, classes: Sequence[str]) -> None:
    """Whether every class can be learnt and judged: (N, C) and (M, C)."""
    for number, name in enumerate(classes):
        shown, not_shown = ((train[:, number] == mark).sum() for mark in (1, -1))
        if min(shown, not_shown) < 2:
            raise UsageError(
                f"labels: {shown} of the training images show {name!r} and {not_shown} do not; choosing a cost by "
                "cross-validation needs at least 2 of each. Add images, or leave the class out (--classes)."
            )
        if not (test[:, number] == 1).any():
            raise UsageError(
                f"labels: no test image shows {name!r}, so it has no precision. Leave the class out (--classes)."
            )


def fit(features: np.ndarray, marks: np.ndarray, cost: float, recipe: SvmRecipe) -> Any:
    """In the primal form, which draws nothing by chance."""
    from sklearn.svm import LinearSVC  # type: ignore[import-untyped]

    weights = {1: recipe.positive_weight, -1: 1.0}
    return LinearSVC(C=cost, class_weight=weights, dual=False, max_iter=2000).fit(features, marks)


def best_cost(features: np.ndarray, marks: np.ndarray, recipe: SvmRecipe, draws: torch.Generator) -> float:
    """That with the best average precision (the area) over the folds; of equals, the lowest."""
    fold_of = stratified_folds(marks, recipe.folds, draws)
    means = []
    for cost in recipe.costs:
        precisions = []
        for fold in range(fold_of.max() + 1):
            held = fold_of == fold
            scores = fit(features[~held], marks[~held], cost, recipe).decision_function(features[held])
            precisions.append(area_average(*ranked(scores, marks[held] > 0)))
        means.append(np.mean(precisions))
    return recipe.costs[int(np.argmax(means))]


def stratified_folds(marks: np.ndarray, folds: int, draws: torch.Generator) -> np.ndarray:
    """(N,) the fold of each image, as many of either mark in each as can be; no more folds than there are of either."""
    folds = min(folds, *np.unique(marks, return_counts=True)[1].tolist())
    order = torch.randperm(len(marks), generator=draws).numpy()
    fold_of = np.empty(len(marks), np.int64)
    for mark in (1, -1):
        members = order[marks[order] == mark]
        fold_of[members] = np.arange(len(members)) % folds
    return fold_of


def ranked(scores: np.ndarray, shown: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Precision and recall (t,) of what scores at least as much as the best, the next best .. and the last of t
    different scores; shown: (N,) bool. So the order in which equal scores come does not count."""
    order = np.argsort(-scores)
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)
    hits = np.cumsum(shown[order])
    return hits[ends] / (ends + 1), hits[ends] / hits[-1]


def eleven_point_average(precision: np.ndarray, recall: np.ndarray) -> float:
    """VOC 2007's rule: the mean over recalls 0, 0.1, .. 1 of the best precision at that recall or a higher one."""
    return float(np.mean([precision[recall >= tenths / 10 - 1e-12].max() for tenths in range(11)]))


def area_average(precision: np.ndarray, recall: np.ndarray) -> float:
    """VOC's rule from 2010 on: the area under the best precision at each recall or a higher one."""
    best = np.maximum.accumulate(precision[::-1])[::-1]
    return float(np.sum(best * np.diff(recall, prepend=0.0)))
