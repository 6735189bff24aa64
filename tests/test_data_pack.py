"""A pack holds what went in, opens at once, and is never half written."""

import io
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.data.commands import preview
from unitsphere.data.images import Images
from unitsphere.data.pack import pack
from unitsphere.data.packfile import is_pack, open_pack
from unitsphere.data.source import open_images, open_splits
from unitsphere.images.decode import decode

RNG = np.random.default_rng(0)


@pytest.fixture
def folder(tmp_path):
    """Two splits, two classes, several formats, one turned photo."""
    root = tmp_path / "photos"
    for split, count in (("train", 9), ("val", 4)):
        for number in range(count):
            path = root / split / "ab"[number % 2] / f"ü{number}.{('jpg', 'png', 'webp')[number % 3]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            exif = Image.Exif()
            exif[0x0112] = 6
            picture = Image.fromarray(RNG.integers(0, 256, (20 + number, 30, 3), np.uint8))
            picture.save(path, **({"exif": exif} if number == 0 else {}))
    return root


def splits_of(data):
    return {split: open() for split, open in open_splits(data).items()}


def test_a_pack_gives_back_the_same_bytes_names_and_labels(folder, tmp_path):
    path = tmp_path / "photos.pack"
    done = []
    summary = pack(splits_of(folder), path, progress=lambda n, total: done.append((n, total)))
    assert summary.images == {"train": 9, "val": 4} and summary.broken == {}
    assert summary.size == path.stat().st_size and done[-1] == (13, 13)
    for split in ("train", "val"):
        there, here = open_images(folder, split), open_images(path, split)
        assert list(here.names) == list(there.names) and here.classes == there.classes == ("a", "b")
        assert here.labels.tolist() == there.labels.tolist()
        assert [here.read(n) for n in range(len(here))] == [there.read(n) for n in range(len(there))]
    assert here.names[-1] == there.names[-1] and here.names[1:3] == there.names[1:3]


def test_a_pack_is_a_safetensors_file(folder, tmp_path):
    path = tmp_path / "photos.pack"
    pack(splits_of(folder), path)
    images = open_pack(path)["train"]
    with safe_open(path, "numpy") as file:
        assert file.metadata()["format"] == "unitsphere-pack-2"
        offsets, encoded = file.get_tensor("offsets"), file.get_tensor("encoded")
        assert file.get_tensor("labels").tolist() == [*images.labels, *open_pack(path)["val"].labels]
        assert encoded[offsets[4] : offsets[5]].tobytes() == images.read(4)


def test_undivided_data_stays_undivided_and_unlabelled_stays_unlabelled(tmp_path):
    array = RNG.integers(0, 256, (20, 6, 5, 3), np.uint8)
    pack(splits_of(array), tmp_path / "p")
    assert list(open_pack(tmp_path / "p")) == ["all"]
    train, val = (open_images(tmp_path / "p", split, holdout=0.25) for split in ("train", "val"))
    assert (len(train), len(val)) == (15, 5) and train.labels is None and train.classes is None


@pytest.mark.parametrize(
    ("shape", "dtype", "depth"),
    [((6, 5), np.uint8, 8), ((6, 5, 4), np.uint8, 8), ((6, 5), np.uint16, 16), ((6, 5, 3), np.uint16, 16)],
)
def test_arrays_come_back_exactly(tmp_path, shape, dtype, depth):
    array = RNG.integers(0, np.iinfo(dtype).max + 1, (3, *shape), dtype)
    pack(splits_of(array), tmp_path / "p")
    images = open_pack(tmp_path / "p")["all"]
    channels = shape[2] if len(shape) == 3 else 1
    back = np.stack([decode(images.read(n), channels=channels, depth=depth) for n in range(3)])
    assert back.dtype == dtype and np.array_equal(back.reshape(array.shape), array)


def test_arrays_of_many_channels_come_back_exactly(tmp_path):
    array = RNG.integers(0, 256, (3, 6, 5, 7), np.uint8)
    pack(splits_of(array), tmp_path / "p", size=50)
    assert np.array_equal(decode(open_pack(tmp_path / "p")["all"].read(2), channels=7), array[2])
    pack(splits_of(array), tmp_path / "p", size=3)
    assert decode(open_pack(tmp_path / "p")["all"].read(2), channels=7).shape == (4, 3, 7)


def test_size_shrinks_what_is_larger_and_turns_it_upright(folder, tmp_path):
    path = tmp_path / "small.pack"
    pack(splits_of(folder), path, size=22)
    there, here = open_images(folder), open_images(path)
    for n in range(len(there)):
        large, small = decode(there.read(n)), decode(here.read(n))
        if min(large.shape[:2]) <= 22:
            assert here.read(n) == there.read(n)
            continue
        assert min(small.shape[:2]) == 22
        assert small.shape[0] / small.shape[1] == pytest.approx(large.shape[0] / large.shape[1], abs=0.05)
        kind = Image.open(io.BytesIO(here.read(n))).format
        assert kind == ("JPEG" if there.names[n].endswith("jpg") else "PNG")


def test_shrunk_pictures_show_the_same(tmp_path):
    y, x = np.mgrid[0:300, 0:400] / 400
    for name, picture in {
        "a.png": np.uint8(255 * np.stack([x, y, x * y], 2)),
        "b.jpg": np.uint8(255 * np.stack([x, y, x * y], 2)),
        "c.png": np.uint16(65535 * x),
    }.items():
        Image.fromarray(picture).save(tmp_path / name, quality=95)
    pack({"all": open_images(tmp_path, holdout=0)}, tmp_path / "p", size=60, quality=95)
    images = open_pack(tmp_path / "p")["all"]
    y, x = (np.mgrid[0:60, 0:80] + 0.5) / 80
    for n in range(2):
        # Away from the border, where nothing is there to average with: rounding, and JPEG's error.
        shown = decode(images.read(n))[2:-2, 2:-2].astype(int)
        assert np.abs(shown - 255 * np.stack([x, y, x * y], 2)[2:-2, 2:-2]).max() < 6
    deep = decode(images.read(2), channels=1, depth=16)[2:-2, 2:-2, 0].astype(int)
    assert np.abs(deep - 65535 * x[2:-2, 2:-2]).max() < 200


def test_broken_images_are_left_out_and_named_up_to_the_share(folder, tmp_path):
    (folder / "train" / "a" / "bad.jpg").write_bytes(b"\xff\xd8\xff garbage")
    summary = pack(splits_of(folder), tmp_path / "p", max_broken=0.1)
    assert list(summary.broken) == ["a/bad.jpg"] and summary.images["train"] == 9
    assert "a/bad.jpg" not in list(open_pack(tmp_path / "p")["train"].names)
    with pytest.raises(UnitsphereError, match=r"a/bad.jpg.*"):
        pack(splits_of(folder), tmp_path / "q", max_broken=0.0)
    assert not (tmp_path / "q").exists()


def test_an_interrupted_pack_leaves_nothing_and_keeps_the_old_one(tmp_path):
    path = tmp_path / "out" / "p.pack"
    path.parent.mkdir()
    pack(splits_of(np.zeros((3, 4, 4), np.uint8)), path)
    before = path.read_bytes()

    def read(index):
        if index == 400:
            raise KeyboardInterrupt
        return np.zeros((4, 4), np.uint8)

    with pytest.raises(KeyboardInterrupt):
        pack({"all": Images("x", [str(n) for n in range(500)], None, None, read)}, path)
    assert os.listdir(path.parent) == ["p.pack"] and path.read_bytes() == before


def test_what_is_no_whole_pack_is_refused(tmp_path):
    path = tmp_path / "p.pack"
    pack(splits_of(np.zeros((3, 4, 4), np.uint8)), path)
    assert is_pack(path)
    path.write_bytes(path.read_bytes()[:-1])
    assert not is_pack(path)
    with pytest.raises(UsageError, match="no pack, or an incomplete one"):
        open_pack(path)
    with pytest.raises(UsageError, match="no folder"):
        pack(splits_of(np.zeros((3, 4, 4), np.uint8)), tmp_path / "none" / "p.pack")


def test_splits_with_different_classes_are_refused(tmp_path):
    def images(classes):
        return Images("x", ["0"], np.zeros(1, np.int64), classes, lambda index: np.zeros((4, 4), np.uint8))

    with pytest.raises(UsageError, match="different classes"):
        pack({"train": images(("a",)), "val": images(("b",))}, tmp_path / "p")


def test_many_threads_read_one_pack(tmp_path):
    array = RNG.integers(0, 256, (200, 8, 8, 3), np.uint8)
    pack(splits_of(array), tmp_path / "p")
    images = open_pack(tmp_path / "p")["all"]
    with ThreadPoolExecutor(8) as pool:
        back = list(pool.map(lambda n: decode(images.read(n % 200)), range(1000)))
    assert all(np.array_equal(image, array[n % 200]) for n, image in enumerate(back))


def test_names_that_are_no_text_and_images_without_labels_survive(tmp_path):
    """A file name is bytes; a set may be labelled in part."""
    names = ["caf\udce9.png", "b.png", "c.png"]
    labels = np.array([-1, 0, 1])
    array = np.zeros((4, 4, 3), np.uint8)
    pack({"all": Images("x", names, labels, ("a", "b"), lambda index: array)}, tmp_path / "p")
    (back,) = open_pack(tmp_path / "p").values()
    assert list(back.names) == names and back.labels.tolist() == [-1, 0, 1]


def test_a_file_that_is_no_pack_is_not_overwritten(folder, tmp_path):
    (tmp_path / "thesis.txt").write_text("three years of work")
    with pytest.raises(UsageError, match="something else"):
        pack(splits_of(folder), tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "three years of work"


def test_a_preview_makes_its_folder(folder, tmp_path):
    preview(folder, tmp_path / "none" / "yet" / "sheet.png", images=2, count=1)
    with Image.open(tmp_path / "none" / "yet" / "sheet.png") as sheet:
        assert min(sheet.size) > 20
