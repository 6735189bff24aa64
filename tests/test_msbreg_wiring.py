"""What the configuration says of MSBReg's losses is what a step computes, and K views cost one decode."""

import copy
import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

import unitsphere
from unitsphere.common.randomness import generator
from unitsphere.config.layers import Layer
from unitsphere.methods.build import build_learner
from unitsphere.methods.learners.dispersion import brownian_directions
from unitsphere.methods.learners.learner import Moment
from unitsphere.methods.resolve import resolve
from unitsphere.objectives.regression import (
    brownian_loss,
    centroid_loss,
    correlation_loss,
    gram_loss,
    nuclear_loss,
)

N, K = 16, 5  # an odd number of views: no two forms of the centroid agree
SMALL = {"batch_size": N, "image_size": 16, "hidden": 32, "dim": 8, "warmup_epochs": 0}
SINGULAR = {"nuclear": nuclear_loss, "gram": gram_loss, "correlation": correlation_loss}


def built(method, **fields):
    return build_learner(resolve(Layer("test", {"method": method, "data": "shapes"} | SMALL | fields)).config)


def one_step(method, count):
    """The views of a step, its random inputs, and what it gives."""
    views = list(torch.randn(count, N, 3, 16, 16, generator=generator(0, "views")))
    inputs = method.inputs(N, Moment(0, 10, 0, 1), generator(0, "t"))
    return views, inputs, method(views, inputs)


def msbreg(**fields):
    """A step of MSBReg: its inputs, what it gives, and its predictions and targets (N, K, D) by the networks alone."""
    method = built("msbreg", view_count=K, **fields)
    online, predictor, slow = (copy.deepcopy(part) for part in (method.online, method.predictor, method.slow))
    views, inputs, step = one_step(method, K)
    with torch.no_grad():  # each view in a pass of its own: its own batch statistics
        predictions = torch.stack([F.normalize(predictor(online(view)), dim=1) for view in views], 1)
        targets = torch.stack([F.normalize(slow(view), dim=1) for view in views], 1)
    return inputs, step, predictions, targets


@pytest.mark.parametrize("form", ["split", "others", "all"])
def test_the_configuration_chooses_which_centroids_meet(form):
    _, step, predictions, targets = msbreg(centroid=form, singular_weight=0, brownian_weight=0)
    losses = {other: centroid_loss(predictions, targets, other).item() for other in ("split", "others", "all")}
    assert step.loss.item() == pytest.approx(losses[form], rel=1e-4)
    assert all(abs(losses[form] - loss) > 0.01 * losses[form] for other, loss in losses.items() if other != form)


def test_without_a_word_each_view_meets_the_others_and_the_singular_values_are_added_up():
    _, step, predictions, targets = msbreg()
    attraction = centroid_loss(predictions, targets, "others")
    singular = 0.004 * nuclear_loss(predictions.flatten(0, 1))
    assert step.health["loss"].item() == pytest.approx(attraction.item(), rel=1e-4)
    assert step.health["singular_loss"].item() == pytest.approx(singular.item(), rel=1e-4)


@pytest.mark.parametrize("form", SINGULAR)
def test_the_configuration_chooses_the_form_of_the_singular_value_loss(form):
    """Of all views of all images together, weighed, and in the loss."""
    _, step, predictions, targets = msbreg(singular_form=form, singular_weight=0.25, brownian_weight=0)
    losses = {name: 0.25 * loss(predictions.flatten(0, 1)).item() for name, loss in SINGULAR.items()}
    assert step.health["singular_loss"].item() == pytest.approx(losses[form], rel=1e-4)
    assert all(abs(losses[form] - loss) > 0.01 * abs(losses[form]) for name, loss in losses.items() if name != form)
    assert step.loss.item() == pytest.approx(centroid_loss(predictions, targets).item() + losses[form], rel=1e-4)


@pytest.mark.parametrize("form", SINGULAR)
def test_the_form_is_chosen_for_a_contrastive_method_too(form):
    method = built("moco-v2", head="mlp", queue_size=32, singular_form=form, singular_weight=0.25)
    online = copy.deepcopy(method.online)
    views, _, step = one_step(method, 2)
    with torch.no_grad():
        wanted = 0.25 * SINGULAR[form](online(views[0])).item()
    assert step.health["singular_loss"].item() == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("per_view", [False, True])
def test_the_configuration_says_whether_a_force_is_of_an_image_or_of_a_view(per_view):
    inputs, step, predictions, _ = msbreg(brownian_per_view=per_view, brownian_weight=2.0, singular_weight=0)
    directions = [brownian_directions(inputs["brownian_seed"], predictions, per_view=each) for each in (False, True)]
    losses = [2.0 * brownian_loss(predictions, each).item() for each in directions]
    assert step.health["brownian_loss"].item() == pytest.approx(losses[per_view], rel=1e-4)
    assert abs(losses[0] - losses[1]) > 0.01 * abs(losses[per_view])


class Counting(Dataset):
    """Pictures of noise; `read` has the number of each that was asked for."""

    def __init__(self, count: int) -> None:
        self.pictures = np.random.default_rng(0).integers(0, 256, (count, 20, 20, 3), np.uint8)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> np.ndarray:
        self.read.append(index)
        return self.pictures[index]


def test_k_views_share_one_decode(tmp_path):
    """Images that stay outside the memory are read once an epoch, whatever the number of views."""
    torch.set_num_threads(1)
    usual = SMALL | {"backbone": "resnet-tiny", "holdout": 0.2, "resident": False, "lr": 0.01, "device": "cpu"}
    usual |= {"tensorboard": False, "normalise": "half"}

    def reads(views: int, epochs: int) -> int:
        data = Counting(40)
        out = tmp_path / f"{views} {epochs}"
        unitsphere.pretrain("msbreg", data=data, out=out, view_count=views, epochs=epochs, **usual)
        return len(data.read)

    two = reads(2, epochs=1)
    assert reads(2, epochs=3) - two == 2 * 32  # the training's reads are among them: two batches of 16 an epoch
    assert reads(7, epochs=1) == two


def test_results_say_which_losses_are_reconstructed(tmp_path, labelled):
    torch.set_num_threads(1)
    usual = SMALL | {"backbone": "resnet-tiny", "lr": 0.01, "epochs": 1, "device": "cpu", "tensorboard": False}
    for method, told in (("byol", None), ("msbreg", ["centroids", "singular_loss", "brownian_loss"])):
        run = unitsphere.pretrain(method, data=Counting(40).pictures, out=tmp_path / method, **usual)
        unitsphere.evaluate(run, protocol="knn", data=labelled, device="cpu")
        results = json.loads((run.path / "results.json").read_text())
        assert [result.get("reconstructed") for result in results] == [told, told]
