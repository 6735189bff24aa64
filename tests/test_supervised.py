"""Learning from labels: the reference that the other methods are measured against."""

import json

import numpy as np
import pytest
import torch
from test_regression import SMALL_RUN, NoisyView
from torch.nn import functional as F

import unitsphere
from unitsphere.common.errors import UsageError
from unitsphere.common.terminal import describe
from unitsphere.config.layers import Layer
from unitsphere.methods.build import build_learner
from unitsphere.methods.resolve import resolve
from unitsphere.training.loop import Stopped


def small(**fields):
    usual = {"method": "supervised", "data": "shapes", "image_size": 16, "batch_size": 16}
    return build_learner(resolve(Layer("test", usual | fields)).config)


def test_the_loss_is_cross_entropy_and_the_accuracy_counts_what_is_right():
    method = small(class_count=4).eval()
    images, labels = torch.randn(16, 3, 16, 16), torch.arange(16) % 4
    step = method([images], {"labels": labels})
    with torch.no_grad():
        scores = method.classifier(method.backbone(images))
    torch.testing.assert_close(step.loss.detach(), F.cross_entropy(scores, labels))
    assert float(step.health["accuracy"]) == pytest.approx(float((scores.argmax(1) == labels).float().mean()))
    assert step.embedding.shape == (16, 64)
    step.loss.backward()
    assert all(parameter.grad is not None for parameter in method.parameters())


def test_more_labels_than_classes_are_refused_and_nothing_is_left(tmp_path):
    fields = {"data": "shapes=60", "class_count": 5, **SMALL_RUN}
    with pytest.raises(UsageError, match="class_count: given 5, but the labels of shapes go up to 11"):
        unitsphere.pretrain("supervised", out=tmp_path / "run", **fields)
    assert not (tmp_path / "run").exists()


def test_without_data_the_number_of_classes_must_be_given():
    with pytest.raises(UsageError, match="class_count"):
        small()


def test_a_run_counts_its_classes_learns_and_is_judged(labelled, tmp_path):
    fields = SMALL_RUN | {"data": str(labelled), "lr": 0.1, "epochs": 8, "warmup_epochs": 0}
    run = unitsphere.pretrain("supervised", out=tmp_path / "run", **fields)
    assert run.config.class_count == 2
    assert json.loads((run.path / "run.json").read_text())["origins"]["class_count"] == "the data's labels"
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert lines[-1]["accuracy"] > 0.9  # red against blue
    assert unitsphere.evaluate(run, protocol="knn", data=str(labelled), k=[3], device="cpu")["value"]["k=3"] > 90
    assert unitsphere.load_backbone(run)(torch.zeros(2, 3, 16, 16)).shape == (2, 64)


def test_images_without_labels_are_refused(photos, tmp_path):
    with pytest.raises(UsageError, match="no labels"):
        unitsphere.pretrain("supervised", data=str(photos), out=tmp_path / "run", **SMALL_RUN)


def test_stopped_and_resumed_equals_never_stopped(labelled, tmp_path):
    fields = SMALL_RUN | {"data": str(labelled)}
    whole = unitsphere.pretrain("supervised", out=tmp_path / "whole", views=NoisyView(), **fields)
    with pytest.raises(Stopped):
        unitsphere.pretrain("supervised", out=tmp_path / "parts", views=NoisyView(16 * 5 + 3), **fields)
    parts = unitsphere.pretrain(out=tmp_path / "parts", views=NoisyView(), resume=True)
    ours, theirs = parts.latest()[0], whole.latest()[0]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_line_says_what_the_method_measures():
    record = {"epoch": 1, "loss": 0.5, "effective_rank": 9.6, "images_per_second": 1234.0, "wait_share": 0.01}
    assert describe(record | {"accuracy": 0.25}, 3) == (
        "epoch 1/3  loss 0.500  accuracy 25%  rank 10  1,234 images/s  wait 1%"
    )
    line = describe(record | {"log_k": 8.3, "contrastive_accuracy": 0.5, "knn": 71.25}, 3)
    assert line.startswith("epoch 1/3  loss 0.500 (guessing 8.30)  accuracy 50%  rank") and line.endswith("k-NN 71.2")
    particles = {"alignment": 0.3, "centroid_distance": 0.5, "uniformity": -2.19}
    assert "views apart 0.30  centroids 0.50  uniformity -2.19" in describe(record | particles, 3)
    assert "uniformity" not in describe(record | {"uniformity": -2.19}, 3)  # beside similarities it is one too many


def test_only_labelled_images_are_learned_from(tmp_path):
    from unitsphere.data.images import Images
    from unitsphere.training.prepare import labelled as with_labels

    images = Images("mixed", ["a", "b", "c"], np.array([1, -1, 0]), ("x", "y"), lambda n: np.full((4, 4), n, np.uint8))
    kept = with_labels(images)
    assert kept.names == ["a", "c"] and kept.labels.tolist() == [1, 0] and kept.read(1)[0, 0] == 2
