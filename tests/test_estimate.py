"""What --dry-run says of memory and hours, against what a step really holds and takes."""

import pytest
import torch
from conftest import SMALL, command

from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.config.layers import Layer
from unitsphere.data import loader
from unitsphere.methods.build import build_learner
from unitsphere.methods.learners import contrastive
from unitsphere.optimisation.optimisers import build_optimizer
from unitsphere.runs.run import Run
from unitsphere.training.estimate import (
    estimate_memory,
    estimate_time,
    inputs_of,
    scaled,
    stays_resident,
    take_sample,
    traced_bytes,
)
from unitsphere.training.prepare import prepare
from unitsphere.training.step import PlainStep

CONTRASTIVE = {
    "data": "shapes=200x16",
    "image_size": 16,
    "batch_size": 16,
    "queue_size": 64,
    "device": "cpu",
    "dim": 16,
}
OTHER = {name: value for name, value in CONTRASTIVE.items() if name != "queue_size"}
METHODS = {
    "moco, symmetric": {**CONTRASTIVE, "method": "moco-v2", "bn_groups": 4, "symmetric": True, "optimizer": "adamw"},
    "simclr": {**OTHER, "method": "simclr"},
    "mochi": {**CONTRASTIVE, "method": "mochi", "bn_groups": 2, "hardest": 8, "pairs": 4, "with_query": 3},
    "byol": {**OTHER, "method": "byol", "hidden": 32, "optimizer": "lars"},
    "supervised": {**OTHER, "method": "supervised", "class_count": 12, "momentum": 0},
}
del METHODS["supervised"]["dim"]


def prepared(tmp_path, fields):
    return prepare(Run(tmp_path / "run"), Layer("test", fields), None, resume=False)


def saved_on_the_way(method, views, inputs):
    """Bytes of the distinct memory that autograd keeps of a real forward pass, without weights and views. The oracle
    tells memory apart by its address, and holds on to it all, so that no address comes twice."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*method.parameters(), *method.buffers(), *views)}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor.detach()

    with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        patch.setattr(contrastive, "signs_of_health", lambda *_, **__: {})  # its graph is gone when the step is there
        method(views, inputs)
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in known)


@pytest.mark.parametrize("name", METHODS)
def test_activations_are_those_of_a_real_step_of_the_whole_batch(name, tmp_path):
    config = scaled(prepared(tmp_path, METHODS[name]).config, 16)
    method = build_learner(config)
    views = [torch.randn(16, 3, 16, 16) for _ in range(method.views)]
    found = traced_bytes(config, method, "fp32")
    assert found == saved_on_the_way(method, views, inputs_of(config, method))


@pytest.mark.parametrize("name", METHODS)
def test_what_stays_is_counted_as_it_is(name, tmp_path):
    ready = prepared(tmp_path, METHODS[name])
    memory = estimate_memory(ready, take_sample(ready))
    method = build_learner(ready.config)
    optimizer = build_optimizer(ready.config, method)
    views = [torch.randn(16, 3, 16, 16) for _ in range(method.views)]
    PlainStep(method, optimizer)(views, inputs_of(ready.config, method), 0.1)

    def count(tensors):
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    slots = [slot for each in optimizer.state.values() for slot in each.values() if torch.is_tensor(slot)]
    assert memory.get("optimiser", 0) == count(slot for slot in slots if slot.dim())
    assert memory["gradients"] == count(p.grad for p in method.parameters() if p.grad is not None)
    assert memory["weights"] + memory.get("slow copy", 0) == count(method.parameters())
    assert memory["views"] == count(views)
    assert memory["images"] == 200 * 16 * 16 * 3
    if "queue" in memory:
        assert memory["queue"] == 64 * 16 * 4 + 8  # float32 keys, and how many have entered


def test_memory_follows_batch_parts_ranks_and_precision(tmp_path):
    def activations(ranks=1, precision="fp32", **more):
        ready = prepared(tmp_path, METHODS["moco, symmetric"] | {"batch_size": 64} | more)
        ready.precision = precision
        return estimate_memory(ready, take_sample(ready), ranks)["activations"]

    whole = activations()
    # all but the scores of a few queries for the signs of health grows with the batch
    for half in (activations(batch_size=32, bn_groups=2), activations(accumulate=2), activations(ranks=2)):
        assert half == pytest.approx(whole / 2, rel=0.01)
    assert activations(precision="bf16") < 0.7 * whole


JCL = CONTRASTIVE | {"method": "jcl", "keys": 3, "bn_groups": 4}


@pytest.mark.parametrize(
    ("fields", "copied"),
    [
        (JCL, 12),
        (JCL | {"key_chunks": 1}, 48),
        (JCL | {"key_chunks": 2}, 24),
        (JCL | {"bn_groups": 1, "key_chunks": 4}, 12),
        (METHODS["mochi"], 16),
        (METHODS["moco, symmetric"], 64),
        (METHODS["mochi"] | {"bn_groups": 1}, 0),
        (METHODS["byol"], 0),
        (METHODS["simclr"], 0),
    ],
)
def test_copies_of_the_images_of_a_pass_of_keys_are_counted(fields, copied, tmp_path):
    ready = prepared(tmp_path, fields)
    sample = take_sample(ready)
    assert estimate_memory(ready, sample).get("copies of key views", 0) == copied * 3 * 16 * 16 * 4
    if "key_chunks" in fields:
        assert scaled(ready.config, 2).key_chunks is None  # few images have fewer groups
    if fields is JCL:
        assert estimate_memory(ready, sample, 2)["copies of key views"] == 24 * 3 * 16 * 16 * 4


def test_images_that_stream_take_no_memory(tmp_path):
    ready = prepared(tmp_path, METHODS["simclr"] | {"resident": False})
    sample = take_sample(ready)
    assert not stays_resident(ready, sample) and "images" not in estimate_memory(ready, sample)
    assert sample.nbytes == 16 * 16 * 3 and len(sample.canvas) == 32


def test_images_stay_where_the_loader_would_keep_them(tmp_path, monkeypatch):
    ready = prepared(tmp_path, METHODS["simclr"])
    sample = take_sample(ready)
    for free, stay in ((5 * 200 * 16 * 16 * 3, True), (3 * 200 * 16 * 16 * 3, False)):  # a quarter may be taken
        monkeypatch.setattr(loader, "free_memory", lambda device, free=free: free)
        assert stays_resident(ready, sample) is stay is loader.Loader(ready.images).resident


def test_hours_are_the_steps_times_what_one_takes(tmp_path):
    ready = prepared(tmp_path, METHODS["moco, symmetric"] | {"epochs": 10})
    sample = take_sample(ready)
    found = estimate_time(ready, sample)
    assert found.images == 16 and found.reserved is None  # the whole batch takes no half second
    assert 0 < found.seconds < 5 and found.step == found.seconds
    reading = found.decoding / 16 * 200
    assert found.hours == pytest.approx((120 * found.step + reading) / 3600)  # 200 images in 16s are 12 steps an epoch
    longer = estimate_time(prepared(tmp_path, METHODS["moco, symmetric"] | {"epochs": 1000}), sample)
    assert 10 < longer.hours / found.hours < 1000  # a hundred times as long, measured twice on a busy machine


def test_what_cannot_be_traced_or_cannot_be_done_is_said(tmp_path):
    ready = prepared(tmp_path, METHODS["moco, symmetric"])
    method = build_learner(ready.config)
    method.online.register_forward_hook(lambda module, given, out: out * float(out.detach().sum()))  # reads content
    with pytest.raises(UnitsphereError, match="cannot be traced"):
        traced_bytes(ready.config, method, "fp32")
    ready = prepared(tmp_path, METHODS["byol"] | {"accumulate": 2})
    with pytest.raises(UsageError, match="accumulate"):
        estimate_memory(ready, take_sample(ready))


def test_a_dry_run_tells_memory_and_time_and_leaves_nothing(tmp_path):
    words = ["pretrain", "moco-v2", "--data", "shapes=200x16", *SMALL, "--epochs", "2", "--out", tmp_path / "run"]
    done = command(*words, "--dry-run")
    assert done.returncode == 0, done.stderr
    for part in ("memory: about", "activations", "slow copy", "queue", "time: about", "24 steps", "of 16 images"):
        assert part in done.stdout
    assert not list(tmp_path.iterdir())
