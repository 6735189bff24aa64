"""Average precision by hand, and the machines against scikit-learn's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from sklearn.model_selection import PredefinedSplit, cross_val_score
from sklearn.svm import LinearSVC

from unitsphere.common.errors import UsageError
from unitsphere.common.randomness import generator
from unitsphere.evaluation.svm import (
    SvmRecipe,
    area_average,
    best_cost,
    check_marks,
    eleven_point_average,
    ranked,
    stratified_folds,
    svm,
)
from unitsphere.features.inputs import class_marks

QUICK = SvmRecipe(costs=(2.0**-6, 0.25, 1.0, 32.0))


def test_average_precision_by_hand() -> None:
    """Ranked: shown, not, shown, not, not, shown. Precisions at the three that are shown: 1, 2/3, 1/2."""
    shown = np.array([True, True, False, False, True, False])
    scores = np.array([0.9, 0.2, 0.8, 0.4, 0.6, 0.3])
    precision, recall = ranked(scores, shown)
    assert precision == pytest.approx([1, 1 / 2, 2 / 3, 1 / 2, 2 / 5, 1 / 2])
    assert recall == pytest.approx([1 / 3, 1 / 3, 2 / 3, 2 / 3, 2 / 3, 1])
    # recalls 0 .. 0.3 reach precision 1, 0.4 .. 0.6 reach 2/3, 0.7 .. 1 reach 1/2
    assert eleven_point_average(precision, recall) == pytest.approx((4 * 1 + 3 * 2 / 3 + 4 * 1 / 2) / 11)
    assert area_average(precision, recall) == pytest.approx((1 + 2 / 3 + 1 / 2) / 3)


def test_precision_at_a_recall_is_the_best_at_that_or_a_higher_one() -> None:
    """Not, shown, shown: precisions 0, 1/2, 2/3, and 2/3 counts everywhere by either rule."""
    curve = ranked(np.array([3.0, 2, 1]), np.array([False, True, True]))
    assert eleven_point_average(*curve) == pytest.approx(2 / 3)
    assert area_average(*curve) == pytest.approx(2 / 3)


def test_equal_scores_have_no_order() -> None:
    """Of six images, half of them shown, the first four score alike: whatever their order, precisions are those of
    the blocks, 2/4, 3/5 and 3/6. The area without interpolation, 1/3 * 2/4 + ..., is scikit-learn's."""
    scores = np.array([1.0, 1, 1, 1, 0.5, 0])
    for shown in ([1, 1, 0, 0, 1, 0], [0, 0, 1, 1, 1, 0], [0, 1, 0, 1, 1, 0]):
        precision, recall = ranked(scores, np.array(shown, bool))
        assert precision == pytest.approx([2 / 4, 3 / 5, 3 / 6]) and recall == pytest.approx([2 / 3, 1, 1])
        steps = np.sum(precision * np.diff(recall, prepend=0.0))
        assert steps == pytest.approx(average_precision_score(shown, scores))
        assert area_average(precision, recall) == pytest.approx(3 / 5)
    assert area_average(*ranked(np.zeros(4), np.array([True, False, False, False]))) == 1 / 4  # knows nothing: chance


def test_ten_shown_meet_the_eleven_recalls_exactly() -> None:
    """Recalls 0.1, 0.2 .. are sums of tenths: rounding must not push one over a threshold. Every other is shown."""
    curve = ranked(-np.arange(20.0), np.arange(20) % 2 == 0)
    precisions = [(k + 1) / (2 * k + 1) for k in range(10)]  # at recall (k + 1) / 10
    assert eleven_point_average(*curve) == pytest.approx((precisions[0] + sum(precisions)) / 11)


def problem(n: int, seed: int, classes: int = 3, dim: int = 12) -> tuple[torch.Tensor, np.ndarray]:
    """Features of several scales, and marks of which some are 0; a class is shown in about a third of the images."""
    draws = np.random.default_rng(seed)
    weights = np.random.default_rng(99).normal(size=(dim, classes))
    features = draws.normal(size=(n, dim))
    marks = np.where(features @ weights + draws.normal(size=(n, classes)) > 1.5, 1, -1).astype(np.int8)
    marks[draws.random(marks.shape) < 0.05] = 0
    return torch.tensor(features * draws.uniform(0.5, 5, (n, 1)), dtype=torch.float32), marks


def test_the_machines_are_scikit_learns() -> None:
    train, marks = problem(240, 0)
    test, truth = problem(160, 1)
    found = svm(train, marks, test, truth, ("a", "b", "c"), QUICK, seed=5)
    unit, asked = (
        x.double().numpy() / np.linalg.norm(x.double().numpy(), axis=1, keepdims=True) for x in (train, test)
    )
    for number in range(3):
        judged = marks[:, number] != 0
        rows, mine = unit[judged], marks[judged, number]
        folds = PredefinedSplit(stratified_folds(mine, 3, generator(5, "svm-folds", number)))

        def area(machine: LinearSVC, x: np.ndarray, y: np.ndarray) -> float:
            return area_average(*ranked(machine.decision_function(x), y > 0))

        def machine(cost: float) -> LinearSVC:
            return LinearSVC(C=cost, class_weight={1: 2.0, -1: 1.0}, dual=False, tol=1e-8, max_iter=10000)

        means = [cross_val_score(machine(cost), rows, mine, cv=folds, scoring=area).mean() for cost in QUICK.costs]
        # at another tolerance two neighbours in the ranking may change places, so a near tie may be decided otherwise
        assert means[QUICK.costs.index(found.costs[number])] == pytest.approx(max(means), abs=1e-3)
        oracle = machine(found.costs[number]).fit(rows, mine).decision_function(asked)
        assert found.scores[:, number] == pytest.approx(oracle, abs=2e-3)  # liblinear's tolerances 1e-4 and 1e-8
        counted = truth[:, number] != 0
        curve = ranked(oracle[counted], truth[counted, number] > 0)
        assert found.eleven_points[number] == pytest.approx(100 * eleven_point_average(*curve), abs=0.5)
        assert found.area[number] == pytest.approx(100 * area_average(*curve), abs=0.5)
        assert found.area[number] > 70


def test_a_shown_image_weighs_as_much_as_two() -> None:
    """Without an intercept's share in the penalty to confuse it: the same machine from a set with them twice."""
    features, marks = problem(90, 3)
    rows = features.double().numpy()
    mine = np.where(marks[:, 0] > 0, 1, -1)
    twice = np.concatenate([np.arange(len(mine)), np.flatnonzero(mine > 0)])
    from unitsphere.evaluation.svm import fit

    weighted = fit(rows, mine, 0.5, QUICK).decision_function(rows)
    doubled = LinearSVC(C=0.5, dual=False, max_iter=5000).fit(rows[twice], mine[twice]).decision_function(rows)
    assert weighted == pytest.approx(doubled, abs=2e-2)  # two solutions of one problem to liblinear's tolerance 1e-4


def test_folds_are_stratified_seeded_and_as_many_as_there_can_be() -> None:
    marks = np.array([1] * 7 + [-1] * 30, np.int8)
    folds = stratified_folds(marks, 3, generator(0, "folds"))
    assert [np.sum(folds[marks == 1] == fold) for fold in range(3)] == [3, 2, 2]
    assert [np.sum(folds[marks == -1] == fold) for fold in range(3)] == [10, 10, 10]
    assert (folds == stratified_folds(marks, 3, generator(0, "folds"))).all()
    assert (folds != stratified_folds(marks, 3, generator(1, "folds"))).any()
    assert set(stratified_folds(np.array([1, 1, -1, -1, -1]), 3, generator(0, "folds"))) == {0, 1}


def test_the_cost_is_chosen_by_precision_on_held_out_images() -> None:
    """As many dimensions as images and noisy marks: a high cost learns the noise by heart."""
    draws = np.random.default_rng(0)
    marks = np.where(np.arange(120) % 3 == 0, 1, -1).astype(np.int8)
    features = draws.normal(size=(120, 100))
    features[:, 0] += 2.0 * marks
    assert best_cost(features, marks, SvmRecipe(costs=(2.0**-10, 1e4)), generator(0, "folds")) == 2.0**-10


def test_one_label_an_image_is_that_class_against_the_rest() -> None:
    assert class_marks(np.array([2, 0]), 3, "these").tolist() == [[-1, -1, 1], [1, -1, -1]]
    several = np.array([[1, 0, -1]], np.int8)
    assert class_marks(several, 3, "these") is several
    with pytest.raises(UsageError, match="these have none"):
        class_marks(None, 3, "these")


def test_a_class_that_cannot_be_learnt_or_judged_is_named() -> None:
    marks = np.array([[1, 1], [1, -1], [-1, -1], [-1, -1]], np.int8)
    with pytest.raises(UsageError, match=r"1 of the training images show 'cow' and 3 do not"):
        check_marks(marks, marks, ("cat", "cow"))
    with pytest.raises(UsageError, match="no test image shows 'cat'"):
        check_marks(marks[:, :1], -np.ones((4, 1), np.int8), ("cat",))
