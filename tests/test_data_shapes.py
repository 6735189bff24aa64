"""The drawn data set: fixed by seed and index, balanced, told apart by form and not by pixels."""

import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier

from unitsphere.common.errors import UsageError
from unitsphere.data.forms import FORMS, turned
from unitsphere.data.shapes import CLASSES, shapes
from unitsphere.data.source import open_images


def test_a_picture_depends_on_seed_split_and_index_alone():
    few, many = shapes(20), shapes(500)
    assert np.array_equal(many.read(17), few.read(17))
    reversed_order = [many.read(n) for n in range(19, -1, -1)][::-1]
    assert all(np.array_equal(few.read(n), reversed_order[n]) for n in range(20))
    others = [shapes(20, seed=1).read(17), shapes(20, split="val").read(17), few.read(17 - len(CLASSES))]
    assert all((few.read(17) != other).mean() > 0.5 for other in others)
    assert few.read(3).shape == (32, 32, 3) and few.read(3).dtype == np.uint8


def test_classes_are_balanced_and_many():
    images = shapes(240)
    assert len(images.classes) >= 10 and np.bincount(images.labels).tolist() == [240 // len(CLASSES)] * len(CLASSES)


@pytest.mark.parametrize("index", range(12))
def test_a_larger_picture_shows_the_same(index):
    small, large = shapes(12, 32).read(index), shapes(12, 96).read(index)
    shrunk = large.reshape(32, 3, 32, 3, 3).mean((1, 3))
    # Only the edges, one pixel wide, are blurred differently.
    assert np.abs(shrunk - small).mean() < 3 and shapes(12, 57).read(index).shape == (57, 57, 3)


def test_the_size_is_part_of_the_name():
    assert len(open_images("shapes")) == 5000 and len(open_images("shapes", "val")) == 1000
    assert len(open_images("shapes=60", "val")) == 500
    images = open_images("shapes=60x48")
    assert len(images) == 60 and images.read(0).shape == (48, 48, 3)
    for bad in ("shapes=many", "shapes=100x", "shapes=1", "shapes=100x4"):
        with pytest.raises(UsageError, match=r"shapes="):
            open_images(bad)


def test_raw_pixels_do_not_tell_the_classes():
    """2,400 and 600 images; with 5,000 and 1,000 it is 27 %."""
    train, val = shapes(2400), shapes(600, split="val")
    x, z = (np.stack([images.read(n).ravel() for n in range(len(images))]) / 255.0 for images in (train, val))
    accuracy = KNeighborsClassifier(20, metric="cosine").fit(x, train.labels).score(z, val.labels)
    assert 1 / len(CLASSES) < accuracy < 0.4


def test_colour_does_not_tell_the_classes():
    images = shapes(1200)
    means = np.stack([images.read(n).mean((0, 1)) for n in range(1200)])
    found = KNeighborsClassifier(20).fit(means[:900], images.labels[:900]).score(means[900:], images.labels[900:])
    assert found < 0.25  # 8 % by chance; the area of a form shows a little in the mean


def test_every_form_differs_from_every_other_turned_mirrored_or_scaled():
    steps = np.linspace(-1.2, 1.2, 61, dtype=np.float32)
    x, y = np.meshgrid(steps, steps)

    def filled(form, angle, mirror, scale):
        return form(*(c / scale for c in turned(mirror * x, y, angle))) < 0

    plain = {name: filled(form, 0, 1, 1) for name, form in FORMS.items()}
    for name, form in FORMS.items():
        copies = [
            filled(form, angle, mirror, scale)
            for angle in np.linspace(0, 2 * np.pi, 24, endpoint=False)
            for mirror in (1, -1)
            for scale in (0.8, 0.9, 1.0, 1.1, 1.25)
        ]
        for other, mask in plain.items():
            best = max((mask & copy).sum() / (mask | copy).sum() for copy in copies)
            # Intersection over union: 1 for the same form, up to the raster.
            assert best > 0.99 if other == name else best < 0.87, (name, other, best)
