"""The step in its forms: plain, compiled, recorded."""

import pytest
import torch

from unitsphere.config.layers import Layer
from unitsphere.methods.build import build_learner
from unitsphere.methods.learners.learner import Moment
from unitsphere.methods.resolve import resolve
from unitsphere.optimisation.optimisers import build_optimizer
from unitsphere.training.step import PlainStep, RecordedStep, compile_networks, set_rate


def parts(device="cpu", **fields):
    settings = {"method": "moco-v2", "data": "shapes", "batch_size": 16, "image_size": 16}
    if fields.get("method", "moco-v2") == "moco-v2":
        settings |= {"queue_size": 64, "bn_groups": 4}
    config = resolve(Layer("test", settings | fields)).config
    method = build_learner(config).to(device=device, memory_format=torch.channels_last)
    return config, method, build_optimizer(config, method)


def inputs_of(method, generator):
    return method.inputs(16, Moment(0, 10, 0, 1), generator)


def run(take, method, device, steps=5):
    """Losses of a few steps with a changing rate."""
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(steps):
        views = [torch.randn(16, 3, 16, 16, generator=generator).to(device) for _ in range(2)]
        inputs = {name: tensor.to(device) for name, tensor in inputs_of(method, generator).items()}
        losses.append(take(views, inputs, 0.05 / (step + 1)).loss.item())
    return losses


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_rate_of_a_step_is_the_one_given(optimizer):
    _, method, used = parts(optimizer=optimizer)
    before = [p.clone() for p in method.online.parameters()]
    run(lambda *given: PlainStep(method, used)(given[0], given[1], 0.0), method, "cpu", steps=2)
    assert all(torch.equal(a, b) for a, b in zip(before, method.online.parameters(), strict=True))
    set_rate(used, 0.1)
    assert used.param_groups[0]["lr"] == 0.1


def test_clipping_bounds_the_gradient():
    _, method, optimizer = parts()
    run(PlainStep(method, optimizer, clip_norm=1e-3), method, "cpu", steps=1)
    norm = torch.cat([p.grad.flatten() for p in method.online.parameters()]).norm()
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_nesterov_and_weight_decay_reach_the_optimiser():
    _, _, optimizer = parts(nesterov=True, weight_decay=0.25, momentum=0.5)
    group = optimizer.param_groups[0]
    assert (group["nesterov"], group["weight_decay"], group["momentum"]) == (True, 0.25, 0.5)


@pytest.mark.slow
def test_a_compiled_step_equals_the_plain_one():
    found = []
    for compiled in (False, True):
        _, method, optimizer = parts(symmetric=True)
        if compiled:
            compile_networks(method)
        found.append((run(PlainStep(method, optimizer), method, "cpu"), method.state_dict()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    for name, tensor in found[0][1].items():
        torch.testing.assert_close(tensor, found[1][1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_process_may_compile_more_kinds_of_networks_than_torch_expects():
    from torch._dynamo.utils import counters

    for size in range(6, 16):  # ten shapes, twice each: with a gradient, and as the slow copy
        _, method, _ = parts(batch_size=size, bn_groups=1)
        compile_networks(method)
        before = counters["stats"]["unique_graphs"]
        method([torch.randn(size, 3, 16, 16) for _ in range(2)], method.inputs(size, Moment(0, 1, 0, 1), None))
        assert counters["stats"]["unique_graphs"] == before + 2


@pytest.fixture
def exact_sums(monkeypatch):
    """Convolutions in full float32, not TF32, which makes more of small differences. On a CPU, weights that are off by
    1e-6 give losses off by 1e-6 after five steps, but those off by 1e-5 up to 2e-3."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("given", [{}, {"symmetric": True}, {"singular_form": "nuclear", "singular_weight": 0.1}])
def test_a_recorded_step_equals_the_plain_one(optimizer, given, exact_sums):
    (plain, _), (recorded, state) = plain_and_recorded(optimizer=optimizer, **given)
    assert plain == pytest.approx(recorded, rel=1e-3)  # the device sums in no fixed order
    assert int(state["queue.pushed"]) == 5 * 16 * (1 + given.get("symmetric", False))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["nuclear", "gram", "correlation"])
def test_a_recorded_step_with_forces_equals_the_plain_one(form, exact_sums):
    forces = {"singular_form": form, "singular_weight": 0.004, "brownian_weight": 0.5, "uniformity_weight": 0.1}
    (plain, _), (recorded, _) = plain_and_recorded(method="msbreg", view_count=2, **forces)
    assert plain == pytest.approx(recorded, rel=1e-3)


@pytest.mark.gpu
def test_forces_beside_the_target_are_those_of_a_cpu(exact_sums):
    """The second loss tells of the gradient of the first."""
    forces = {"singular_weight": 0.004, "brownian_weight": 0.5, "uniformity_weight": 0.1}
    found = []
    for device in ("cpu", "cuda"):
        _, method, used = parts(device, method="msbreg", view_count=2, **forces)
        found.append(run(PlainStep(method, used), method, device, steps=2))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def plain_and_recorded(**fields):
    """Of each the losses of a few steps and the state after them."""
    found = []
    for recorded in (False, True):
        _, method, used = parts("cuda", **fields)
        take = PlainStep(method, used)
        if recorded:
            views = [torch.randn(16, 3, 16, 16, device="cuda") for _ in range(2)]
            inputs = {name: tensor.to("cuda") for name, tensor in inputs_of(method, torch.Generator()).items()}
            take = RecordedStep(take, views, inputs)
        found.append((run(take, method, "cuda"), method.state_dict()))
    return found
