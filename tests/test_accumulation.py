"""A step computed in parts is the step: loss, gradient, statistics, memory and weights after several steps."""

import pytest
import torch
from test_ranks import MIXED, N, on_two_ranks, small_for
from torch import nn

from unitsphere.common.distributed import average, averaging_gradients, gather, mine
from unitsphere.common.errors import UsageError
from unitsphere.common.randomness import generator
from unitsphere.config.layers import Layer
from unitsphere.methods.build import build_learner
from unitsphere.methods.learners.learner import Moment
from unitsphere.methods.resolve import resolve
from unitsphere.modules.norms import groups_of
from unitsphere.optimisation.optimisers import build_optimizer
from unitsphere.training.estimate import saved_bytes
from unitsphere.training.step import PlainStep

STEPS = 3
LAYER = {"norm": "layer", "bn_groups": 1}
METHODS = {
    "moco, groups": {"method": "moco-v2", "bn_groups": 4},
    "moco, as many groups as parts, symmetric": {"method": "moco-v2", "bn_groups": 2, "symmetric": True},
    "moco, symmetric, momentum on its way": {
        "method": "moco-v2", "bn_groups": 4, "symmetric": True, "momentum_schedule": "cosine",
    },
    "moco, layer norm": {"method": "moco-v2", **LAYER},
    "eqco, drawn": {"method": "eqco", "negatives": 6, "alpha": 100, "bn_groups": 2},
    "jcl": {"method": "jcl", "keys": 3, "bn_groups": 4},
    "jcl, each, layer norm": {"method": "jcl-vanilla", "keys": 3, **LAYER},
    "jcl, repeated": {"method": "jcl", "keys": 2, "bn_groups": 4, "positives": "repeated"},
    "mochi": {"method": "mochi", "mixing_warmup": 0, "bn_groups": 2, **MIXED},
    "oracle, symmetric": {"method": "moco-v2", "oracle": True, "bn_groups": 2, "symmetric": True},
    "a random force": {"method": "moco-v2", "bn_groups": 2, "brownian_weight": 0.5},
    "byol, layer norm": {"method": "byol", "hidden": 32, "optimizer": "sgd", "norm": "layer", "head_norm": "layer"},
    "byol, groups": {"method": "byol", "hidden": 32, "bn_groups": 4},
    "msbreg, a force for each view": {
        "method": "msbreg", "hidden": 32, "bn_groups": 2, "singular_weight": 0, "view_count": 3,
        "brownian_per_view": True,
    },
    "supervised": {"method": "supervised", "class_count": 3, "bn_groups": 4, "clip_norm": 0.5},
}  # fmt: skip


def configured(fields, **more):
    return resolve(Layer("test", small_for(fields["method"]) | fields | more)).config


def parts_of(fields):
    config = configured(fields)
    method = build_learner(config)
    smoothen(method)
    if config.accumulate > 1:
        method.split(config.accumulate)
    return config, method


def smoothen(module):
    """Where a ReLU has its kink, rounding would decide about whole gradients."""
    for name, child in module.named_children():
        if isinstance(child, nn.ReLU):
            setattr(module, name, nn.GELU())
        smoothen(child)


def batch(method, number):
    """This rank's share of the views and inputs of a step."""
    random = generator(0, "test", number)
    views = [mine(torch.randn(N, 3, 16, 16, generator=random)) for _ in range(method.views)]
    inputs = method.inputs(N, Moment(number, STEPS, number, STEPS), random)
    if method.labels:
        inputs["labels"] = mine(torch.randint(3, (N,), generator=random))
    return views, inputs


def train(fields):
    """What a few steps make of a method, and the gradient of the last of them."""
    config, method = parts_of(fields)
    take = PlainStep(
        method, build_optimizer(config, method), clip_norm=config.clip_norm, forward=averaging_gradients(method)
    )
    steps = [take(*batch(method, number), config.learning_rate) for number in range(STEPS)]
    average(buffer for name, buffer in method.named_buffers() if name.endswith(("_mean", "_var")))
    found = {name: tensor for name, tensor in take.state().items() if "num_batches_tracked" not in name}
    found |= {f"gradient of {name}": p.grad for name, p in method.named_parameters() if p.grad is not None}
    losses = torch.stack([step.loss.detach() for step in steps])
    return {
        **found,
        "losses": gather(losses[None]).mean(0),
        "health": gather(torch.stack([step.health["loss"] for step in steps])[None]).mean(0),
        "embedding": gather(steps[-1].embedding),
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # float32, summed in another order; a missing share of a gradient or a group cut in two is off by far more
        torch.testing.assert_close(found[name], tensor, rtol=2e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", METHODS)
def test_a_step_in_two_parts_is_the_step(name):
    assert_same(train(METHODS[name] | {"accumulate": 2}), train(METHODS[name]))


def test_parts_may_be_as_many_as_groups():
    assert_same(train(METHODS["jcl"] | {"accumulate": 4}), train(METHODS["jcl"]))


def in_parts(names):
    return {name: train(METHODS[name] | {"accumulate": 2}) for name in names}


def test_ranks_may_each_have_parts(tmp_path):
    names = ["moco, symmetric, momentum on its way", "jcl", "byol, groups"]
    both = on_two_ranks(tmp_path, in_parts, names)
    for name in names:
        assert_same(both[name], train(METHODS[name]))


def test_half_precision_accumulates_too():
    steps = []
    for parts in (1, 2):
        config, method = parts_of(METHODS["moco, groups"] | {"accumulate": parts})
        take = PlainStep(method, build_optimizer(config, method), precision="fp16")
        take.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)  # from higher up, a whole batch overflows at first
        steps.append((float(take(*batch(method, 0), 0.1).loss.detach()), list(method.online.parameters())))
    (loss, weights), (in_parts, weights_in_parts) = steps
    assert in_parts == pytest.approx(loss, rel=1e-2)  # half precision has three digits
    for one, other in zip(weights, weights_in_parts, strict=True):
        assert (one - other).norm() <= 1e-2 * one.norm() + 1e-3


def test_parts_hold_less():
    """What the graph of a part holds is half of what that of the batch holds, up to what does not grow with it."""
    whole, part = (parts_of(METHODS["moco, groups"] | more)[1] for more in ({}, {"accumulate": 2}))
    views, inputs = batch(whole, 0)
    assert saved_bytes(part, *part.in_parts(views, inputs)[0]) < 0.6 * saved_bytes(whole, views, inputs)


def test_keys_are_encoded_in_passes_as_small_as_a_part():
    method = parts_of(METHODS["moco, groups"] | {"accumulate": 2})[1]
    assert method.key_encoder.chunks == 2
    assert set(groups_of(method.slow)) == {2} and set(groups_of(method.online)) == {2}
    assert parts_of(METHODS["moco, layer norm"] | {"accumulate": 2})[1].key_encoder.chunks == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"method": "simclr"}, ["negatives_from batch"]),
        ({"method": "simo"}, ["negatives_from batch"]),
        ({"method": "msbreg"}, ["singular_weight", "all images"]),
        ({"method": "moco-v2", "bn_groups": 2, "uniformity_weight": 1}, ["uniformity_weight", "all images"]),
        ({"method": "byol", "joint_statistics": True}, ["joint_statistics"]),
        ({"method": "byol"}, ["the whole batch", "--bn-groups", "multiple of 2", "--norm"]),
        ({"method": "byol", "norm": "layer", "head_norm": "batch"}, ["the whole batch", "--head-norm"]),
        ({"method": "supervised", "class_count": 2}, ["the whole batch"]),
        ({"method": "moco-v2", "bn_groups": 1}, ["the whole batch"]),
        ({"method": "moco-v2", "bn_groups": 3, "batch_size": 12}, ["3 groups", "multiple of 2"]),
        ({"method": "moco-v2", "bn_groups": 3, "batch_size": 15}, ["batch_size", "multiple of 6"]),
        ({"method": "moco-v2", "bn_groups": 3, "batch_size": 12, "symmetric": True}, ["3 groups"]),
        ({"method": "moco-v2", "batch_size": 15, **LAYER}, ["batch_size", "multiple of 2"]),
    ],
)
def test_what_would_be_another_computation_is_refused_with_the_reason(fields, said):
    with pytest.raises(UsageError) as refused:
        parts_of(fields | {"accumulate": 2})
    assert str(refused.value).startswith("accumulate:")
    for part in said:
        assert part in str(refused.value)
