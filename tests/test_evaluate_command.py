"""Which images evaluate and embed take when nothing is said, and what they say when it is too much."""

import numpy as np
import pytest
import torch
from conftest import command, write_images, write_labelled
from torch import nn

import unitsphere
from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.data.source import open_images

SMALL = {"backbone": "resnet-tiny", "image_size": 16, "batch_size": 8, "queue_size": 32, "bn_groups": 1, "epochs": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trained on two of three classes, with three tenths held out."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("division")
    data = write_labelled(root / "data")
    write_images(data / "grey", 30, seed=7)
    settings = SMALL | {"device": "cpu", "tensorboard": False, "holdout": 0.3, "classes": ["red", "blue"]}
    return unitsphere.pretrain("moco-v2", data=data, out=root / "run", **settings), data


def test_embed_takes_for_held_out_what_the_run_held_out(run):
    trained, data = run
    held_out = open_images(data, "val", holdout=0.3, classes=["red", "blue"])
    assert unitsphere.embed(trained, data=data, split="val").names == held_out.names
    assert len(unitsphere.embed(trained, data=data, split="val", holdout=0.1, classes=["grey"]).names) < 11
    assert len(unitsphere.embed(trained, data=data).names) == 110
    assert len(unitsphere.embed(trained, data=data, classes=["grey"]).names) == 30


def test_the_classes_of_a_run_are_those_of_its_own_data(run, monkeypatch, tmp_path):
    trained, data = run
    monkeypatch.chdir(data.parent)
    constants = unitsphere.evaluate(trained, protocol="knn", data="./data/", k=[3])["constants"]
    assert tuple(constants["classes"]) == ("red", "blue") and constants["holdout"] == 0.3
    for name in ("cat", "dog"):
        write_images(tmp_path / name, 10)
    result = unitsphere.evaluate(trained, protocol="knn", data=tmp_path, k=[3])
    assert result["constants"]["classes"] is None and sum(result["images"].values()) == 20


def test_classes_and_share_are_options_of_both_commands(run, tmp_path):
    trained, data = run
    which = ("--data", data, "--classes", "grey, red", "--holdout", "0.2")
    done = command("evaluate", trained.path, *which, "--protocol", "knn", "--k", "3")
    assert done.returncode == 0, done.stderr
    done = command("embed", trained.path, *which, "--split", "val", "--out", tmp_path / "f.npz")
    assert done.returncode == 0, done.stderr
    names = open_images(data, "val", holdout=0.2, classes=["grey", "red"]).names
    assert np.load(tmp_path / "f.npz")["names"].tolist() == names


def test_embed_refuses_features_that_are_not_known(run):
    trained, data = run
    with pytest.raises(UsageError, match="Did you mean embedding"):
        unitsphere.embed(trained, data=data, features="embeding")


class Greedy(nn.Module):
    def forward(self, images):
        return torch.empty(len(images), 1 << 50)


def test_too_little_memory_is_said_with_what_to_lower(labelled):
    for judge in (unitsphere.embed, lambda *what, **more: unitsphere.evaluate(*what, protocol="knn", **more)):
        with pytest.raises(UnitsphereError, match=r"out of memory.*--batch-size"):
            judge(Greedy(), data=labelled, image_size=16)
