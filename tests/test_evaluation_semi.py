"""Which training images a semi-supervised protocol may use: by share or by list."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from unitsphere.common.errors import UsageError
from unitsphere.data.images import Images
from unitsphere.evaluation.semi import listed_part, stratified_fraction

SIZES = {"cat": 200, "cow": 100, "dog": 51}


def pictures(sizes: dict[str, int] = SIZES) -> Images:
    names = [f"{kind}/{kind}_{n:03d}.png" for kind, size in sizes.items() for n in range(size)]
    labels = np.repeat(np.arange(len(sizes)), list(sizes.values()))
    return Images("zoo", names, labels, tuple(sizes), lambda n: np.full((2, 2), n, np.uint16))


NONE = pictures({})


def test_a_fraction_is_stratified_reproducible_and_apart_from_the_rest() -> None:
    images = pictures()
    part = stratified_fraction(images, 0.1, seed=3)
    assert Counter(part.labels.tolist()) == {0: 20, 1: 10, 2: 5}
    assert len(set(part.names)) == 35
    rest = set(images.names) - set(part.names)
    assert len(rest) == len(images) - 35
    for name, label, n in zip(part.names, part.labels, range(35), strict=True):
        place = images.names.index(name)
        assert images.labels[place] == label and part.read(n)[0, 0] == place
    assert stratified_fraction(images, 0.1, seed=3).names == part.names
    assert set(stratified_fraction(images, 0.1, seed=4).names) != set(part.names)


def test_a_fraction_does_not_depend_on_the_order_and_holds_the_smaller_ones() -> None:
    images = pictures()
    turned = images.subset(np.arange(len(images))[::-1])
    assert set(stratified_fraction(turned, 0.1, 0).names) == set(stratified_fraction(images, 0.1, 0).names)
    assert set(stratified_fraction(images, 0.02, 0).names) < set(stratified_fraction(images, 0.1, 0).names)


def test_a_fraction_that_leaves_a_class_without_image_is_refused() -> None:
    with pytest.raises(UsageError, match=r"fraction: 0.01 of 40 images leaves class 'yak' without any. .* least 0.025"):
        stratified_fraction(pictures(SIZES | {"yak": 40}), 0.01, seed=0)
    assert len(stratified_fraction(pictures(SIZES | {"yak": 40}), 0.025, seed=0)) == 5 + 2 + 1 + 1
    for strange in (0.0, -0.1, 1.5):
        with pytest.raises(UsageError, match="fraction"):
            stratified_fraction(pictures(), strange, seed=0)


def test_a_list_names_images_by_their_names_or_the_ends_of_them(tmp_path: Path) -> None:
    file = tmp_path / "few.txt"
    file.write_text("# a few\ncow/cow_007.png\n\ncat_199.png\tcat\ndog_000.png\n")
    part = listed_part(pictures(), NONE, file)
    assert part.names == ["cat/cat_199.png", "cow/cow_007.png", "dog/dog_000.png"]
    assert part.labels.tolist() == [0, 1, 2]


def test_a_list_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "few.txt"
    with pytest.raises(UsageError, match=r"no file .*few\.txt"):
        listed_part(pictures(), NONE, file)
    file.write_text("cat_000.png\nyak_000.png\ncow_000.png\ndog_000.png\n")
    with pytest.raises(UsageError, match=r"1 of the 4 images .* such as 'yak_000.png'.* like 'cat/cat_000.png'"):
        listed_part(pictures(), NONE, file)
    file.write_text("cat_000.png\ncow_000.png\n")
    with pytest.raises(UsageError, match=r"1 of 3 classes have no image in the list, 'dog' among them"):
        listed_part(pictures(), NONE, file)
    file.write_text("\n")
    with pytest.raises(UsageError, match="names no image"):
        listed_part(pictures(), NONE, file)


def test_a_list_that_names_test_images_is_refused_as_such(tmp_path: Path) -> None:
    file = tmp_path / "few.txt"
    file.write_text("cat_000.png\nyak_000.png\ncow_000.png\nyak/yak_001.png\ndog_000.png\ngnu_000.png\n")
    said = r"2 of the 6 images .* are test images of zoo, such as 'yak/yak_001.png': held out \(--holdout\)"
    with pytest.raises(UsageError, match=said):
        listed_part(pictures(), pictures({"yak": 5}), file)


def test_a_name_that_may_be_two_images_is_refused(tmp_path: Path) -> None:
    names = ["cat/0.png", "dog/0.png"]
    images = Images("zoo", names, np.array([0, 1]), ("cat", "dog"), lambda n: np.zeros((2, 2), np.uint8))
    file = tmp_path / "few.txt"
    file.write_text("0.png\n")
    with pytest.raises(UsageError, match=r"'0.png', which may be 'cat/0.png' or 'dog/0.png'"):
        listed_part(images, NONE, file)
    file.write_text("cat/0.png\ndog/0.png\n")
    assert listed_part(images, NONE, file).names == names


def test_images_without_labels_or_with_several_are_refused() -> None:
    images = pictures()
    unlabelled = Images("zoo", images.names, None, None, images.read)
    several = Images("zoo", images.names, np.ones((len(images), 3), np.int8), images.classes, images.read)
    with pytest.raises(UsageError, match="have none"):
        stratified_fraction(unlabelled, 0.1, 0)
    with pytest.raises(UsageError, match=r"one an image\. For several there is svm"):
        stratified_fraction(several, 0.1, 0)
