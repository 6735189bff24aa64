"""What the user calls the data becomes the images of one split."""

import os

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from unitsphere.common.errors import UsageError
from unitsphere.data.shards import find_shards
from unitsphere.data.source import Images, open_images, open_splits
from unitsphere.images.decode import decode


def save(path, shade=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 3), (shade, shade, shade)).save(path)


@pytest.fixture
def labelled(tmp_path):
    for number, path in enumerate(["cat/1.png", "cat/deep/er/2.jpg", "dog/3.PNG", "dog/4.webp", "eel/5.bmp"]):
        save(tmp_path / path, number)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    save(tmp_path / "dog" / ".hidden.png")
    save(tmp_path / ".cache" / "6.png")
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_a_folder_is_labelled_by_its_sub_folders(labelled):
    images = open_images(labelled, holdout=0)
    assert images.names == ["cat/1.png", "cat/deep/er/2.jpg", "dog/3.PNG", "dog/4.webp", "eel/5.bmp"]
    assert images.classes == ("cat", "dog", "eel")
    assert images.labels.tolist() == [0, 0, 1, 1, 2] and images.labels.dtype == np.int64
    assert decode(images.read(2))[0, 0, 0] == 2


def test_a_folder_with_images_at_the_top_or_with_one_sub_folder_is_unlabelled(labelled, tmp_path):
    save(labelled / "7.png")
    assert open_images(labelled, holdout=0).labels is None
    save(tmp_path / "one" / "camera" / "a.png")
    save(tmp_path / "one" / "camera" / "b.png")
    images = open_images(tmp_path / "one", holdout=0)
    assert images.labels is None and images.classes is None and len(images) == 2


def test_links_are_followed_but_not_round_in_circles(labelled, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    save(elsewhere / "linked.png")
    os.symlink(elsewhere, labelled / "fox")
    os.symlink(elsewhere / "linked.png", labelled / "cat" / "0.png")
    os.symlink(labelled, labelled / "dog" / "again")
    images = open_images(labelled, holdout=0)
    assert "fox/linked.png" in images.names and "cat/0.png" in images.names
    assert len(images) == 7


def test_links_that_lead_to_each_other_end(tmp_path):
    for name in ("a", "b"):
        save(tmp_path / name / "own.png")
    os.symlink(tmp_path / "b", tmp_path / "a" / "to")
    os.symlink(tmp_path / "a", tmp_path / "b" / "to")
    os.symlink("round", tmp_path / "a" / "about")
    os.symlink("about", tmp_path / "a" / "round")
    images = open_images(tmp_path, holdout=0)
    assert images.names == ["a/own.png", "a/to/own.png", "b/own.png", "b/to/own.png"]
    assert len(open_images(tmp_path / "a", holdout=0)) == 2


def test_shards_are_found_once_where_a_link_leads_back(tmp_path):
    for number in range(2):
        (tmp_path / "deep" / f"{number}.tar").parent.mkdir(exist_ok=True)
        (tmp_path / "deep" / f"{number}.tar").touch()
    os.symlink(tmp_path, tmp_path / "deep" / "back")
    assert find_shards(tmp_path, ".tar") == [tmp_path / "deep" / "0.tar", tmp_path / "deep" / "1.tar"]


def test_reading_survives_a_change_of_folder(labelled, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(labelled.parent)
    images = open_images(labelled.name, holdout=0)
    monkeypatch.chdir(tmp_path_factory.mktemp("other"))
    assert decode(images.read(0)).shape == (3, 4, 3)


@pytest.mark.parametrize("val", ["val", "valid", "validation", "test"])
def test_train_and_val_folders_are_used_and_share_their_classes(tmp_path, val):
    for path in ["train/a/1.png", "train/b/2.png", "train/c/3.png", f"{val}/b/4.png", f"{val}/c/5.png"]:
        save(tmp_path / path)
    train, held = open_images(tmp_path, "train"), open_images(tmp_path, "val")
    assert train.names == ["a/1.png", "b/2.png", "c/3.png"] and train.labels.tolist() == [0, 1, 2]
    assert held.names == ["b/4.png", "c/5.png"] and held.labels.tolist() == [1, 2]
    assert train.classes == held.classes == ("a", "b", "c")


def test_val_with_a_single_class_of_train_is_labelled_and_unlabelled_train_stays_so(tmp_path):
    for path in ["x/train/a/1.png", "x/train/b/2.png", "x/val/b/3.png"]:
        save(tmp_path / path)
    assert open_images(tmp_path / "x", "val").labels.tolist() == [1]
    for path in ["y/train/1.png", "y/train/2.png", "y/val/a/3.png", "y/val/b/4.png"]:
        save(tmp_path / path)
    assert open_images(tmp_path / "y", "train").labels is None
    assert open_images(tmp_path / "y", "val").labels.tolist() == [0, 1]


def test_a_lone_train_folder_is_divided_but_a_class_called_train_is_a_class(tmp_path):
    for path in ["lone/train/a/1.png", "lone/train/b/2.png", "bus/train/1.png", "bus/tram/2.png"]:
        save(tmp_path / path)
    assert open_images(tmp_path / "lone", holdout=0).classes == ("a", "b")
    assert open_images(tmp_path / "bus", holdout=0).classes == ("train", "tram")


def test_the_held_out_share_is_disjoint_complete_and_fixed_by_seed_and_names():
    def images(names):
        return Images("x", names, None, None, read=lambda index: np.full((1, 1), names.index(names[index]), np.uint8))

    names = [f"{n:03d}" for n in range(101)]
    train, val = (open_images(images(names), split, holdout=0.2, seed=3) for split in ("train", "val"))
    assert len(val) == 20 and sorted([*train.names, *val.names]) == names
    shuffled = open_images(images(names[::-1]), "val", holdout=0.2, seed=3)
    assert sorted(shuffled.names) == sorted(val.names)
    assert open_images(images(names), "val", holdout=0.2, seed=4).names != val.names
    assert [int(train.read(n)[0, 0]) for n in (0, 50)] == [names.index(train.names[n]) for n in (0, 50)]
    assert len(open_images(images(names[:2]), "val", holdout=0.01)) == 1
    assert len(open_images(images(names[:5]), "val", holdout=0.99)) == 4
    assert len(open_images(images(names), "train", holdout=0)) == 101
    with pytest.raises(UsageError, match=r"no validation images.*holdout"):
        open_images(images(names), "val", holdout=0)


def test_classes_are_kept_by_name_and_relabelled(labelled):
    images = open_images(labelled, holdout=0, classes=["eel", "cat"])
    assert images.classes == ("eel", "cat")
    assert images.names == ["cat/1.png", "cat/deep/er/2.jpg", "eel/5.bmp"] and images.labels.tolist() == [1, 1, 0]
    with pytest.raises(UsageError, match=r"no class 'dgo'.*Did you mean dog"):
        open_images(labelled, holdout=0, classes=["dgo"])
    with pytest.raises(UsageError, match="no labels"):
        open_images(np.zeros((4, 2, 2), np.uint8), holdout=0, classes=["cat"])


def test_a_fraction_keeps_the_share_of_every_class_and_at_least_one():
    labels = np.repeat([0, 1, 2], [100, 40, 1])
    data = Images("x", [str(n) for n in range(141)], labels, ("a", "b", "c"), lambda index: b"")
    kept = open_images(data, holdout=0, fraction=0.1, seed=5)
    assert np.bincount(kept.labels).tolist() == [10, 4, 1]
    assert kept.names == open_images(data, holdout=0, fraction=0.1, seed=5).names
    assert kept.names != open_images(data, holdout=0, fraction=0.1, seed=6).names
    for bad in (0, -1, 1.5):
        with pytest.raises(UsageError, match="fraction"):
            open_images(data, holdout=0, fraction=bad)


def test_list_files(labelled):
    lists = labelled / "lists"
    lists.mkdir()
    (lists / "a.txt").write_text("# comment\n../cat/1.png\n\n../dog/3.PNG\n")
    plain = open_images(lists / "a.txt", holdout=0)
    assert plain.names == ["../cat/1.png", "../dog/3.PNG"] and plain.labels is None
    (lists / "b.tsv").write_text("../cat/1.png\t10\r\n../dog/3.PNG\t9\r\n")
    numbered = open_images(lists / "b.tsv", holdout=0)
    assert numbered.classes == ("9", "10") and numbered.labels.tolist() == [1, 0]
    save(lists / "one, two.png", 77)
    (lists / "c.csv").write_text("one, two.png,spotted\n../dog/3.PNG, plain\n")
    named = open_images(lists / "c.csv", holdout=0)
    assert named.classes == ("plain", "spotted") and named.labels.tolist() == [1, 0]
    assert decode(named.read(0))[0, 0, 0] == 77
    (lists / "d.lst").write_text("one, two.png\n../dog/3.PNG\n")
    assert open_images(lists / "d.lst", holdout=0).labels is None


def test_bad_list_files_name_the_line(labelled):
    path = labelled / "list.txt"
    path.write_text("cat/1.png\n# fine\ncat/none.png\n")
    with pytest.raises(UsageError, match=r"line 3: no file 'cat/none.png'"):
        open_images(path)
    path.write_text("cat/1.png,cat\ndog/3.PNG\n")
    with pytest.raises(UsageError, match="line 2: either every line has a label"):
        open_images(path)
    path.write_text("# nothing\n")
    with pytest.raises(UsageError, match="lists no images"):
        open_images(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        open_images(path)


def test_data_that_is_not_there_or_cannot_be_learned_from_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no data.*Did you mean shapes"):
        open_images("shape")
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    with pytest.raises(UsageError, match="No images"):
        open_images(tmp_path / "empty")
    save(tmp_path / "single" / "1.png")
    with pytest.raises(UsageError, match="single image"):
        open_images(tmp_path / "single")
    with pytest.raises(UsageError, match="single image"):
        open_images(tmp_path / "single" / "1.png")
    save(tmp_path / "single" / "2.png")
    with pytest.raises(UsageError, match=r"has 2 images, of which .* 0.1 leaves a single one to learn from \(.\.png\)"):
        open_images(tmp_path / "single")
    assert len(open_images(tmp_path / "single", holdout=0)) == 2
    (tmp_path / "weights.bin").write_bytes(bytes(5000))
    with pytest.raises(UsageError, match="neither a folder"):
        open_images(tmp_path / "weights.bin")
    with pytest.raises(UsageError, match="'tset'"):
        open_images("shapes", "tset")
    with pytest.raises(UsageError, match="holdout"):
        open_images("shapes", holdout=1.0)
    with pytest.raises(UsageError, match="int is no data"):
        open_images(3)


def test_arrays_and_tensors_are_images_by_their_first_axis():
    array = np.random.default_rng(0).integers(0, 256, (10, 5, 6, 3), np.uint8)
    images = open_images(array, holdout=0)
    assert len(images) == 10 and np.array_equal(decode(images.read(7)), array[7])
    tensor = torch.from_numpy(array).permute(0, 3, 1, 2)
    for given in (tensor, tensor.float() / 255):
        assert np.array_equal(decode(open_images(given, holdout=0).read(7)), array[7])
    assert np.array_equal(decode(open_images(array[..., 0], holdout=0).read(1), channels=1), array[1, :, :, :1])
    with pytest.raises(UsageError, match="shape"):
        open_images(array[0, 0])
    with pytest.raises(UsageError, match="no images"):
        open_images(array[:0])


class Pictures(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def test_torch_datasets_of_every_kind_of_item():
    array = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), np.uint8)
    tensor = torch.from_numpy(array).permute(0, 3, 1, 2)
    for items in (list(array), list(tensor), list(tensor.double() / 255), [Image.fromarray(a) for a in array]):
        images = open_images(Pictures(items), holdout=0)
        assert images.labels is None and np.array_equal(decode(images.read(4)), array[4])
        labelled = open_images(Pictures([(item, n % 3) for n, item in enumerate(items)]), holdout=0)
        assert labelled.labels.tolist() == [0, 1, 2, 0, 1, 2] and labelled.classes == ("0", "1", "2")
        assert np.array_equal(decode(labelled.read(4)), array[4])
    palette = Image.fromarray(array[0]).quantize(4)
    assert np.array_equal(
        decode(open_images(Pictures([palette] * 2), holdout=0).read(0)), np.asarray(palette.convert("RGB"))
    )
    pairs = TensorDataset(tensor, torch.arange(6) % 2)
    assert open_images(pairs, holdout=0).labels.tolist() == [0, 1, 0, 1, 0, 1]


def test_known_targets_spare_reading_the_images():
    class Known(Pictures):
        targets, classes, reads = [1, 0, 1, 1], ["a", "b"], 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    data = Known([(np.zeros((2, 2, 3), np.uint8), label) for label in Known.targets])
    images = open_images(Subset(data, [0, 1, 3]), holdout=0)
    assert images.labels.tolist() == [1, 0, 1] and images.classes == ("a", "b")
    assert data.reads == 1


def test_datasets_that_cannot_be_used_say_why():
    for item, reason in [({"image": 1}, "dict is no image"), (torch.full((3, 2, 2), 2.0), "normalised")]:
        with pytest.raises(UsageError, match=reason):
            open_images(Pictures([item, item]))
    with pytest.raises(UsageError, match="empty"):
        open_images(Pictures([]))

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([])

    with pytest.raises(UsageError, match="any order"):
        open_images(Stream())


def test_splits_are_those_the_data_has(labelled):
    assert list(open_splits(labelled)) == ["all"]
    assert list(open_splits("shapes")) == ["train", "val"]


def test_many_files_are_listed_quickly(tmp_path):
    import time

    for folder in range(20):
        (tmp_path / f"c{folder:02d}").mkdir()
        for number in range(500):
            (tmp_path / f"c{folder:02d}" / f"{number}.jpg").touch()
    start = time.perf_counter()
    images = open_images(tmp_path, holdout=0)
    assert len(images) == 10_000 and len(images.classes) == 20
    assert time.perf_counter() - start < 2  # about 0.05 s here: 100,000 files must be seconds, not minutes


def test_an_image_more_moves_hardly_another_from_part_to_part():
    def held_out(names):
        images = Images("x", names, None, None, lambda index: b"")
        return set(open_images(images, "val", holdout=0.1).names)

    names = [f"{number}.png" for number in range(1000)]
    before, after = held_out(names), held_out([*names[:500], "new.png", *names[500:]])
    assert len(before) == 100 and len(before ^ after) <= 2
    assert held_out(names[::-1]) == before


def test_a_fraction_depends_on_names_not_on_their_order():
    def kept(names, fraction):
        return set(open_images(Images("x", names, None, None, lambda index: b""), holdout=0, fraction=fraction).names)

    names = [f"{number}.png" for number in range(1000)]
    assert kept(names[::-1], 0.1) == kept(names, 0.1) < kept(names, 0.2)
    assert len(kept([*names, "new.png"], 0.1) ^ kept(names, 0.1)) <= 2
