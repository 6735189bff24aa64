"""The Python calls: the same runs as the command, and data, views and backbones given as objects."""

import json
import runpy
import sys

import numpy as np
import pytest
import torch
from conftest import command
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from torchvision.transforms import v2

import unitsphere
from unitsphere.analysis.analyse import analyse
from unitsphere.common.errors import UsageError
from unitsphere.features.extract import extract
from unitsphere.runs.run import Run
from unitsphere.weights.files import load_tensors

SMALL = {"backbone": "resnet-tiny", "image_size": 16, "batch_size": 16, "queue_size": 64, "bn_groups": 2, "epochs": 2}
SMALL |= {"device": "cpu", "tensorboard": False}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pictures(count=64, channels=3, seed=0, dtype=np.uint8):
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, (count, 20, 18, channels), dtype=dtype)


class Pairs(Dataset):
    """Images with a label."""

    def __init__(self, arrays):
        self.arrays = arrays

    def __len__(self):
        return len(self.arrays)

    def __getitem__(self, index):
        return Image.fromarray(self.arrays[index]), index % 2


def losses(run):
    return [json.loads(line)["loss"] for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def test_the_call_and_the_command_are_the_same_thing(photos, tmp_path):
    run = unitsphere.pretrain("moco-v2", data=photos, out=tmp_path / "call", **SMALL)
    words = [w for name, value in SMALL.items() for w in (f"--{name.replace('_', '-')}", str(value).lower())]
    assert command("pretrain", "moco-v2", "--data", photos, "--out", tmp_path / "command", *words).returncode == 0
    assert losses(run) == losses(Run(tmp_path / "command"))
    assert run.config == Run(tmp_path / "command").config


def test_an_item_that_raises_is_a_broken_image(tmp_path):
    class Corrupt(Pairs):
        def __getitem__(self, index):
            if index == 37:
                raise ValueError("corrupt record")
            return super().__getitem__(index)

    with pytest.raises(unitsphere.UnitsphereError, match=r"37.*ValueError: corrupt record"):
        unitsphere.pretrain("moco-v2", data=Corrupt(pictures()), out=tmp_path / "strict", max_broken=0, **SMALL)
    run = unitsphere.pretrain("moco-v2", data=Corrupt(pictures()), out=tmp_path / "run", max_broken=0.1, **SMALL)
    assert len(losses(run)) == 2


def test_custom_views_must_be_given_each_time(photos, tmp_path):
    words = ["--data", photos, "--out", tmp_path / "run", "--views", "custom"]
    done = command("pretrain", "moco-v2", *words, "--device", "cpu")
    assert done.returncode == 2 and "unitsphere.pretrain(views=...)" in done.stderr
    assert not (tmp_path / "run").exists()

    def view(image):
        return image[:, :16, :16] / 255

    unitsphere.pretrain("moco-v2", data=photos, out=tmp_path / "run", views=view, **SMALL)
    with pytest.raises(UsageError, match="views: custom views"):
        unitsphere.pretrain(out=tmp_path / "run", resume=True, epochs=3)
    unitsphere.pretrain(out=tmp_path / "run", resume=True, epochs=3, views=view)


def test_arrays_tensors_and_datasets_give_the_same_run(tmp_path):
    arrays = pictures()
    sources = {"array": arrays, "tensor": torch.from_numpy(arrays).permute(0, 3, 1, 2), "dataset": Pairs(arrays)}
    runs = [unitsphere.pretrain("moco-v2", data=data, out=tmp_path / name, **SMALL) for name, data in sources.items()]
    assert losses(runs[0]) == losses(runs[1]) == losses(runs[2])
    with pytest.raises(UsageError, match="given from Python"):
        unitsphere.pretrain(out=tmp_path / "array", resume=True, epochs=3)
    unitsphere.pretrain(data=arrays, out=tmp_path / "array", resume=True, epochs=3)
    assert json.loads((tmp_path / "array" / "metrics.jsonl").read_text().splitlines()[-1])["epoch"] == 3


@pytest.mark.parametrize(("channels", "depth", "dtype"), [(1, 8, np.uint8), (5, 8, np.uint8), (2, 16, np.uint16)])
def test_other_channels_and_sixteen_bits_are_taken(channels, depth, dtype, tmp_path):
    data = pictures(channels=channels, dtype=dtype)
    run = unitsphere.pretrain("moco-v2", data=data, out=tmp_path / "run", channels=channels, depth=depth, **SMALL)
    assert len(run.config.mean) == channels
    assert unitsphere.embed(run, data=data).features.shape == (64, 64)


def test_views_may_be_a_function_and_stay_reproducible(tmp_path):
    transform = v2.Compose([v2.RandomResizedCrop(16), v2.ToDtype(torch.float32, scale=True)])
    runs = [unitsphere.pretrain("moco-v2", data=pictures(), out=tmp_path / n, views=transform, **SMALL) for n in "ab"]
    assert losses(runs[0]) == losses(runs[1])
    assert runs[0].config.views == "custom"


@pytest.mark.parametrize("wrong", [lambda im: im, lambda im: im[:, :8, :8].float(), lambda im: im.numpy()])
def test_a_function_that_gives_no_views_is_refused_before_anything_is_written(wrong, tmp_path):
    with pytest.raises(UsageError, match=r"views: .* floating-point tensor \(3, 16, 16\)"):
        unitsphere.pretrain("moco-v2", data=pictures(), out=tmp_path / "run", views=wrong, **SMALL)
    assert not (tmp_path / "run" / "config.json").exists()
    unitsphere.pretrain("moco-v2", data=pictures(), out=tmp_path / "run", **SMALL)


def test_the_package_shows_its_calls_and_errors_and_nothing_else():
    assert dir(unitsphere) == sorted(unitsphere.__all__)
    assert {"pretrain", "evaluate", "embed", "analyse", "load_backbone", "load_transform"} <= set(dir(unitsphere))
    assert all(getattr(unitsphere, name) is not None for name in dir(unitsphere))


def test_an_existing_run_is_refused_in_words_for_python_too(trained):
    with pytest.raises(UsageError, match="resume=True"):
        unitsphere.pretrain("moco-v2", data=pictures(), out=trained.path, **SMALL)


def test_a_backbone_may_be_a_module_and_is_filled_again(tmp_path):
    def net():
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    trained = net()
    run = unitsphere.pretrain("moco-v2", data=pictures(), out=tmp_path / "run", **(SMALL | {"backbone": trained}))
    filled = unitsphere.load_backbone(run, into=net())
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(filled(x), trained.eval()(x))
    with pytest.raises(UsageError, match="into=module"):
        unitsphere.load_backbone(run)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return unitsphere.pretrain("moco-v2", data=pictures(), out=tmp_path_factory.mktemp("api") / "run", **SMALL)


def test_a_loaded_backbone_with_its_transform_gives_the_embedded_features(trained, tmp_path):
    backbone, transform = unitsphere.load_backbone(trained), unitsphere.load_transform(trained)
    assert not backbone.training
    found = unitsphere.embed(trained, data=pictures(), batch_size=7, device="cpu")
    one = backbone(transform.image(pictures()[5])[None])
    torch.testing.assert_close(one[0].detach(), found.features[5], rtol=1e-4, atol=1e-5)
    Image.fromarray(pictures()[5]).save(tmp_path / "5.png")
    torch.testing.assert_close(transform.image(tmp_path / "5.png"), transform.image(pictures()[5]))


def test_init_starts_from_a_run_a_checkpoint_or_a_file(trained, tmp_path):
    weights = unitsphere.load_backbone(trained).state_dict()
    torch.save(
        {"state_dict": {f"module.encoder.{k}": v for k, v in weights.items()} | {"fc.bias": torch.ones(3)}},
        tmp_path / "w.pth",
    )
    checkpoint = trained.checkpoints()[-1][1]
    slow = SMALL | {"epochs": 1, "lr": 1e-12, "key_momentum": 1.0}
    for number, init in enumerate((trained.path, checkpoint, tmp_path / "w.pth")):
        run = unitsphere.pretrain(
            "moco-v2", data=pictures(), out=tmp_path / str(number), init=str(init), seed=1, **slow
        )
        tensors, _ = run.latest()
        torch.testing.assert_close(tensors["method.online.backbone.stem.0.weight"], weights["stem.0.weight"])
        torch.testing.assert_close(tensors["method.slow.backbone.stem.0.weight"], weights["stem.0.weight"])
    layers = slow | {"norm": "layer", "bn_groups": 1}
    with pytest.raises(UsageError, match=r"it has \d+ batch norms \(.*\) where the backbone has another norm"):
        unitsphere.pretrain("moco-v2", data=pictures(), out=tmp_path / "w", init=str(trained.path), **layers)
    torch.save({"other": torch.ones(3)}, tmp_path / "wrong.pth")
    with pytest.raises(UsageError, match="does not fit"):
        unitsphere.pretrain("moco-v2", data=pictures(), out=tmp_path / "w", init=str(tmp_path / "wrong.pth"), **slow)
    assert not (tmp_path / "w").exists()


def test_a_file_that_would_unpickle_is_refused(tmp_path):
    torch.save({"state_dict": Image.new("RGB", (2, 2))}, tmp_path / "evil.pth")
    with pytest.raises(UsageError, match="no plain weights"):
        unitsphere.evaluate(tmp_path / "evil.pth", protocol="knn", data="shapes=100")


def test_evaluation_takes_a_module_and_raw_pixels(labelled):
    flat = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
    for what in (flat, "pixels"):
        value = unitsphere.evaluate(what, protocol="knn", data=str(labelled), k=[3], image_size=16)["value"]
        assert value["k=3"] > 90  # red against blue


def test_training_leaves_the_evaluated_backbone_as_it_is(trained):
    """The backbone that is loaded is the one that was trained: features from the checkpoint by hand agree."""
    from unitsphere.data.loader import Loader
    from unitsphere.data.source import open_images
    from unitsphere.methods.build import build_learner

    tensors, meta = trained.latest()
    method = build_learner(trained.config)
    method.load_state_dict({k.removeprefix("method."): v for k, v in tensors.items() if k.startswith("method.")})
    loader = Loader(open_images(pictures(), holdout=0.0))
    by_hand = extract(method.backbone, loader, unitsphere.load_transform(trained))
    torch.testing.assert_close(
        by_hand, unitsphere.embed(trained, data=pictures(), device="cpu").features, rtol=1e-4, atol=1e-5
    )
    assert meta["epoch"] == 2


def test_the_epoch_before_the_first_step_can_be_kept_looked_at_and_resumed(tmp_path):
    settings = SMALL | {"data": "shapes=128x16", "batch_size": 32}
    run = unitsphere.pretrain("moco-v2", out=tmp_path / "run", keep_epochs=[0], **settings)
    (first, path), (last, latest) = run.checkpoints()
    assert (first, load_tensors(path)[1]["epoch"], last) == (0, 0, 8)
    numbers, _ = analyse([run], "hardness", out=tmp_path, device="cpu", images=32)
    before, after = json.loads(numbers.read_text())["runs"][0]["checkpoints"]
    assert (before["epoch"], after["epoch"]) == (0, 2)
    assert after.keys() - before.keys() == {"false_negatives", "chance"}  # no key in the queue is of a class yet
    finished = load_tensors(latest)[0]
    latest.unlink()
    again = unitsphere.pretrain("moco-v2", out=tmp_path / "run", resume=True, **settings)
    assert again.checkpoints()[-1][0] == 8
    resumed = load_tensors(again.checkpoints()[-1][1])[0]
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in finished.items())


def test_keep_epochs_and_keep_last_decide_which_checkpoints_stay(tmp_path):
    run = unitsphere.pretrain(
        "moco-v2",
        data=pictures(),
        out=tmp_path / "run",
        **(SMALL | {"epochs": 6}),
        save_every=1,
        keep_last=2,
        keep_epochs=[2],
    )
    per_epoch = 57 // 16  # 64 less a tenth held out
    assert [step // per_epoch for step, _ in run.checkpoints()] == [2, 5, 6]


def test_the_readmes_own_loop_runs(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["own_loop.py", "20"])
    runpy.run_path("examples/own_loop.py", run_name="__main__")
    assert "step 20: loss" in capsys.readouterr().out


def test_the_readme_shows_the_example_as_it_is():
    with open("README.md") as readme, open("examples/own_loop.py") as example:
        code = example.read().split('"""', 2)[2].strip()
        assert code in readme.read()
