"""VOC 2007: several labels an image, and a clear no where one is needed."""

import numpy as np
import pytest
from PIL import Image

from antipode.data.decode import decode
from antipode.data.pack import pack
from antipode.data.source import open_images
from antipode.data.voc import CLASSES
from antipode.errors import UsageError

MARKS = {  # image -> class -> mark
    "trainval": {"000005": {"chair": 1, "person": 0}, "000007": {"car": 1}, "000009": {"horse": 1, "person": 1}},
    "test": {"000001": {"dog": 1, "person": 1}, "000002": {"train": 1}},
}


@pytest.fixture
def devkit(tmp_path):
    folder = tmp_path / "VOCdevkit" / "VOC2007"
    (folder / "ImageSets" / "Main").mkdir(parents=True)
    (folder / "JPEGImages").mkdir()
    for split, images in MARKS.items():
        for name in images:
            Image.new("RGB", (9, 7), (int(name), 0, 0)).save(folder / "JPEGImages" / f"{name}.jpg", quality=100)
        for kind in CLASSES:
            lines = (f"{name} {marks.get(kind, -1):2d}\n" for name, marks in images.items())
            (folder / "ImageSets" / "Main" / f"{kind}_{split}.txt").write_text("".join(lines))
    return tmp_path


@pytest.mark.parametrize("below", ["", "VOCdevkit", "VOCdevkit/VOC2007"])
def test_images_and_marks_of_both_splits(devkit, below):
    for split, part in (("train", "trainval"), ("val", "test")):
        images = open_images(f"voc2007={devkit / below}", split)
        assert images.names == [f"{name}.jpg" for name in MARKS[part]] and images.classes == CLASSES
        assert images.labels.shape == (len(MARKS[part]), 20) and images.labels.dtype == np.int8
        for row, marks in zip(images.labels, MARKS[part].values(), strict=True):
            assert {CLASSES[n]: int(mark) for n, mark in enumerate(row) if mark >= 0} == marks
        assert decode(images.read(1)).shape == (7, 9, 3)
    assert decode(images.read(1))[0, 0, 0] == 2


def test_classes_of_ones_own(devkit):
    folder = devkit / "VOCdevkit" / "VOC2007"
    lists = folder / "ImageSets" / "Main"
    for file in lists.iterdir():
        if not file.name.startswith(("horse", "car", "person")):
            file.unlink()
    images = open_images(f"voc={folder}")
    assert images.classes == ("car", "horse", "person")
    assert images.labels.tolist() == [[-1, -1, 0], [1, -1, -1], [-1, 1, 1]]  # 000005, 000007, 000009
    assert len(open_images(f"voc={folder}", "val")) == 2
    with pytest.raises(UsageError, match=r"there is no .*aeroplane_trainval.txt"):
        open_images(f"voc2007={devkit}")
    (lists / "car_test.txt").unlink()
    with pytest.raises(UsageError, match=r"there is no .*car_test.txt. The layout is PATH/JPEGImages"):
        open_images(f"voc={folder}", "val")
    for file in lists.iterdir():
        file.unlink()
    with pytest.raises(UsageError, match=r"has no list CLASS_trainval.txt"):
        open_images(f"voc={folder}")
    with pytest.raises(UsageError, match=r"there is no .*Main. The layout"):
        open_images(f"voc={devkit}")


def test_a_part_of_the_images_keeps_their_marks(devkit):
    whole = open_images(f"voc2007={devkit}")
    part = open_images(f"voc2007={devkit}", fraction=0.6)
    assert len(part) == 2 and part.labels.shape == (2, 20)
    for name, row in zip(part.names, part.labels, strict=True):
        assert row.tolist() == whole.labels[whole.names.index(name)].tolist()


def test_what_needs_one_label_an_image_says_so(devkit, tmp_path):
    images = open_images(f"voc2007={devkit}")
    assert images.multi_label and not open_images("shapes=20x8").multi_label
    with pytest.raises(UsageError, match=r"A pack takes one label an image; .* several of its 20 classes"):
        pack({"train": images}, tmp_path / "p")
    with pytest.raises(UsageError, match="A choice of classes takes one label an image"):
        open_images(f"voc2007={devkit}", classes=["dog"])


def test_incomplete_folders_are_refused(devkit, tmp_path):
    folder = devkit / "VOCdevkit" / "VOC2007"
    (folder / "JPEGImages" / "000007.jpg").unlink()
    with pytest.raises(UsageError, match=r"images that are not there: 1 of 3 looked for, such as .*000007.jpg"):
        open_images(f"voc2007={devkit}")
    lists = folder / "ImageSets" / "Main"
    (lists / "dog_test.txt").write_text("000001 1\n")
    with pytest.raises(UsageError, match=r"dog_test.txt lists other images"):
        open_images(f"voc2007={devkit}", "val")
    (lists / "dog_test.txt").write_text("000001 1\n000002\n")
    with pytest.raises(UsageError, match=r"dog_test.txt, line 2: a name and a number"):
        open_images(f"voc2007={devkit}", "val")
    (lists / "dog_test.txt").write_text("000001 3\n000002 -1\n")
    with pytest.raises(UsageError, match="other marks than -1, 0 and 1"):
        open_images(f"voc2007={devkit}", "val")
    (lists / "dog_test.txt").unlink()
    with pytest.raises(UsageError, match=r"there is no .*dog_test.txt.*The layout"):
        open_images(f"voc2007={devkit}", "val")
    with pytest.raises(UsageError, match=r"there is no .*JPEGImages.*The layout"):
        open_images(f"voc2007={tmp_path / 'none'}")
