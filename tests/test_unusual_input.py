"""Legal and rare: what must work all the same, or be refused before anything is lost."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import normalize
from torch.utils.data import Dataset

import unitsphere
from unitsphere.analysis import hardness
from unitsphere.analysis.request import AnalysisRequest
from unitsphere.cli import main
from unitsphere.common.errors import UsageError
from unitsphere.common.randomness import generator
from unitsphere.config.layers import Layer
from unitsphere.config.sizing import Facts
from unitsphere.data.images import Images
from unitsphere.data.source import open_images
from unitsphere.evaluation.linear import linear
from unitsphere.evaluation.recipes import LINEAR_RECIPES, LinearRecipe, adapted
from unitsphere.features.extract import CachedFeatures
from unitsphere.methods.build import build_learner
from unitsphere.methods.learners.learner import Moment
from unitsphere.methods.resolve import resolve
from unitsphere.modules.norms import part_batch_norms
from unitsphere.objectives.contrastive import NOTHING
from unitsphere.objectives.mixing import Mixing, synthesise
from unitsphere.training.telemetry import spread

SMALL = {"image_size": 16, "batch_size": 16, "bn_groups": 1, "device": "cpu", "tensorboard": False, "log_every": 1}
TINY = SMALL | {"backbone": "resnet-tiny"}
CONTRASTIVE = TINY | {"queue_size": 64, "dim": 16}


class PartlyLabelled(Dataset):
    """A third of the images has no label."""

    targets = tuple(-1 if number % 3 == 0 else number % 4 for number in range(120))
    pictures = np.random.default_rng(0).integers(0, 255, (120, 16, 16, 3), np.uint8)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, number):
        return self.pictures[number], self.targets[number]


def dropping_out():
    torch.manual_seed(5)
    layers = nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3)
    return nn.Sequential(*layers)


def test_dropout_follows_the_seed_of_the_run_and_resumes(tmp_path):
    """Not what else the process has drawn."""
    given = SMALL | {"queue_size": 64, "dim": 16, "data": "shapes=64x16", "save_every": 1, "lr_schedule": "constant"}
    weights = []
    for number, rounds in ((1, (2,)), (999, (2,)), (7, (1, 2))):
        torch.manual_seed(number)
        for epochs in rounds:
            out, more = tmp_path / str(number), {"resume": True, "epochs": epochs}
            run = unitsphere.pretrain("moco-v2", out=out, backbone=dropping_out(), **(given | more))
        weights.append(run.latest()[0]["method.online.backbone.0.weight"])
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


def test_what_the_caller_draws_is_the_caller_s(tmp_path):
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    unitsphere.pretrain("moco-v2", data="shapes=64x16", out=tmp_path, epochs=1, **CONTRASTIVE)
    assert torch.equal(torch.rand(2), wanted)


def test_tied_weights_are_saved(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 8, 3, padding=1)
            self.third = self.second

        def forward(self, x):
            return self.third(self.second(self.first(x)).relu()).mean((2, 3))

    given = SMALL | {"queue_size": 64, "dim": 16, "data": "shapes=64x16"}
    unitsphere.pretrain("moco-v2", out=tmp_path / "run", backbone=Tied(), epochs=1, **given)
    run = unitsphere.pretrain(out=tmp_path / "run", backbone=Tied(), epochs=2, resume=True)
    tensors = run.latest()[0]
    names = [f"method.online.backbone.{name}.weight" for name in ("second", "third")]
    assert torch.equal(*(tensors[name] for name in names))


def test_online_k_nn_takes_the_images_that_have_labels(tmp_path):
    run = unitsphere.pretrain("moco-v2", data=PartlyLabelled(), out=tmp_path, epochs=1, knn_every=1, **CONTRASTIVE)
    assert 0 <= json.loads(run.metrics_file.read_text().splitlines()[-1])["knn"] <= 100


def test_an_oracle_s_run_is_looked_at_with_the_images_that_it_saw(tmp_path):
    run = unitsphere.pretrain("moco-v2", data=PartlyLabelled(), out=tmp_path, epochs=2, oracle=True, **CONTRASTIVE)
    ask = AnalysisRequest(data=PartlyLabelled(), latest_only=True)
    (found,) = hardness.measure(run, ask, images=32, top=8)["checkpoints"]
    assert found["chance"] > 0  # whose keys the queue holds is known
    assert "mutual_information_bound" not in run.metrics_file.read_text()  # negatives that depend on the query: none


@pytest.mark.parametrize("method", [{"method": "supervised"}, {"method": "moco-v2", "oracle": True}])
def test_one_class_cannot_be_told_apart(method, tmp_path):
    (one, *_) = open_images("shapes=600x16", "train").classes
    with pytest.raises(UsageError, match="of one class"):
        unitsphere.pretrain(data="shapes=600x16", classes=[one], out=tmp_path / "run", **method, **TINY)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("size", [100, 200, 48, 250, 37])
def test_groups_that_nobody_asked_for_divide_the_batch(size):
    given = Layer("given", {"method": "moco-v2", "data": "./photos", "batch_size": size})
    config = resolve(given, facts=Facts(5000, 300, True)).config
    assert size % config.bn_groups == 0


def test_one_image_of_each_class_leaves_none_to_choose_a_rate_on():
    x, y = torch.randn(4, 8), torch.arange(4)
    with pytest.raises(UsageError, match="lr: several rates are compared on a tenth"):
        linear(CachedFeatures(x), y, x, y, LinearRecipe(lr=(1.0, 10.0), epochs=2))


def test_a_rate_does_not_drop_before_the_first_epoch():
    for row in ("mochi-imagenet100", "moco", "places205"):
        for epochs in (1, 2, 3):
            assert adapted(LINEAR_RECIPES, row, epochs).factor(0) == 1


def test_an_svm_takes_classes_without_names():
    pictures = np.random.default_rng(0).integers(0, 255, (60, 16, 16, 3), np.uint8)
    images = Images("mine", [str(n) for n in range(60)], np.arange(60) % 3, None, lambda n: pictures[n])
    asked = {"backbone": "resnet-tiny", "stem": "small", "image_size": 16, "device": "cpu"}
    found = unitsphere.evaluate("random", protocol="svm", data=images, **asked)
    assert len(found["constants"]["per_class"]) == 3


def vanilla(positives, **fields):
    given = {"method": "jcl-vanilla", "data": "shapes", "keys": 4, "positives": positives, **CONTRASTIVE, **fields}
    config = resolve(Layer("test", given)).config
    method = build_learner(config).train()
    torch.manual_seed(1)
    views = [torch.randn(16, 3, 16, 16) for _ in range(method.views)]
    return method(views, method.inputs(16, Moment(0, 1, 0, 1), generator(0, "step", 0)))


@pytest.mark.parametrize("force", ["brownian_weight", "uniformity_weight", "singular_weight"])
def test_forces_act_on_a_repeated_query_once(force):
    each, repeated = (vanilla(positives, **{force: 0.5}) for positives in ("each", "repeated"))
    assert repeated.loss.item() == pytest.approx(each.loss.item(), rel=1e-4)
    assert len(repeated.embedding) == 16
    assert spread(repeated.embedding)["uniformity"] == pytest.approx(spread(each.embedding)["uniformity"], abs=1e-4)


def test_repeated_queries_are_looked_at_as_those_of_their_images(tmp_path):
    given = CONTRASTIVE | {"data": "shapes=60x16", "epochs": 4, "keys": 4}
    run = unitsphere.pretrain("jcl-vanilla", out=tmp_path, positives="repeated", **given)
    (found,) = hardness.measure(run, AnalysisRequest(latest_only=True), images=16, top=8)["checkpoints"]
    assert found["queries"] == 64


def test_norms_that_can_be_neither_grouped_nor_left_are_refused():
    class WithActivation(nn.BatchNorm2d):
        pass

    for norm in (WithActivation(8), nn.BatchNorm2d(8, affine=False)):
        with pytest.raises(UsageError, match=f"{type(norm).__name__} whose statistics"):
            part_batch_norms(nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.BatchNorm2d(8)), 4)


def test_a_pair_of_a_negative_with_itself_is_no_harder_than_it():
    """Or rounding would say how many mixtures are enough."""
    torch.manual_seed(0)
    query, negatives = (normalize(torch.randn(count, 16), dim=1) for count in (256, 8))
    rules = Mixing(hardest=2, pairs=6, with_query=6, distinct=False, until=0.5)
    counts = []
    for kind in (torch.float32, torch.float64):
        given = {"temperature": 0.1, "draw_seed": torch.tensor(7), "rows": torch.arange(256)}
        counts.append((synthesise(query.to(kind), negatives.to(kind), rules, **given).scores > NOTHING).sum(1))
    assert torch.equal(*counts)


def test_an_alpha_beyond_what_the_loss_can_hold_is_refused():
    with pytest.raises(UsageError, match="alpha"):
        resolve(Layer("given", {"method": "moco-v2", "data": "shapes", "alpha": 1e300}))


def test_broken_images_among_the_held_out_do_not_spoil_the_summary(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(30):
        pixels = np.random.default_rng(number).integers(0, 255, (20, 20, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    for name in list(open_images(folder, "val").names)[:2]:
        (folder / name).write_bytes(b"broken")
    given = CONTRASTIVE | {"batch_size": 8, "queue_size": 8, "max_broken": 0.5, "epochs": 1}
    assert unitsphere.pretrain("moco-v2", data=folder, out=tmp_path / "run", **given).checkpoints()


def test_a_dry_run_of_a_network_larger_than_memory_says_what_to_lower(tmp_path, capsys):
    words = ["pretrain", "moco-v2", "--data", "shapes=64x16", "--out", str(tmp_path / "run"), "--device", "cpu"]
    assert main([*words, "--batch-size", "8", "--dim", "1000000000000", "--dry-run"]) == 1
    told = capsys.readouterr().err
    assert "out of memory" in told and "--queue-size" in told and "--debug" not in told
