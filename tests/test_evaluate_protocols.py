"""The command for each protocol, what it writes down, and what it refuses."""

from __future__ import annotations

import io
import json
import math
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_images, write_labelled
from PIL import Image

import unitsphere
from unitsphere.cli import main
from unitsphere.common.errors import UsageError
from unitsphere.data.images import Images
from unitsphere.data.source import open_images
from unitsphere.data.voc import CLASSES
from unitsphere.evaluation.recipes import FINE_TUNING_RECIPES, LINEAR_RECIPES
from unitsphere.runs.run import Run

SMALL = {"backbone": "resnet-tiny", "image_size": 16, "batch_size": 8, "queue_size": 32, "bn_groups": 4, "epochs": 1}
RANDOM = {"backbone": "resnet-tiny", "image_size": 16, "device": "cpu"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("protocols")
    data = write_labelled(root / "data")
    settings = SMALL | {"device": "cpu", "tensorboard": False, "holdout": 0.25}
    return unitsphere.pretrain("moco-v2", data=data, out=root / "run", **settings), data


def last_result(trained: Run) -> dict:
    return json.loads((trained.path / "results.json").read_text())[-1]


def test_semi_by_fraction(run, capsys):
    trained, data = run
    words = ["--protocol", "semi", "--data", str(data), "--fraction", "0.2", "--epochs", "2", "--device", "cpu"]
    assert main(["evaluate", str(trained.path), *words]) == 0
    assert "with a learning rate of 0.25, 0.00025 for the encoder" in capsys.readouterr().out
    result = last_result(trained)
    rules = asdict(FINE_TUNING_RECIPES["msbreg-10%"])
    rules |= {"epochs": 2, "lr": [0.25], "encoder_lr": [0.00025], "drops": []}
    rules["views"] = "supervised-small"  # the run's images have 16 pixels
    assert {name: result["constants"][name] for name in rules} == rules
    assert result["constants"]["recipe"] == "msbreg-10%" and result["constants"]["fraction"] == 0.2
    assert result["protocol"] == "semi" and result["images"] == {"train": 12, "test": 20}


def test_semi_by_list_with_rates_to_choose_from(run, capsys, tmp_path):
    trained, data = run
    names = open_images(data, "train", holdout=0.25).names
    listed = [name for name in names if name.startswith("red")][:6] + [n for n in names if n.startswith("blue")][:6]
    file = tmp_path / "labelled.txt"
    file.write_text("\n".join(listed))
    words = ["--labelled", str(file), "--lr", "0.1,1", "--encoder-lr", "0,0.01", "--epochs", "1"]
    assert main(["evaluate", str(trained.path), "--protocol", "semi", "--data", str(data), *words]) == 0
    constants = last_result(trained)["constants"]
    assert constants["labelled"] == str(file) and constants["fraction"] is None
    assert constants["lr"] == [0.1, 1] and constants["encoder_lr"] == [0, 0.01]
    assert constants["chosen_lr"] in (0.1, 1) and constants["chosen_encoder_lr"] in (0, 0.01)
    assert "warning few images: these numbers are of 20, of which one is 5 %" in capsys.readouterr().err
    file.write_text("# none\n")
    assert main(["evaluate", str(trained.path), "--protocol", "semi", "--data", str(data), *words]) == 2
    assert "labelled.txt names no image" in capsys.readouterr().err


def test_few_labels_leave_the_encoder_frozen():
    pixels = np.random.default_rng(0).integers(0, 256, (400, 8, 8, 3), np.uint8)
    images = Images("noise", [str(n) for n in range(400)], np.arange(400) % 2, ("a", "b"), lambda n: pixels[n])
    result = unitsphere.evaluate("random", protocol="semi", data=images, fraction=0.02, epochs=1, **RANDOM)
    assert result["constants"]["recipe"] == "msbreg-1%" and result["constants"]["chosen_encoder_lr"] == 0
    assert result["images"] == {"train": 8, "test": 40}


def test_large_images_are_fine_tuned_on_crops_as_small_as_the_linear_protocols(run):
    about = {"backbone": "resnet-tiny", "image_size": 72, "device": "cpu"}
    result = unitsphere.evaluate("random", protocol="finetune", data=run[1], epochs=1, **about)
    assert result["constants"]["views"] == "supervised"


def test_finetune_with_a_batch_of_its_own(run, capsys):
    trained, data = run
    words = ["--protocol", "finetune", "--data", str(data), "--epochs", "1", "--batch-size", "32"]
    assert main(["evaluate", str(trained.path), *words]) == 0
    constants = last_result(trained)["constants"]
    assert constants["batch_size"] == 32 and constants["recipe"] == "full"
    assert constants["lr"] == constants["encoder_lr"] == pytest.approx([0.05 * 32 / 256])
    assert main(["evaluate", str(trained.path), *words, "--lr", "0.4"]) == 0
    assert last_result(trained)["constants"]["lr"] == [0.4]


def test_transfer_takes_the_settings_for_the_data(run, tmp_path):
    trained, _ = run
    for name in ("cat", "dog"):
        write_images(tmp_path / name, 10, seed=len(name))
    assert (
        main(["evaluate", str(trained.path), "--protocol", "transfer", "--data", str(tmp_path), "--epochs", "3"]) == 0
    )
    constants = last_result(trained)["constants"]
    assert constants["recipe"] == "inaturalist2018" and constants["drops"] == [1, 2] and constants["lr"] == [0.2]
    places = Images(
        "places205", [str(n) for n in range(20)], np.arange(20) % 2, ("a", "b"), lambda n: np.full((9, 9), n, np.uint8)
    )
    result = unitsphere.evaluate("random", protocol="transfer", data=places, **RANDOM)
    assert result["constants"]["recipe"] == "places205" and result["constants"]["epochs"] == 28


def test_the_transfer_rows_are_the_supplements():
    for name, epochs, drops in (("inaturalist2018", 84, (28, 56)), ("places205", 28, (9, 19))):
        row = LINEAR_RECIPES[name]
        assert (row.epochs, row.drops, row.gamma) == (epochs, drops, 0.1)
        assert (row.lr, row.batch_size, row.momentum, row.nesterov, row.weight_decay) == ((0.2,), 256, 0.9, False, 1e-4)
    byol = LINEAR_RECIPES["byol"]
    assert (byol.epochs, byol.nesterov, byol.momentum, byol.lr[0] / byol.batch_size) == (80, True, 0.9, 0.2 / 256)
    assert [byol.factor(epoch) for epoch in (0, 40, 60)] == pytest.approx([1, 0.5, 0.5 - math.sqrt(0.125)])


def test_svm_of_one_label_an_image(run, capsys):
    trained, data = run
    assert main(["evaluate", str(trained.path), "--protocol", "svm", "--data", str(data)]) == 0
    printed = capsys.readouterr()
    assert "mAP" in printed.out
    assert "warning few images: these numbers are of 20.\n" in printed.err  # one image is no share of a precision
    result = last_result(trained)
    assert set(result["value"]) == {"mAP", "mAP_area", "top1"} and result["value"]["top1"] > 80  # red or blue
    assert set(result["constants"]["per_class"]) == {"red", "blue"} and result["classes"] == 2
    assert result["constants"]["positive_weight"] == 2 and result["constants"]["folds"] == 3


@pytest.mark.parametrize("protocol", ["linear", "finetune", "svm"])
def test_a_class_that_was_never_taught_is_refused(protocol, tmp_path):
    """Shards may name other classes in either split; images of the last one look like those of the first."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    for split, classes in (("train", 2), ("val", 3)):
        with tarfile.open(tmp_path / f"{split}.tar", "w") as tar:
            for number in range(12):
                label, image = number % classes, io.BytesIO()
                Image.fromarray(np.uint8(pixels // (1 + label % 2))).save(image, "png")
                for ending, content in ((".png", image.getvalue()), (".cls", str(label).encode())):
                    entry = tarfile.TarInfo(f"{number:03d}{ending}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    with pytest.raises(UsageError, match=r"classes that the training images lack: \[2\]"):
        unitsphere.evaluate("random", protocol=protocol, data=f"tar={tmp_path}", **RANDOM)


def several_labels(count: int = 60) -> Images:
    """A class for each colour channel: shown where that channel is bright, sometimes not to be judged by."""
    draws = np.random.default_rng(0)
    marks = draws.choice(np.array([-1, 1], np.int8), (count, 3))
    pixels = (100 + 60 * marks[:, None, None, :] + draws.integers(-20, 20, (count, 8, 8, 3))).astype(np.uint8)
    marks[::10] = 0
    return Images("bright", [str(n) for n in range(count)], marks, ("r", "g", "b"), lambda n: pixels[n])


def test_pixels_have_nothing_to_train_but_the_classifier(run, capsys):
    words = ["evaluate", "pixels", "--image-size", "8", "--data", str(run[1]), "--protocol", "finetune"]
    words += ["--epochs", "1"]
    assert main(words) == 0
    assert "with a learning rate of 0.05, the encoder frozen" in capsys.readouterr().out
    assert main([*words, "--encoder-lr", "0"]) == 0
    assert main([*words, "--encoder-lr", "0,0.1"]) == 2
    assert "encoder_lr: given [0.0, 0.1], but nothing in raw pixels can be trained" in capsys.readouterr().err


def test_svm_of_several_labels_an_image():
    result = unitsphere.evaluate(
        "pixels", protocol="svm", data=several_labels(), holdout=0.3, image_size=8, device="cpu"
    )
    assert set(result["value"]) == {"mAP", "mAP_area"} and result["value"]["mAP"] > 95  # the pixels say it
    assert "classes" not in result
    assert result["constants"]["mAP"].startswith("VOC 2007") and len(result["constants"]["costs"]) > 10


def test_svm_leaves_out_classes_that_are_not_chosen():
    images = several_labels()
    images.labels[:, 1] = -1  # cannot be learnt
    asked = {"protocol": "svm", "data": images, "holdout": 0.3, "image_size": 8, "device": "cpu"}
    with pytest.raises(UsageError, match=r"show 'g' .* leave the class out \(--classes\)"):
        unitsphere.evaluate("pixels", **asked)
    result = unitsphere.evaluate("pixels", classes=["b", "r"], **asked)
    assert list(result["constants"]["per_class"]) == ["b", "r"] and sum(result["images"].values()) == 60


def test_svm_reads_voc(tmp_path):
    folder = tmp_path / "VOCdevkit" / "VOC2007"
    (folder / "ImageSets" / "Main").mkdir(parents=True)
    paths = write_images(folder / "JPEGImages", 80, size=(12, 12), suffix=".jpg")
    draws = np.random.default_rng(0)
    for kind in CLASSES:
        for split, part in (("trainval", paths[:50]), ("test", paths[50:])):
            marks = np.where(np.arange(len(part)) < 3, 1, draws.choice((-1, -1, 1), len(part)))
            lines = (f"{path.stem} {mark:2d}\n" for path, mark in zip(part, marks, strict=True))
            (folder / "ImageSets" / "Main" / f"{kind}_{split}.txt").write_text("".join(lines))
    result = unitsphere.evaluate("random", protocol="svm", data=f"voc2007={tmp_path}", **RANDOM)
    assert result["images"] == {"train": 50, "test": 30} and len(result["constants"]["per_class"]) == 20
    assert 20 < result["value"]["mAP"] < 80  # chance is a third


@pytest.mark.parametrize("protocol", ["knn", "linear", "transfer", "finetune"])
def test_several_labels_are_only_for_svm(protocol):
    with pytest.raises(UsageError, match="For several there is svm"):
        unitsphere.evaluate("random", protocol=protocol, data=several_labels(), **RANDOM)


@pytest.mark.parametrize("protocol", ["knn", "linear", "transfer", "finetune", "svm"])
def test_images_without_labels_are_refused(protocol, photos):
    with pytest.raises(UsageError, match=r"labels: the training images of .* have none"):
        unitsphere.evaluate("random", protocol=protocol, data=photos, **RANDOM)


def test_what_a_protocol_does_not_take_is_refused(run, capsys):
    trained, data = run
    for words, said in (
        (["semi"], "give one of --fraction"),
        (["semi", "--fraction", "0.1", "--labelled", "x"], "give one of --fraction"),
        (["semi", "--fraction", "0.001"], "leaves class 'red' without any"),
        (
            ["linear", "--fraction", "0.1"],
            "fraction: protocol linear does not take it; it takes recipe, lr, epochs, augment",
        ),
        (["svm", "--k", "3"], "k: protocol svm does not take it"),
        (["finetune", "--as", "moco"], "Allowed: msbreg-1%, msbreg-10%, full"),
        (["transfer", "--as", "places"], "Did you mean places205"),
        (["finetune", "--encoder-lr", "-1"], "at least 0"),
        (["finetune", "--lr", "0"], "greater than 0"),
        (["linear", "--lr", "nan"], "greater than 0"),
        (["semi", "--fraction", "0.5", "--encoder-lr", "inf"], "at least 0"),
        (["finetune", "--batch-size", "0"], "batch_size: given 0"),
    ):
        assert main(["evaluate", str(trained.path), "--data", str(data), "--protocol", *words]) == 2, words
        assert said in capsys.readouterr().err


def test_without_scikit_learn_the_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UsageError, match=r"pip install -e '\.\[plots\]'"):
        unitsphere.evaluate("random", protocol="svm", data=run[1], **RANDOM)


def test_results_that_come_at_once_are_all_kept(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: Run(tmp_path).add_result({"value": n}), range(40)))
    assert sorted(each["value"] for each in json.loads((tmp_path / "results.json").read_text())) == list(range(40))
