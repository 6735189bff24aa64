"""Analyses of real runs, from Python and by the command."""

from __future__ import annotations

import json
import math
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_images, write_labelled
from PIL import Image

import unitsphere
from unitsphere.analysis.analyse import analyse
from unitsphere.analysis.replay import Replay, Snapshot
from unitsphere.analysis.request import AnalysisRequest
from unitsphere.cli import main
from unitsphere.common.errors import UsageError
from unitsphere.methods.learners.health import signs_of_health
from unitsphere.objectives.geometry import uniformity
from unitsphere.runs.run import Run
from unitsphere.training.make_views import make_views_of

SMALL = {"backbone": "resnet-tiny", "image_size": 16, "batch_size": 16, "queue_size": 64, "bn_groups": 1, "dim": 16}
SMALL |= {"device": "cpu", "tensorboard": False, "epochs": 2, "keep_epochs": [1, 2], "log_every": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    torch.set_num_threads(1)
    return unitsphere.pretrain("moco-v2", data="shapes=200x16", out=tmp_path_factory.mktemp("moco") / "moco", **SMALL)


@pytest.fixture(scope="module")
def simclr(tmp_path_factory) -> Run:
    torch.set_num_threads(1)
    settings = SMALL | {"epochs": 1, "warmup_epochs": 0}
    return unitsphere.pretrain(
        "simclr", data="shapes=200x16", out=tmp_path_factory.mktemp("simclr") / "other", **settings
    )


def results(runs, what: str, out: Path, **options) -> list[dict]:
    numbers, picture = analyse(runs, what, out=out, device="cpu", **options)
    with Image.open(picture) as image:
        assert min(image.size) > 300
        assert np.asarray(image.convert("L")).std() > 5  # something is drawn
    found = json.loads(numbers.read_text())
    assert found["analysis"] == what
    return found["runs"]


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_images_of_the_queue_follow_from_the_step(symmetric, tmp_path):
    """With a slow copy that never moves, the key of an image in the views of its step can be made again."""
    settings = SMALL | {
        "queue_size": 50,
        "key_momentum": 1.0,
        "symmetric": symmetric,
        "epochs": 1,
    }  # no multiple of a batch
    run = unitsphere.pretrain("moco-v2", data="shapes=100x16", out=tmp_path / "run", **settings)
    replay = Replay(run, AnalysisRequest(), 64)
    snapshot = Snapshot.of(run.checkpoints()[-1][1], torch.device("cpu"))
    owners, queue = replay.queue_images(snapshot), snapshot.method.queue.keys
    make_views = make_views_of(run.config, 2, None)
    matched = torch.zeros(50, dtype=torch.bool)
    first = snapshot.step - 4
    loader, batches = replay.prepared.loader(replay.prepared.images), replay.prepared.plan.batches(first)
    for step, (images, canvas) in enumerate(loader.batches(islice(batches, 4))):
        with torch.no_grad():
            keys = [snapshot.method.slow(view) for view in make_views(canvas, "views", first + step)]
        for key in keys if symmetric else keys[1:]:
            # sums in another order: float32 of vectors of length 1
            same = ((key[:, None] - queue).abs().amax(2) < 1e-5) & (images[:, None] == owners)
            matched |= same.any(0)
    assert matched.all()


def test_images_that_are_not_those_of_the_training_are_not_taken_for_them(run):
    replay = Replay(run, AnalysisRequest(data="shapes=150x16"), 32)
    assert replay.queue_images(Snapshot.of(run.checkpoints()[-1][1], torch.device("cpu"))) is None


def test_a_rehearsed_step_is_the_next_step_of_training(run):
    replay = Replay(run, AnalysisRequest(), 16)
    step, path = run.checkpoints()[0]
    views = make_views_of(run.config, 2, None)
    prepared = replay.prepared
    (replay.chosen,) = islice(prepared.plan.batches(step), 1)
    replay.loader = prepared.loader(prepared.images.subset(replay.chosen.numpy()))
    replay.make_views = lambda canvas, purpose, number: views(canvas, "views", step)
    snapshot = Snapshot.of(path, torch.device("cpu"))
    ((_, comparison),) = replay.comparisons(snapshot)
    found = signs_of_health(comparison, temperature=snapshot.method.loss.temperature)
    (line,) = (each for each in map(json.loads, run.metrics_file.open()) if each["step"] == step + 1)
    for name in ("positive_similarity", "mutual_information_bound", "gradient_norm", "gradient_norm_bound"):
        assert found[name].item() == pytest.approx(line[name], abs=2e-5), name  # logged with six digits


def test_rehearsing_moves_nothing(run):
    snapshot = Snapshot.of(run.checkpoints()[-1][1], torch.device("cpu"))
    replay = Replay(run, AnalysisRequest(), 48)
    list(islice(replay.comparisons(snapshot), 1))  # makes the move of the next step
    before = {name: tensor.clone() for name, tensor in snapshot.method.named_parameters()}
    queue = snapshot.method.queue.keys.clone()
    assert len(list(replay.comparisons(snapshot))) == 3
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot.method.named_parameters())
    assert torch.equal(queue, snapshot.method.queue.keys)


@pytest.mark.parametrize("features", ["backbone", "embedding"])
def test_similarity_of_several_runs(run, simclr, tmp_path, features):
    options = {"images": 50, "augmentations": 5, "features": features, "batch_size": 20}
    found = results([run, simclr], "similarity", tmp_path, **options)
    assert [each["name"] for each in found] == ["moco", "other"]
    for each in found:
        assert each["images"] == sum(each["similarity"]["counts"]) == sum(each["variance"]["counts"]) == 50
        assert each["variance"]["mean"] == pytest.approx((1 - each["similarity"]["mean"]) / each["dim"], rel=1e-4)
        assert 1 / 5 < each["similarity"]["mean"] < 1
    again = results([run], "similarity", tmp_path / "again", names=["a"], **options)
    assert again[0]["name"] == "a"
    assert again[0]["similarity"] == found[0]["similarity"]


@pytest.mark.parametrize("features", ["backbone", "embedding"])
def test_similarity_is_numpys_of_the_features_of_the_same_augmentations(run, tmp_path, features):
    """Each pair of an image's five augmentations, and numpy's covariance of them; in batches of 12, 12 and 6 images."""
    options = {"images": 30, "augmentations": 5, "features": features, "batch_size": 12}
    (found,) = results([run], "similarity", tmp_path, **options)
    ask = AnalysisRequest(batch_size=12)
    judged, make = ask.backbone(run, run.checkpoints()[-1][1], features), ask.views(run.config, 2)
    backbone, cosines, variances = judged.loaded.backbone.eval(), [], []
    loader = judged.open(ask.images(run, "train", 30)).loader
    for batch, (_, canvas) in enumerate(loader.batches(torch.arange(30).split(12))):
        # every call makes two views; every batch has numbers of its own, one for each augmentation
        views = [view for call in range(3) for view in make(canvas, "analysis-similarity", 5 * batch + call)][:5]
        with torch.no_grad():
            augmented = np.stack([backbone(view).double().numpy() for view in views], 1)
        for z in augmented / np.linalg.norm(augmented, axis=2, keepdims=True):  # (5, D) of one image
            cosines.append(np.mean([a @ b for a in z for b in z]))
            variances.append(np.diag(np.cov(z, rowvar=False, bias=True)).mean())
    for name, values in (("similarity", cosines), ("variance", variances)):
        told = found[name]
        # told with six digits, of features in float32
        assert told["mean"] == pytest.approx(np.mean(values), rel=1e-5)
        assert told["deviation"] == pytest.approx(np.std(values), rel=1e-4)
        quantiles = np.quantile(values, [0.05, 0.5, 0.95])
        assert [told[q] for q in ("q05", "median", "q95")] == pytest.approx(quantiles, rel=1e-5)


def test_gradient_over_k_on_all_checkpoints(run, tmp_path):
    (found,) = results([run], "gradient", tmp_path, images=64, negatives=[4, 16, 64])
    assert [each["epoch"] for each in found["checkpoints"]] == [1, 2]
    for checkpoint in found["checkpoints"]:
        assert checkpoint["queries"] == 64
        plain, eqco = checkpoint["plain"], checkpoint["eqco"]
        # the whole queue with alpha its size, but for the few queries whose own key is left out
        assert plain[-1]["gradient_norm"] == pytest.approx(eqco[-1]["gradient_norm"], rel=0.02)
        for row in (*plain, *eqco):
            assert row["gradient_norm"] <= row["gradient_norm_bound"] + 1e-6
            assert row["mutual_information_bound"] == pytest.approx(math.log1p(row["alpha"]) - row["loss"], abs=0.02)
        assert len({row["gradient_norm_bound"] for row in eqco}) == 1


def test_hardness_with_false_negatives_and_mixing(run, tmp_path):
    (found,) = results([run], "hardness", tmp_path, images=64, top=16, mixing=[8, 20, 5])
    for checkpoint in found["checkpoints"]:
        assert len(checkpoint["matching"]) == 16 and checkpoint["negatives"] == 64
        assert checkpoint["matching"] == sorted(checkpoint["matching"], reverse=True)
        assert sum(checkpoint["matching"]) < 1
        assert 0 <= checkpoint["proxy_synthetic"] <= checkpoint["proxy"] <= 100
        assert checkpoint["both_false"] <= checkpoint["one_false"]
        assert checkpoint["chance"] == pytest.approx(100 / 12, abs=4)  # of twelve shapes, in 64 keys


def test_kinds_that_are_not_mixed_have_no_highest_score(run, tmp_path):
    (found,) = results([run], "hardness", tmp_path, images=64, top=16, mixing=[8, 20, 0])
    for checkpoint in found["checkpoints"]:
        assert "highest_pair" in checkpoint and "highest_with_query" not in checkpoint


def test_hardness_of_negatives_in_the_batch(simclr, tmp_path):
    (found,) = results([simclr], "hardness", tmp_path, images=32, top=1024)
    (checkpoint,) = found["checkpoints"]
    assert checkpoint["negatives"] == checkpoint["top"] == 32  # both views of 16 images
    assert len(checkpoint["matching"]) == 30 and min(checkpoint["matching"]) > 0  # the image's own are no negatives


def test_geometry_is_that_of_the_embedded_images(run, tmp_path):
    (found,) = results([run], "geometry", tmp_path, split="train")
    images = unitsphere.embed(run, data="shapes=200x16", split="train", device="cpu")
    labels = unitsphere.data.source.open_images("shapes=200x16", "train").labels
    x = torch.nn.functional.normalize(images.features.double(), dim=1)
    squares = torch.cdist(x, x).square()
    same = (torch.tensor(labels)[:, None] == torch.tensor(labels)).fill_diagonal_(False)
    last = found["checkpoints"][-1]
    assert last["images"] == len(labels)
    assert last["alignment"] == pytest.approx(squares[same].mean().item(), rel=1e-4)
    assert last["uniformity"] == pytest.approx(uniformity(x).item(), rel=1e-4)


def test_geometry_of_two_views_needs_no_labels(run, photos, tmp_path):
    (found,) = results([run], "geometry", tmp_path, data=photos, positives="views", split="train")
    assert 0 < found["checkpoints"][-1]["alignment"] < 4
    with pytest.raises(UsageError, match="--positives views"):
        analyse([run], "geometry", data=photos, out=tmp_path)


def test_training_and_tsne(run, simclr, tmp_path):
    first, second = results([run, simclr], "training", tmp_path)
    assert first["curves"]["gradient_norm"]["epochs"] == [1, 2] and second["epoch"] == 1
    (picture,) = results([], "tsne", tmp_path, points=120, mixing=[20, 10, 5])
    assert {kind: len(places) for kind, places in picture["places"].items()} == {
        "negatives": 100, "hardest": 20, "pairs": 10, "with the query": 5, "query": 1,
    }  # fmt: skip


def test_the_command_writes_into_the_run_and_says_where(run, capsys):
    assert main(["analyse", str(run.path), "--what", "training", "--format", "svg", "--names", "(64, 16, 8)"]) == 0
    assert "(64, 16, 8)" in (run.path / "analysis" / "training.svg").read_text()
    assert "training.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--what gradient --augmentations 3",
            "augmentations: gradient has no such setting; it takes images, negatives",
        ),
        ("--what gradient --negatives 16,128", "with a queue of 64, 1 to 64 are allowed"),
        ("--what gradient --alpha 0", "alpha: given 0"),
        ("--what hardness --mixing 8,8", "three numbers"),
        ("--what similarity --augmentations 1", "at least 2"),
        ("--what similarity --images 1", "at least 2"),
        ("--what similarity --batch-size 0", "batch_size: given 0"),
        ("--what tsne", "takes no run"),
        ("--what training --names a,b", "names: given 2 for 1 runs"),
    ],
)
def test_what_cannot_be_is_refused(run, capsys, words, said):
    assert main(["analyse", str(run.path), *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_runs_without_what_an_analysis_needs_are_refused(run, simclr, tmp_path, capsys, monkeypatch):
    assert main(["analyse", str(simclr.path), "--what", "gradient"]) == 2
    assert "has no queue" in capsys.readouterr().err
    assert main(["analyse", str(run.path), str(simclr.path), "--what", "training"]) == 2
    assert "--out DIR" in capsys.readouterr().err
    assert main(["analyse", str(tmp_path), "--what", "training"]) == 2
    assert "is not a run" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["analyse", str(run.path), "--what", "training"]) == 2
    assert "pip install -e '.[plots]'" in capsys.readouterr().err


def test_a_run_on_data_from_python_asks_for_it_again(tmp_path):
    images = np.stack([np.asarray(Image.open(path)) for path in write_images(tmp_path / "photos", 40)])
    run = unitsphere.pretrain("moco-v2", data=images, out=tmp_path / "run", **(SMALL | {"epochs": 1}))
    with pytest.raises(UsageError, match="given from Python"):
        analyse([run], "similarity")
    (found,) = results([run], "similarity", tmp_path / "out", data=images, augmentations=2)
    assert found["images"] == 36  # a tenth is held out


def test_data_that_was_moved_is_divided_as_the_run_divided_it(tmp_path):
    data = write_labelled(tmp_path / "here")
    write_images(data / "grey", 30)
    fields = SMALL | {"epochs": 1, "holdout": 0.3, "classes": ["red", "blue"], "fraction": 0.5}
    run = unitsphere.pretrain("moco-v2", data=data, out=tmp_path / "run", **fields)
    before = {split: list(AnalysisRequest().images(run, split).names) for split in ("train", "val")}
    data.rename(tmp_path / "there")
    for split in ("train", "val"):
        moved = AnalysisRequest(tmp_path / "there").images(run, split)
        assert moved.names == before[split] and moved.classes == ("red", "blue")
    assert len(before["train"]) == 28 and len(before["val"]) == 12  # half of seven and of three tenths of 80
