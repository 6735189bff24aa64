"""Data sets by name, from files in their real layout."""

import hashlib
import pickle
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets

from unitsphere.cli import main
from unitsphere.common.errors import UsageError
from unitsphere.data.imagenet100 import CLASSES
from unitsphere.data.named import NAMED
from unitsphere.data.source import open_images
from unitsphere.images.decode import decode

RNG = np.random.default_rng(0)


def checksum(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def write_cifar(root, kind, monkeypatch, key, names):
    """Small batches in the layout of the real archive. torchvision compares checksums, so those of these
    files are put in the place of the real ones."""
    folder = root / kind.base_folder
    folder.mkdir(parents=True)
    images = {}
    for attribute in ("train_list", "test_list"):
        table = []
        for name, _ in getattr(kind, attribute):
            data = RNG.integers(0, 256, (6, 3, 32, 32), np.uint8)
            images.setdefault(attribute, []).append(data)
            entry = {"data": data.reshape(6, -1), key: [n % len(names) for n in range(6)]}
            (folder / name).write_bytes(pickle.dumps(entry))
            table.append([name, checksum(folder / name)])
        monkeypatch.setattr(kind, attribute, table)
    meta = folder / kind.meta["filename"]
    meta.write_bytes(pickle.dumps({kind.meta["key"]: names}))
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": checksum(meta)})
    return {attribute: np.concatenate(parts) for attribute, parts in images.items()}


@pytest.mark.parametrize(
    ("name", "kind", "key"), [("cifar10", datasets.CIFAR10, "labels"), ("cifar100", datasets.CIFAR100, "fine_labels")]
)
def test_cifar_in_its_real_layout(tmp_path, monkeypatch, name, kind, key):
    written = write_cifar(tmp_path, kind, monkeypatch, key, ["ant", "bee", "cow"])
    for path in (tmp_path, tmp_path / kind.base_folder):
        for split, attribute in (("train", "train_list"), ("val", "test_list")):
            images = open_images(f"{name}={path}", split)
            assert len(images) == len(written[attribute]) and images.classes == ("ant", "bee", "cow")
            assert images.names[3] == f"{split}/3" and images.labels[:4].tolist() == [0, 1, 2, 0]
            assert np.array_equal(decode(images.read(5)), written[attribute][5].transpose(1, 2, 0))


def test_a_damaged_cifar_folder_is_refused(tmp_path, monkeypatch):
    write_cifar(tmp_path, datasets.CIFAR10, monkeypatch, "labels", ["ant", "bee"])
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(b"cut off")
    with pytest.raises(UsageError, match=r"corrupted.*cifar-10-python.tar.gz"):
        open_images(f"cifar10={tmp_path}")
    with pytest.raises(UsageError, match=r"there is no .*cifar-10-batches-py"):
        open_images(f"cifar10={tmp_path / 'nowhere'}")


def test_a_download_that_fails_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("UNITSPHERE_DATA", str(tmp_path))
    monkeypatch.setattr(datasets.CIFAR10, "url", (tmp_path / "none.tar.gz").as_uri())
    with pytest.raises(UsageError, match=r"could not be fetched.*--data cifar10=FOLDER"):
        open_images("cifar10")


def test_stl10_labelled_and_unlabelled(tmp_path, monkeypatch):
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    pictures = {part: RNG.integers(0, 256, (4, 3, 96, 96), np.uint8) for part in ("train", "unlabeled", "test")}
    for part, data in pictures.items():
        data.transpose(0, 1, 3, 2).tofile(folder / f"{part}_X.bin")  # stored column by column
        if part != "unlabeled":
            np.array([1, 2, 3, 1], np.uint8).tofile(folder / f"{part}_y.bin")
    (folder / "class_names.txt").write_text("airplane\nbird\ncar\n")
    for attribute in ("train_list", "test_list"):
        table = [[name, checksum(folder / name)] for name, _ in getattr(datasets.STL10, attribute)]
        monkeypatch.setattr(datasets.STL10, attribute, table)
    for split, part in (("train", "train"), ("val", "test")):
        images = open_images(f"stl10={tmp_path}", split)
        assert images.labels.tolist() == [0, 1, 2, 0] and images.classes == ("airplane", "bird", "car")
        assert np.array_equal(decode(images.read(2)), pictures[part][2].transpose(1, 2, 0))
    plain = open_images(f"stl10-unlabelled={tmp_path}", holdout=0)
    assert plain.labels is None and np.array_equal(decode(plain.read(1)), pictures["unlabeled"][1].transpose(1, 2, 0))


def write_imagenet(root, classes):
    for split in ("train", "val"):
        for number, wnid in enumerate(classes):
            folder = root / split / wnid
            folder.mkdir(parents=True)
            for n in range(2 if split == "train" else 1):
                Image.new("RGB", (8, 6), (number, n, 0)).save(folder / f"{wnid}_{n}.JPEG")


def test_imagenet_and_its_hundred_classes(tmp_path):
    others = ["n01440764", "n15075141"]
    write_imagenet(tmp_path, [*CLASSES, *others])
    whole = open_images(f"imagenet={tmp_path}")
    assert len(whole) == 204 and whole.classes == tuple(sorted([*CLASSES, *others]))
    hundred, val = (open_images(f"imagenet100={tmp_path}", split) for split in ("train", "val"))
    assert len(hundred) == 200 and len(val) == 100
    assert hundred.classes == val.classes == CLASSES and not set(others) & {n.split("/")[0] for n in hundred.names}
    assert all(val.names[n].startswith(CLASSES[val.labels[n]]) for n in range(100))
    (tmp_path / "val" / CLASSES[7] / f"{CLASSES[7]}_0.JPEG").unlink()
    with pytest.raises(UsageError, match=f"no images in the class folder .*{CLASSES[7]}"):
        open_images(f"imagenet100={tmp_path}", "val")
    (tmp_path / "val" / CLASSES[7]).rmdir()
    with pytest.raises(UsageError, match=f"1 of 100 class folders are not in .*: {CLASSES[7]}"):
        open_images(f"imagenet100={tmp_path}", "val")


def test_imagenet_without_its_folders_is_refused(tmp_path):
    with pytest.raises(UsageError, match="imagenet needs its folder: imagenet=PATH"):
        open_images("imagenet")
    (tmp_path / "train").mkdir()
    with pytest.raises(UsageError, match=r"there is no folder .*val"):
        open_images(f"imagenet={tmp_path}")
    (tmp_path / "val").mkdir()
    with pytest.raises(UsageError, match="no class folders"):
        open_images(f"imagenet={tmp_path}")


def test_the_hundred_classes_are_a_hundred():
    assert len(set(CLASSES)) == 100 and list(CLASSES) == sorted(CLASSES)


def test_the_names_can_be_listed_without_torch():
    code = "import sys; from unitsphere.data.named import NAMED; print(*NAMED); assert 'torch' not in sys.modules"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == list(NAMED)
    assert {"shapes", "cifar10", "cifar100", "stl10", "imagenet", "imagenet100"} <= set(NAMED)


def test_a_damaged_stl10_folder_is_refused(tmp_path):
    folder = tmp_path / "stl10_binary"
    with pytest.raises(UsageError, match=r"there is no .*stl10_binary"):
        open_images(f"stl10={tmp_path}")
    folder.mkdir()
    with pytest.raises(UsageError, match=r"train_X.bin.*Unpack"):
        open_images(f"stl10={tmp_path}")
    np.zeros((4, 3, 96, 96), np.uint8).tofile(folder / "train_X.bin")
    np.ones(3, np.uint8).tofile(folder / "train_y.bin")
    (folder / "class_names.txt").write_text("airplane\nbird\n")
    with pytest.raises(UsageError, match="4 images of train and 3 labels"):
        open_images(f"stl10={tmp_path}")
    (folder / "unlabeled_X.bin").write_bytes(bytes(3 * 96 * 96 + 5))
    with pytest.raises(UsageError, match="Unpack"):
        open_images(f"stl10-unlabelled={tmp_path}")


def test_the_command_tells_every_name_and_its_layout(capsys):
    assert main(["data"]) == 0
    listed = " ".join(capsys.readouterr().out.split())
    for name, named in NAMED.items():
        assert f" {name} {named.description} {named.layout}".rstrip() in listed
