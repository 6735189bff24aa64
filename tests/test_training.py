"""What can go wrong around the loop, and must not."""

import gc
import json
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import SMALL as SMALL_WORDS
from conftest import command, write_images

import unitsphere
from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.config.layers import Layer
from unitsphere.config.sizing import Facts
from unitsphere.data.source import open_images
from unitsphere.jobs.pretrain import choose_speed
from unitsphere.methods.build import build_learner
from unitsphere.methods.learners.learner import Moment
from unitsphere.methods.resolve import resolve
from unitsphere.optimisation.optimisers import build_optimizer
from unitsphere.runs.checkpoint import restore_training_state, training_state
from unitsphere.runs.run import Run
from unitsphere.training import prepare as prepare_module
from unitsphere.training.loop import Plan
from unitsphere.training.step import PlainStep
from unitsphere.training.telemetry import Diverged
from unitsphere.weights.files import load_tensors, save_tensors

SMALL = {"backbone": "resnet-tiny", "image_size": 16, "batch_size": 16, "queue_size": 64, "bn_groups": 2, "epochs": 2}
SMALL |= {"device": "cpu", "tensorboard": False}


def pictures(count=64, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (count, 20, 18, 3), dtype=np.uint8)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_checkpoint_gives_back_values_and_memory_layouts(optimizer, tmp_path):
    """Fused optimisers refuse a slot whose layout is not its parameter's."""
    config = resolve(Layer("test", {"method": "moco-v2", "data": "shapes", "optimizer": optimizer} | SMALL)).config

    def fresh():
        method = build_learner(config).to(memory_format=torch.channels_last)
        return method, build_optimizer(config, method)

    method, used = fresh()
    inputs = method.inputs(16, Moment(0, 1, 0, 1), torch.Generator())
    PlainStep(method, used)([torch.randn(16, 3, 16, 16) for _ in range(2)], inputs, 0.1)
    save_tensors(tmp_path / "c.safetensors", training_state(method, used), {})
    other, restored = fresh()
    restore_training_state(other, restored, load_tensors(tmp_path / "c.safetensors")[0])
    before, after = training_state(method, used), training_state(other, restored)
    assert before.keys() == after.keys() and len(before) > len(method.state_dict())
    for name in before:
        assert torch.equal(before[name], after[name]), name
        for size, stride, other_stride in zip(
            before[name].shape, before[name].stride(), after[name].stride(), strict=True
        ):
            assert size == 1 or stride == other_stride, name


def test_every_image_is_seen_once_an_epoch_and_a_resume_continues_the_order():
    plan = Plan(images=50, batch_size=8, epochs=3, seed=1)
    batches = [batch.tolist() for batch in plan.batches(0)]
    assert len(batches) == plan.steps == 18
    for epoch in range(3):
        seen = [i for batch in batches[6 * epoch : 6 * epoch + 6] for i in batch]
        assert len(set(seen)) == 48
    for start in (0, 1, 5, 6, 11, 17, 18):
        assert [batch.tolist() for batch in plan.batches(start)] == batches[start:]
        of_ranks = zip(*(plan.batches(start, rank, 4) for rank in range(4)), strict=True)
        assert [torch.cat(parts).tolist() for parts in of_ranks] == batches[start:]


def test_a_resume_on_other_images_is_refused(photos, tmp_path):
    arguments = ["pretrain", "moco-v2", "--data", photos, "--out", tmp_path / "run", *SMALL_WORDS]
    assert command(*arguments, "--epochs", "1").returncode == 0
    write_images(photos / "more", 3, seed=9)
    done = command("pretrain", "--out", tmp_path / "run", "--resume", "--epochs", "2")
    assert done.returncode == 2 and "same images" in done.stderr


def test_a_view_that_changes_its_image_in_place_does_not_reach_the_data(tmp_path):
    def spoil(image):
        view = image[:, :16, :16].float() / 255
        image.zero_()
        return view

    def spare(image):
        return image[:, :16, :16].float() / 255

    losses = []
    for name, views in (("spoil", spoil), ("spare", spare)):
        run = unitsphere.pretrain("moco-v2", data=pictures(), out=tmp_path / name, views=views, **SMALL)
        losses.append([json.loads(line)["loss"] for line in run.metrics_file.read_text().splitlines()])
    assert losses[0] == losses[1]


def test_weights_that_are_lost_are_never_saved(tmp_path):
    run = Run(tmp_path / "run")
    with pytest.raises(UnitsphereError, match="the loss became"):
        unitsphere.pretrain(
            "moco-v2", data=pictures(), out=run.path, **SMALL, lr=1e30, log_every=1000, save_minutes=1e-9
        )
    for _, path in run.checkpoints():
        assert all(tensor.isfinite().all() for tensor in load_tensors(path)[0].values() if tensor.is_floating_point())


def test_what_cannot_work_is_refused_before_a_folder_is_made(tmp_path):
    wrong = {
        "knn_every": (1, "labelled"),
        "backbone": ("resnet19", "Did you mean resnet18"),
        "normalise": ("imagenet", "channels"),
        "nesterov": (True, "momentum"),
        "init": ("nowhere", "init"),
    }
    for name, (value, said) in wrong.items():
        extra = {"channels": 1} if name == "normalise" else {"momentum": 0} if name == "nesterov" else {}
        data = pictures()[..., :1] if name == "normalise" else pictures()
        with pytest.raises(UsageError, match=said):
            unitsphere.pretrain("moco-v2", data=data, out=tmp_path / "run", **(SMALL | {name: value} | extra))
        assert not (tmp_path / "run").exists(), name
    done = command(
        "pretrain", "moco-v2", "--data", "shapes", "--backbone", "resnet19", "--out", tmp_path / "r", "--dry-run"
    )
    assert done.returncode == 2


def test_sizes_follow_the_sizes_that_are_given():
    def sized(**given):
        layer = Layer("test", {"method": "moco-v2", "data": "./photos"} | given)
        resolve(layer)  # nothing is refused before the sizes are known
        return resolve(layer, facts=Facts(2000, 300, True)).config

    assert sized(batch_size=8).bn_groups == 1
    assert sized(warmup_epochs=250).epochs == 400
    small = sized(image_size=32)
    assert (small.stem, small.views) == ("small", "moco-v2-small")
    with pytest.raises(UsageError, match="bn_groups"):
        sized(batch_size=8, bn_groups=8)


def test_the_policy_called_none_can_be_asked_for(photos, tmp_path):
    words = ["--views", "none", "--clip-norm", "none", "--dry-run"]
    done = command("pretrain", "moco-v2", "--data", photos, "--out", tmp_path / "run", *words)
    assert done.returncode == 0 and '"none"' in done.stdout, done.stderr


def test_faint_sixteen_bit_images_keep_their_statistics(tmp_path):
    faint = (1000 + pictures()[..., :1].astype(np.uint16) % 60).astype(np.uint16)
    run = unitsphere.pretrain("moco-v2", data=faint, out=tmp_path / "run", channels=1, depth=16, **SMALL)
    assert run.config.std[0] == pytest.approx(np.std(faint / 65535), rel=0.1)


def test_what_a_kill_left_half_written_is_no_run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".config.json.123.tmp").write_text("{")
    run = unitsphere.pretrain("moco-v2", data=pictures(), out=folder, **SMALL)
    assert not (folder / ".config.json.123.tmp").exists() and run.checkpoints()


def test_a_finished_run_is_left_alone(tmp_path):
    run = unitsphere.pretrain("moco-v2", data=pictures(), out=tmp_path / "run", **SMALL)
    before = (run.path / "results.json").read_text(), run.metrics_file.read_text()
    unitsphere.pretrain(data=pictures(), out=run.path, resume=True)
    assert before == ((run.path / "results.json").read_text(), run.metrics_file.read_text())


def test_a_summary_that_was_cut_short_is_made_up_for(tmp_path):
    """As after a kill between the last checkpoint and the last word."""
    run = unitsphere.pretrain("moco-v2", data=pictures(), out=tmp_path / "run", **SMALL)
    (before,) = run.results()
    (run.path / "results.json").unlink()
    (run.path / "neighbours.png").unlink()
    unitsphere.pretrain(data=pictures(), out=run.path, resume=True)
    (after,) = run.results()
    assert after["value"] == before["value"] and (run.path / "neighbours.png").is_file()
    (run.path / "results.json").write_text("{")
    unitsphere.pretrain(data=pictures(), out=run.path, resume=True)
    assert (run.path / "results.json").read_text() == "{"


class Breaks(torch.nn.Module):
    """A backbone whose gradient is no number in one of its steps: the loss of that step is one."""

    def __init__(self, step):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(48, 8))
        self.step = step

    def forward(self, images):
        features = self.inner(images)
        if features.requires_grad:
            self.step -= 1
            if self.step == 0:
                features.register_hook(lambda gradient: gradient * torch.nan)
        return features


@pytest.mark.parametrize("step", [4, 8])  # of an epoch's last; of the run's last
def test_no_checkpoint_has_weights_that_are_no_numbers(step, tmp_path):
    fields = SMALL | {"backbone": Breaks(step), "bn_groups": 1, "save_every": 1, "holdout": 0.0}
    with pytest.raises(Diverged, match=f"weights became infinite or no numbers by step {step}") as told:
        unitsphere.pretrain("moco-v2", data=pictures(), out=tmp_path / "run", **fields)
    checkpoints = Run(tmp_path / "run").checkpoints()
    assert [at for at, _ in checkpoints] == ([] if step == 4 else [4])
    assert ("no checkpoint yet" if step == 4 else f"{checkpoints[0][1]}") in str(told.value)


def test_a_collapsed_backbone_is_told_at_the_end(tmp_path, capsys):
    from torch import nn

    line = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1))  # all features lie on a line
    fields = SMALL | {"backbone": line, "bn_groups": 1}
    unitsphere.pretrain("moco-v2", data=pictures(), out=tmp_path / "run", **fields)
    said = capsys.readouterr().err
    assert "warning collapsed:" in said and "effective rank 1.0" in said
    assert "untrained" not in said  # the module is the user's, and is trained by now


def test_the_end_compares_with_the_backbone_before_training(photos, tmp_path, capsys):
    """A rate that moves no weight gives twice the same number: of the seed's backbone, or of the weights of init."""
    still = SMALL | {"lr": 1e-30, "weight_decay": 0, "norm": "group", "bn_groups": 1, "holdout": 0.5}

    def retrieval(name, **more):
        run = unitsphere.pretrain("moco-v2", data=photos, out=tmp_path / name, **(still | more))
        (result,) = json.loads((run.path / "results.json").read_text())
        value, began = result["value"], "initial" if "init" in more else "untrained"
        before = value[f"{began}_retrieval"]
        assert f"{value['retrieval']:.1f} % ({began} {before:.1f} %, chance 3.3 %)" in capsys.readouterr().err
        return value["retrieval"], before

    of_seed, before = retrieval("still")
    assert of_seed == before > 0
    trained, before = retrieval("trained", lr=0.3, epochs=5)
    assert before == of_seed != trained
    of_init, before = retrieval("init", init=str(tmp_path / "trained"))
    assert of_init == before == trained


def test_broken_held_out_images_are_named_and_not_counted(photos, tmp_path):
    held_out = open_images(str(photos), "val", holdout=0.1).names
    (photos / held_out[2]).write_bytes(b"no image")
    done = command("pretrain", "moco-v2", "--data", photos, "--out", tmp_path / "run", *SMALL_WORDS, "--epochs", "1")
    assert done.returncode == 0, done.stderr
    assert "1 image could not be read" in done.stderr and held_out[2] in done.stderr
    assert f"On {len(held_out) - 1} held-out images" in done.stderr
    (result,) = json.loads((tmp_path / "run" / "results.json").read_text())
    assert result["images"] == {"held out": len(held_out) - 1}


def test_groups_need_norms_to_group(tmp_path):
    from torch import nn

    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(UsageError, match="--bn-groups 1"):
        unitsphere.pretrain("moco-v2", data=pictures(), out=tmp_path / "run", **(SMALL | {"backbone": net}))


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_run_on_cuda_stops_and_resumes(optimizer, tmp_path):
    fields = SMALL | {"device": "cuda", "optimizer": optimizer, "lr": 1e-3}
    unitsphere.pretrain("moco-v2", data=pictures(), out=tmp_path / "run", **fields)
    run = unitsphere.pretrain(data=pictures(), out=tmp_path / "run", resume=True, epochs=4)
    last = json.loads(run.metrics_file.read_text().splitlines()[-1])
    assert last["epoch"] == 4 and last["memory_mib"] > 0


@pytest.mark.parametrize(
    ("fields", "steps", "custom", "device", "compiled", "recorded"),
    [
        ({"bn_groups": 8}, 3000, False, "cuda", True, True),  # groups gain most
        ({"bn_groups": 1}, 3999, False, "cuda", False, True),
        ({"bn_groups": 1}, 4000, False, "cuda", True, True),
        ({"bn_groups": 8}, 2999, False, "cuda", False, True),
        ({"bn_groups": 8, "compile": False, "record": False}, 9999, False, "cuda", False, False),
        ({"bn_groups": 1, "compile": True}, 1, False, "cuda", True, True),
        ({"bn_groups": 8}, 9999, True, "cuda", False, False),  # who knows what a module of the user's does
        ({"bn_groups": 8}, 9999, False, "cpu", False, False),
    ],
)
def test_time_is_spent_on_compiling_only_where_it_comes_back(fields, steps, custom, device, compiled, recorded):
    config = resolve(Layer("test", {"method": "moco-v2", "data": "cifar10", **fields})).config
    prepared = SimpleNamespace(config=config, device=torch.device(device), precision="bf16")
    assert choose_speed(prepared, steps, custom) == (compiled, recorded)


def test_a_run_does_not_die_of_being_looked_at(tmp_path, monkeypatch, capsys):
    def extract(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(prepare_module, "extract", extract)
    run = unitsphere.pretrain("moco-v2", data="shapes=200", out=tmp_path / "run", knn_every=1, **SMALL)
    assert json.loads(run.metrics_file.read_text().splitlines()[-1])["epoch"] == 2 and run.checkpoints()
    said = capsys.readouterr()
    assert "online k-NN failed: CUDA out of memory" in said.out + said.err


@pytest.mark.gpu
def test_a_second_phase_is_recorded_too(tmp_path):
    """MoCHi's first epoch has no mixtures: another step than that of the others."""
    fields = SMALL | {"device": "cuda", "precision": "fp32", "lr": 1e-3, "epochs": 3}
    fields |= {"mixing_warmup": 1, "hardest": 16, "pairs": 8, "with_query": 4}
    losses = []
    for record in (False, True):
        run = unitsphere.pretrain("mochi", data=pictures(), out=tmp_path / str(record), record=record, **fields)
        losses.append([json.loads(line)["loss"] for line in run.metrics_file.read_text().splitlines()])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_a_run_begins_without_what_an_earlier_one_left(tmp_path):
    """A compiled network and what calls it refer to each other: they lie on the GPU until somebody collects them."""

    class Left:
        def __init__(self):
            self.itself = self

    gone = weakref.ref(Left())
    gc.disable()
    try:
        assert gone() is not None
        unitsphere.pretrain("moco-v2", data=pictures(), out=tmp_path / "run", **SMALL)
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.gpu
def test_many_runs_in_a_process_take_no_more_memory_than_one(tmp_path):
    found = []
    for number in range(4):
        fields = SMALL | {"device": "cuda", "compile": number > 1, "record": True}
        run = unitsphere.pretrain("moco-v2", data=pictures(), out=tmp_path / str(number), **fields)
        gc.collect()
        peak = json.loads(run.metrics_file.read_text().splitlines()[-1])["memory_mib"]
        found.append((peak, torch.cuda.memory_allocated()))
    assert found[1][0] <= found[0][0] + 1 and found[3][0] <= found[2][0] + 1
    assert found[1][1] == found[0][1] and found[3][1] == found[2][1]


def test_no_placeholder_is_left_in_the_documentation():
    for path in ("README.md", "docs/guide.md", "docs/design.md", "docs/speed.md", "CHANGELOG.md"):
        with open(path) as file:
            assert "@@" not in file.read(), path
