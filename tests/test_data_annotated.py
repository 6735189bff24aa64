"""Data sets whose lists and annotations say the classes: iNaturalist, Places, ImageNet's flat validation folder."""

import json

import numpy as np
import pytest
import scipy.io
from PIL import Image

from unitsphere.common.errors import UsageError
from unitsphere.data.imagenet100 import CLASSES
from unitsphere.data.source import open_images
from unitsphere.images.decode import decode


def save(path, shade=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (5, 4), (shade, shade, shade)).save(path, quality=100)


@pytest.fixture
def inaturalist(tmp_path):
    categories = [{"id": number, "name": f"{number}", "supercategory": "Aves"} for number in (7, 2, 5)]
    split = {"train": [("a1", 7), ("a2", 2), ("a3", 7)], "val": [("b1", 5), ("b2", 2)]}
    for name, rows in split.items():
        images, annotations = [], []
        for number, (stem, category) in enumerate(rows):
            path = f"train_val2018/Aves/{category}/{stem}.jpg"
            save(tmp_path / path, 10 * number)
            images.append({"id": 100 + number, "file_name": path, "width": 5, "height": 4, "license": 3})
            annotations.insert(0, {"id": number, "image_id": 100 + number, "category_id": category})
        text = json.dumps({"info": {}, "images": images, "annotations": annotations, "categories": categories})
        (tmp_path / f"{name}2018.json").write_text(text)
    return tmp_path


def test_inaturalist_by_its_annotations(inaturalist):
    train, val = (open_images(f"inaturalist2018={inaturalist}", split) for split in ("train", "val"))
    assert train.classes == val.classes == ("2", "5", "7")
    assert train.names == [f"train_val2018/Aves/{n}.jpg" for n in ("7/a1", "2/a2", "7/a3")]
    assert train.labels.tolist() == [2, 0, 2] and val.labels.tolist() == [1, 0]
    assert decode(train.read(2))[0, 0, 0] == 20
    names = [{"id": 2, "name": "Pica pica"}, {"id": 5, "name": "Apus apus"}, {"id": 7, "name": "Anas acuta"}]
    (inaturalist / "categories.json").write_text(json.dumps(names))
    assert open_images(f"inaturalist2018={inaturalist}").classes == ("Pica pica", "Apus apus", "Anas acuta")


def test_incomplete_inaturalist_is_refused(inaturalist):
    (inaturalist / "train_val2018/Aves/2/a2.jpg").unlink()
    with pytest.raises(UsageError, match=r"train2018.json lists images that are not there: 1 of 3.*a2.jpg"):
        open_images(f"inaturalist2018={inaturalist}")
    (inaturalist / "train2018.json").write_text('{"images": []}')
    with pytest.raises(UsageError, match=r"no annotation file of iNaturalist 2018.*'categories'"):
        open_images(f"inaturalist2018={inaturalist}")
    (inaturalist / "train2018.json").write_text('{"images": [')
    with pytest.raises(UsageError, match=r"train2018.json is not JSON"):
        open_images(f"inaturalist2018={inaturalist}")
    (inaturalist / "train2018.json").unlink()
    with pytest.raises(UsageError, match=r"there is no .*train2018.json.*The layout is"):
        open_images(f"inaturalist2018={inaturalist}")
    with pytest.raises(UsageError, match=r"inaturalist2018 needs its folder.*train_val2018"):
        open_images("inaturalist2018")


@pytest.mark.parametrize("folder", ["images256", "data/vision/torralba/deeplearning/images256"])
def test_places205_in_both_places(tmp_path, folder):
    lists = {"train": ["a/abbey/1.jpg 0", "a/alley/2.jpg 1", "a/abbey/3.jpg 0"], "val": ["a/alley/4.jpg 1"] * 2}
    lists["val"][1] = "a/abbey/5.jpg 0"
    (tmp_path / "trainvalsplit_places205").mkdir()
    for split, lines in lists.items():
        (tmp_path / "trainvalsplit_places205" / f"{split}_places205.csv").write_text("\n".join(lines) + "\n")
        for line in lines:
            save(tmp_path / folder / line.split()[0])
    train, val = (open_images(f"places205={tmp_path}", split) for split in ("train", "val"))
    assert train.classes == val.classes == ("a/abbey", "a/alley")
    assert train.labels.tolist() == [0, 1, 0] and val.labels.tolist() == [1, 0]
    assert val.names == ["a/alley/4.jpg", "a/abbey/5.jpg"] and decode(val.read(0)).shape == (4, 5, 3)
    (tmp_path / folder / "a/alley/4.jpg").unlink()
    with pytest.raises(UsageError, match=r"val_places205.csv lists images that are not there"):
        open_images(f"places205={tmp_path}", "val")
    (tmp_path / "trainvalsplit_places205" / "val_places205.csv").write_text("a/alley/4.jpg 1\n")
    save(tmp_path / folder / "a/alley/4.jpg")
    with pytest.raises(UsageError, match=r"numbered from 0 without a gap, but class 0 has no image"):
        open_images(f"places205={tmp_path}", "val")
    with pytest.raises(UsageError, match=r"there is no .*train_places205.csv.*The layout"):
        open_images(f"places205={tmp_path / 'none'}")


@pytest.fixture
def places365(tmp_path):
    (tmp_path / "categories_places365.txt").write_text("/a/airfield 0\n/a/alcove 1\n/b/bar 2\n")
    (tmp_path / "places365_train_standard.txt").write_text("/a/airfield/00000001.jpg 0\n/b/bar/00000001.jpg 2\n")
    (tmp_path / "places365_val.txt").write_text("Places365_val_00000001.jpg 2\nPlaces365_val_00000002.jpg 1\n")
    for path in ("data_256/a/airfield/00000001.jpg", "data_256/b/bar/00000001.jpg"):
        save(tmp_path / path)
    for number in (1, 2):
        save(tmp_path / "val_256" / f"Places365_val_0000000{number}.jpg", number)
    return tmp_path


def test_places365(places365):
    train, val = (open_images(f"places365={places365}", split) for split in ("train", "val"))
    assert train.classes == val.classes == ("a/airfield", "a/alcove", "b/bar")
    assert train.names == ["a/airfield/00000001.jpg", "b/bar/00000001.jpg"] and train.labels.tolist() == [0, 2]
    assert val.labels.tolist() == [2, 1] and decode(val.read(1))[0, 0, 0] == 2


def test_incomplete_places365_is_refused(places365):
    (places365 / "places365_val.txt").write_text("Places365_val_00000001.jpg 3\n")
    with pytest.raises(UsageError, match=r"places365_val.txt.*classes \[3\] are not among"):
        open_images(f"places365={places365}", "val")
    (places365 / "places365_val.txt").write_text("Places365_val_00000001.jpg\n")
    with pytest.raises(UsageError, match=r"places365_val.txt, line 1: a name and a number"):
        open_images(f"places365={places365}", "val")
    (places365 / "categories_places365.txt").unlink()
    with pytest.raises(UsageError, match=r"there is no .*categories_places365.txt"):
        open_images(f"places365={places365}")
    (places365 / "data_256").rename(places365 / "pictures")
    (places365 / "categories_places365.txt").write_text("/a/airfield 0\n")
    with pytest.raises(UsageError, match=r"there is no .*data_256.*The layout"):
        open_images(f"places365={places365}")


WNIDS = ("n01440764", "n01443537", *CLASSES[:1])
VAL = (2, 0, 1, 0)  # the class of each validation image


@pytest.fixture
def flat(tmp_path):
    for wnid in WNIDS:
        save(tmp_path / "train" / wnid / f"{wnid}_1.JPEG")
    for number, label in enumerate(VAL, start=1):
        save(tmp_path / "val" / f"ILSVRC2012_val_{number:08d}.JPEG", 50 * label)
    return tmp_path


def write_truth(root, kind):
    stems = [f"ILSVRC2012_val_{number:08d}" for number in range(1, 5)]
    wnids = [WNIDS[label] for label in VAL]
    if kind == "kaggle":  # not in order; several boxes
        lines = [f"{stem},{wnid} 1 2 3 4 {wnid} 5 6 7 8 \n" for stem, wnid in zip(stems, wnids, strict=True)]
        (root / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "".join(lines[::-1]))
    elif kind == "numbers":
        lines = [f"{stem}.JPEG {label}\n" for stem, label in zip(stems, VAL, strict=True)]
        (root / "val.txt").write_text("".join(lines))
    elif kind == "wnids":
        lines = [f"{stem}.JPEG {wnid}\n" for stem, wnid in zip(stems, wnids, strict=True)]
        (root / "val.txt").write_text("".join(lines))
    else:
        data = root / "ILSVRC2012_devkit_t12" / "data"
        data.mkdir(parents=True)
        ids = {wnid: number for number, wnid in enumerate(reversed(WNIDS), start=1)}  # not in sorted order
        (data / "ILSVRC2012_validation_ground_truth.txt").write_text("".join(f"{ids[wnid]}\n" for wnid in wnids))
        fields = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object), ("num_children", object)]
        rows = [(number, wnid, "some, words", 0) for wnid, number in ids.items()] + [(4, "n00001740", "entity", 3)]
        scipy.io.savemat(data / "meta.mat", {"synsets": np.array(rows, fields)[:, None]})


@pytest.mark.parametrize("kind", ["kaggle", "numbers", "wnids", "devkit"])
def test_a_flat_validation_folder_of_imagenet(flat, kind):
    write_truth(flat, kind)
    val = open_images(f"imagenet={flat}", "val")
    assert val.classes == WNIDS and val.labels.tolist() == list(VAL) and len(val.names) == 4
    assert [int(decode(val.read(n))[0, 0, 0]) for n in range(4)] == [50 * label for label in VAL]
    assert open_images(f"imagenet={flat}").labels.tolist() == [0, 1, 2]


def test_the_flat_folder_is_read_for_a_choice_of_classes(flat):
    write_truth(flat, "wnids")
    for wnid in CLASSES[1:]:
        save(flat / "train" / wnid / "1.JPEG")
    val = open_images(f"imagenet100={flat}", "val")
    assert val.names == ["ILSVRC2012_val_00000001.JPEG"] and val.labels.tolist() == [0] and val.classes == CLASSES
    assert decode(val.read(0))[0, 0, 0] == 100


def test_kaggles_folders(flat):
    write_truth(flat, "kaggle")
    below = flat / "ILSVRC" / "Data" / "CLS-LOC"
    below.mkdir(parents=True)
    for split in ("train", "val"):
        (flat / split).rename(below / split)
    assert open_images(f"imagenet={flat}", "val").labels.tolist() == list(VAL)
    assert len(open_images(f"imagenet={flat}", "train")) == 3


def test_a_flat_folder_without_its_truth_is_refused(flat):
    with pytest.raises(UsageError, match=r"has no class folders.*LOC_val_solution.csv"):
        open_images(f"imagenet={flat}", "val")
    (flat / "val.txt").write_text("ILSVRC2012_val_00000001.JPEG n01440764\n")
    with pytest.raises(UsageError, match=r"val.txt does not say the class of 3 images.*00000002"):
        open_images(f"imagenet={flat}", "val")
    (flat / "val.txt").write_text("ILSVRC2012_val_00000001.JPEG 999\n")
    with pytest.raises(UsageError, match=r"numbers 1000 classes, but train/ has 3 folders"):
        open_images(f"imagenet={flat}", "val")
    (flat / "val.txt").write_text("")
    with pytest.raises(UsageError, match=r"val.txt does not say the class of 4 images"):
        open_images(f"imagenet={flat}", "val")
    lines = [f"ILSVRC2012_val_{number:08d}.JPEG {WNIDS[label]}" for number, label in enumerate(VAL, start=1)]
    (flat / "val.txt").write_text("\n\n".join(lines) + "\n \n")
    assert open_images(f"imagenet={flat}", "val").labels.tolist() == list(VAL)
    (flat / "val.txt").write_text("\n".join(lines) + "\nand more words\n")
    with pytest.raises(UsageError, match="'and more words' is not an image and its class"):
        open_images(f"imagenet={flat}", "val")
    (flat / "val.txt").unlink()
    write_truth(flat, "devkit")
    (flat / "val" / "ILSVRC2012_val_00000001.JPEG").unlink()
    with pytest.raises(UsageError, match="has 4 lines, but there are 3 validation images"):
        open_images(f"imagenet={flat}", "val")
    (flat / "ILSVRC2012_devkit_t12" / "data" / "meta.mat").unlink()
    with pytest.raises(UsageError, match=r"There is no .*meta.mat"):
        open_images(f"imagenet={flat}", "val")
