"""LARS against the paper's rule, what is excluded, and fp16 with a scaled loss."""

import pytest
import torch
from torch import nn

from unitsphere.config.layers import Layer
from unitsphere.methods.build import build_learner
from unitsphere.methods.learners.learner import Moment
from unitsphere.methods.resolve import resolve
from unitsphere.optimisation.optimisers import LARS, build_optimizer, parameter_groups
from unitsphere.training.step import PlainStep
from unitsphere.weights.files import load_tensors, save_tensors

SHAPES = [(8, 3, 3, 3), (5, 8), (8,), (5,), (2, 2)]


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES]
    made[-1].data.zero_()  # a layer that begins at zero has no norm to trust
    return made


def gradients(step):
    generator = torch.Generator().manual_seed(100 + step)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    made[1] *= step != 2  # and one step of one layer has no gradient to trust
    return made


def by_the_paper(steps, rates, *, momentum, decay, eta, excluded):
    """Algorithm 1 of You et al., one parameter after the other, in float64."""
    weights = [parameter.detach().clone() for parameter in parameters(torch.float64)]
    velocities = [torch.zeros_like(weight) for weight in weights]
    for step in range(steps):
        for place, (w, g) in enumerate(zip(weights, gradients(step), strict=True)):
            beta = 0.0 if place in excluded else decay
            local = 1.0
            if place not in excluded and w.norm() > 0 and g.norm() > 0:
                local = eta * w.norm() / (g.norm() + beta * w.norm())
            velocities[place] = momentum * velocities[place] + rates[step] * local * (g + beta * w)
            weights[place] = w - velocities[place]
    return weights


@pytest.mark.parametrize("tensor_rate", [False, True])
@pytest.mark.parametrize("excluding", [False, True])
def test_lars_follows_the_papers_rule(excluding, tensor_rate):
    rates, decay, momentum = [0.5, 0.4, 0.3, 0.1], 0.02, 0.9
    trained = parameters(torch.float64)
    vectors = [place for place, shape in enumerate(SHAPES) if len(shape) == 1] if excluding else []
    groups = parameter_groups(nn.ParameterList(trained), decay, decay_norms=not excluding)
    first = torch.tensor(rates[0], dtype=torch.float64) if tensor_rate else rates[0]
    optimizer = LARS(groups, lr=first, momentum=momentum, eta=0.01)
    for step, rate in enumerate(rates):
        for parameter, gradient in zip(trained, gradients(step), strict=True):
            parameter.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(rate, dtype=torch.float64) if tensor_rate else rate
        optimizer.step()
    expected = by_the_paper(len(rates), rates, momentum=momentum, decay=decay, eta=0.01, excluded=vectors)
    for found, wanted in zip(trained, expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-12, atol=1e-12)


def test_biases_and_norms_are_apart_where_they_are_not_decayed():
    config = resolve(Layer("test", {"method": "byol", "data": "shapes", "optimizer": "lars"})).config
    method = build_learner(config)
    matrices, vectors = build_optimizer(config, method).param_groups
    assert all(parameter.dim() > 1 for parameter in matrices["params"])
    norms = [m for m in [*method.online.modules(), *method.predictor.modules()] if isinstance(m, nn.BatchNorm1d)]
    apart = {id(parameter) for parameter in vectors["params"]}
    assert norms and all(id(norm.weight) in apart and id(norm.bias) in apart for norm in norms)
    assert id(method.online.head[0].bias) in apart
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (config.weight_decay, 0.0)
    assert (matrices["adapt"], vectors["adapt"]) == (True, False)
    assert all(parameter.requires_grad for parameter in [*matrices["params"], *vectors["params"]])
    trained = sum(parameter.requires_grad for parameter in method.parameters())
    assert len(matrices["params"]) + len(vectors["params"]) == trained


@pytest.mark.parametrize(
    ("fields", "groups"),
    [({}, 1), ({"decay_norms": False}, 2), ({"optimizer": "lars"}, 2), ({"optimizer": "lars", "decay_norms": True}, 1)],
)
def test_what_is_decayed_can_be_chosen(fields, groups):
    config = resolve(Layer("test", {"method": "moco-v2", "data": "shapes"} | fields)).config
    assert len(build_optimizer(config, build_learner(config)).param_groups) == groups


TINY = {"method": "moco-v2", "data": "shapes", "batch_size": 16, "queue_size": 64, "image_size": 16}


def tiny(precision="fp32", **fields):
    config = resolve(Layer("test", TINY | fields)).config
    method = build_learner(config)
    return method, PlainStep(method, build_optimizer(config, method), precision=precision)


def take(method, step, number=0, rate=0.05):
    generator = torch.Generator().manual_seed(number)
    views = [torch.randn(16, 3, 16, 16, generator=generator) for _ in range(2)]
    return step(views, method.inputs(16, Moment(number, 10, 0, 1), generator), rate)


@pytest.mark.parametrize("fields", [{"optimizer": "lars"}, {"decay_norms": False}, {"precision": "fp16"}])
def test_a_checkpoint_gives_back_groups_and_the_scale_of_the_loss(fields, tmp_path):
    method, step = tiny(**fields)
    if step.scaler is not None:
        step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for number in range(3):
        take(method, step, number)
    save_tensors(tmp_path / "c.safetensors", step.state(), {})
    other, restored = tiny(**fields)
    restored.restore(load_tensors(tmp_path / "c.safetensors")[0])
    for which, taken in ((method, step), (other, restored)):
        take(which, taken, 3)
    before, after = step.state(), restored.state()
    assert before.keys() == after.keys()
    assert any(name.endswith("momentum_buffer") for name in before)
    for name in before:
        assert torch.equal(before[name], after[name]), name
    if step.scaler is not None:
        assert (before["scaler.scale"], before["scaler._growth_tracker"]) == (2.0**8, 4)


def test_fp16_leaves_out_a_step_that_overflows_and_scales_less():
    method, step = tiny("fp16")
    step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = [parameter.clone() for parameter in method.online.parameters()]
    take(method, step)
    assert all(torch.equal(a, b) for a, b in zip(before, method.online.parameters(), strict=True))
    assert step.scaler.get_scale() == 2.0**39
    step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    take(method, step)
    assert not torch.equal(before[0], next(method.online.parameters()))


def test_fp16_clips_the_gradient_itself_and_not_the_scaled_one():
    method, step = tiny("fp16")
    step.scaler, step.clip_norm = torch.amp.GradScaler("cpu", init_scale=2.0**6), 1e-3
    take(method, step)
    norm = torch.cat([parameter.grad.flatten() for parameter in method.online.parameters()]).norm()
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_fp16_trains_as_fp32_does_up_to_its_rounding():
    losses = {}
    for precision in ("fp32", "fp16"):
        method, step = tiny(precision)
        if step.scaler is not None:
            step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        losses[precision] = [float(take(method, step, number, rate=0.01).loss.detach()) for number in range(4)]
    # eleven bits of mantissa, through a few layers; a lost scale would be off by a factor
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=2e-2)


@pytest.mark.gpu
def test_a_recorded_step_of_lars_and_byol_equals_the_plain_one():
    from unitsphere.training.step import RecordedStep

    found = []
    for recorded in (False, True):
        config = resolve(Layer("test", {"method": "byol", "data": "shapes", "optimizer": "lars", "batch_size": 16}))
        config = config.config
        method = build_learner(config).to("cuda", memory_format=torch.channels_last)
        taken = PlainStep(method, build_optimizer(config, method))
        losses = []
        for number in range(5):
            generator = torch.Generator().manual_seed(number)
            views = [torch.randn(16, 3, 32, 32, generator=generator).cuda() for _ in range(2)]
            inputs = {n: t.cuda() for n, t in method.inputs(16, Moment(number, 10, 0, 1), generator).items()}
            if recorded and number == 0:
                taken = RecordedStep(taken, views, inputs)
            losses.append(taken(views, inputs, 0.2).loss.item())
        found.append((losses, method.slow.head[0].weight.clone()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-3)  # the device sums in no fixed order
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-4)
