"""The norm kernels against the definition in float64 and its autograd: on a GPU, or interpreted on a CPU.

The tests marked `gpu` run the kernels on the device; `test_the_kernels_are_right_when_interpreted` runs those that need
no card in a process of its own, where Triton interprets them with numpy.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import interpret_kernels
from torch import Tensor, nn
from torchvision.models import resnet

from unitsphere.modules import fused_blocks
from unitsphere.modules.backbones import TINY, build_backbone
from unitsphere.modules.fused_blocks import fuse_norms, has_kernel, norm_act
from unitsphere.modules.norms import GroupedBatchNorm, SynchronisedBatchNorm, part_batch_norms

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
EPS, MOMENTUM = 1e-5, 0.3
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}  # norm-wise

needs_card = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs CUDA")


def runs_kernels(test: Callable[..., None]) -> Callable[..., None]:
    can = INTERPRETED or torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(not can, reason="needs CUDA, or TRITON_INTERPRET=1")(test))


@pytest.fixture
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small inputs have several tiles, shares of rows and blocks of columns."""
    if INTERPRETED or torch.cuda.is_available():
        from unitsphere.modules import fused_norm

        shape = fused_norm.Shape(values=256, columns=16, warps=4, programs=4, share_kib=1 / 16, alone=99)
        monkeypatch.setattr(fused_norm, "FORWARD", shape)
        monkeypatch.setattr(fused_norm, "BACKWARD", shape)


def definition(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, groups: int, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and the groups' means and unbiased variances."""
    rest = [0, *range(2, x.dim())]
    wide = [1, -1, *[1] * (x.dim() - 2)]
    found, means, variances = [], [], []
    for part in x.chunk(groups):
        mean = part.mean(rest)
        variance = ((part - mean.view(wide)) ** 2).mean(rest)
        normalised = (part - mean.view(wide)) / (variance + EPS).sqrt().view(wide)
        found.append(normalised * weight.view(wide) + bias.view(wide))
        count = part.numel() // part.shape[1]
        means.append(mean)
        variances.append(variance * count / (count - 1))
    y = torch.cat(found)
    y = y if residual is None else y + residual
    return y.clamp_min(0) if relu else y, torch.stack(means).mean(0), torch.stack(variances).mean(0)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def off(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def compare(
    x: Tensor, groups: int = 1, relu: bool = True, residual: Tensor | None = None, allowed: float | None = None
) -> None:
    """Value, gradients and statistics of the kernels with those of the definition."""
    from unitsphere.modules.fused_norm import counters_for, norm

    channels = x.shape[1]
    weight, bias = 1 + drawn(channels, seed=1) / 2, drawn(channels, seed=2)
    running = drawn(channels, seed=3), drawn(channels, seed=4).abs(), torch.tensor(5, device=DEVICE)
    before = [each.clone() for each in running]
    given = [each.detach().requires_grad_() for each in (x, weight, bias, residual) if each is not None]
    exact = [each.detach().double().requires_grad_() for each in given]
    y = norm(*(given if residual is not None else [*given, None]), *running, groups, MOMENTUM, EPS, relu)
    expected, mean, variance = definition(*(exact if residual is not None else [*exact, None]), groups, relu)
    assert y.shape == x.shape and y.dtype == x.dtype
    # Values that are 0 but for rounding pass the ReLU or do not: the pull leaves them out.
    pull = drawn(*x.shape, seed=5, dtype=x.dtype) * (expected.abs() > 0.02 if relu else 1)
    gradients = torch.autograd.grad(y, given, pull)
    true_gradients = torch.autograd.grad(expected, exact, pull.double())
    allowed = allowed or ROUNDING[x.dtype]
    assert off(y, expected) < allowed
    for found, true in zip(gradients, true_gradients, strict=True):
        assert off(found, true) < allowed
    assert off(running[0], before[0].double().lerp(mean.detach(), MOMENTUM)) < 2e-6
    assert off(running[1], before[1].double().lerp(variance.detach(), MOMENTUM)) < max(2e-6, allowed / 10)
    assert running[2] == before[2] + 1
    assert not counters_for(x).any()  # as the next launch needs them


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a card the kernels are compared on it")
def test_the_kernels_are_right_when_interpreted() -> None:
    interpret_kernels(__file__)


# One share and several, whole tiles and ragged ones, channels that no block or byte divides, vectors.
SHAPES = [((4, 16, 2, 2), 1), ((6, 20, 5, 3), 3), ((6, 40, 4, 4), 2), ((30, 33), 5), ((3, 7, 6, 6), 1)]


@runs_kernels
@pytest.mark.usefixtures("small_shares")
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("relu", [False, True], ids=["linear", "relu"])
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_values_gradients_and_statistics_equal_float64(
    shape: tuple[int, ...], groups: int, relu: bool, residual: bool
) -> None:
    x = 2 * drawn(*shape, seed=6) + 1
    compare(x, groups, relu, drawn(*shape, seed=7) if residual else None)


@runs_kernels
@pytest.mark.usefixtures("small_shares")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_half_precision_is_off_by_its_own_rounding_only(dtype: torch.dtype, residual: bool) -> None:
    shape = 4, 24, 5, 5
    compare(drawn(*shape, seed=6, dtype=dtype), 2, True, drawn(*shape, seed=7, dtype=dtype) if residual else None)


@runs_kernels
@pytest.mark.usefixtures("small_shares")
def test_both_layouts_are_taken_and_channels_last_comes_back() -> None:
    from unitsphere.modules.fused_norm import norm

    x = drawn(6, 20, 5, 3, seed=6)
    last = x.contiguous(memory_format=torch.channels_last)
    compare(last, 3, residual=drawn(6, 20, 5, 3, seed=7))
    given = drawn(20), drawn(20), None, drawn(20), drawn(20).abs(), torch.tensor(0, device=DEVICE), 1, 0.1, EPS, True
    assert norm(x, *given).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(norm(x, *given), norm(last, *given))


@runs_kernels
@pytest.mark.parametrize(("cache_mib", "alone"), [(0, 99), (3e-3, 99), (1, 99), (1, 0)])
def test_any_division_of_the_work_gives_the_same(cache_mib: float, alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from unitsphere.modules import fused_norm

    shape = fused_norm.Shape(
        values=128, columns=16, warps=4, programs=3, share_kib=1 / 16, cache_mib=cache_mib, alone=alone
    )
    monkeypatch.setattr(fused_norm, "FORWARD", shape)
    monkeypatch.setattr(fused_norm, "BACKWARD", shape)
    compare(drawn(8, 40, 4, 4), 4, residual=drawn(8, 40, 4, 4, seed=1))


@runs_kernels
@pytest.mark.usefixtures("small_shares")
def test_a_mean_far_from_zero_costs_no_accuracy() -> None:
    compare(drawn(8, 16, 5, 5) + 1000, 2, allowed=3e-4)  # a float32 near 1000 is itself rounded by 3e-5


@runs_kernels
@pytest.mark.usefixtures("small_shares")
def test_a_gradient_without_memory_of_its_own_is_taken() -> None:
    """As the mean over pixels at the end of a network hands it back."""
    from unitsphere.modules.fused_norm import norm

    x, weight, bias = (t.requires_grad_() for t in (drawn(4, 16, 3, 3), drawn(16, seed=1), drawn(16, seed=2)))
    y = norm(x, weight, bias, None, drawn(16), drawn(16).abs(), torch.tensor(0, device=DEVICE), 2, 0.1, EPS, True)
    y.mean(dim=(2, 3)).square().sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    definition(*exact, None, 2, True)[0].mean(dim=(2, 3)).square().sum().backward()
    for found, true in zip((x, weight, bias), exact, strict=True):
        assert off(found.grad, true.grad) < 2e-6


@runs_kernels
@pytest.mark.usefixtures("small_shares")
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_the_two_gradients_of_a_pair_are_added(residual: bool) -> None:
    from unitsphere.modules.fused_norm import norm

    shape = 4, 24, 3, 3
    given = [t.requires_grad_() for t in (drawn(*shape), drawn(24, seed=1), drawn(24, seed=2))]
    added = drawn(*shape, seed=3).requires_grad_() if residual else None
    running = drawn(24), drawn(24).abs(), torch.tensor(0, device=DEVICE)
    first, second = norm(*given, added, *running, 2, 0.1, EPS, True, True)
    assert torch.equal(first, second)
    leaves = [*given, *([added] if residual else [])]
    pulls = drawn(*shape, seed=4), drawn(*shape, seed=5)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    y = definition(*(exact if residual else [*exact, None]), 2, True)[0]
    pulls = tuple(pull * (y.abs() > 1e-3) for pull in pulls)
    found = torch.autograd.grad((first * pulls[0]).sum() + (second * pulls[1]).sum(), leaves)
    true = torch.autograd.grad((y * (pulls[0] + pulls[1])).sum(), exact)
    for ours, theirs in zip(found, true, strict=True):
        assert off(ours, theirs) < 2e-6


@runs_kernels
@pytest.mark.usefixtures("small_shares")
def test_what_is_not_finite_stays_so() -> None:
    from unitsphere.modules.fused_norm import norm

    x = drawn(4, 16, 3, 3)
    x[2, 5, 1, 1] = torch.nan
    running = drawn(16), drawn(16).abs(), torch.tensor(0, device=DEVICE)
    y = norm(x, drawn(16), drawn(16), None, *running, 2, 0.1, EPS, True)
    assert y[2:, 5].isnan().all() and running[0][5].isnan() and running[1][5].isnan()
    assert y[:2].isfinite().all() and y[2:, :5].isfinite().all()


@runs_kernels
@pytest.mark.usefixtures("small_shares")
def test_there_is_no_second_derivative() -> None:
    from unitsphere.modules.fused_norm import norm

    x, zero = drawn(4, 16).requires_grad_(), torch.tensor(0, device=DEVICE)
    y = norm(x, drawn(16), drawn(16), None, drawn(16), drawn(16).abs(), zero, 1, 0.1, EPS, True)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_blocks_keep_names_and_values_to_the_last_bit() -> None:
    """On a CPU, where the modules run one after the other."""
    for name in ("resnet18", "resnet50"):
        torch.manual_seed(0)
        plain = getattr(resnet, name)(num_classes=5)
        fused = fuse_norms(copy.deepcopy(plain))
        assert list(fused.state_dict()) == list(plain.state_dict())
        assert type(fused.layer1[0]) in (fused_blocks.FusedBasicBlock, fused_blocks.FusedBottleneck)
        images = torch.randn(2, 3, 32, 32)
        for network in (plain, fused):
            network(images).square().sum().backward()
        for (key, ours), theirs in zip(fused.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad), key
        for (key, ours), theirs in zip(fused.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(ours, theirs), key
        assert torch.equal(fused.eval()(images), plain.eval()(images))


def test_every_built_in_network_is_fused_and_a_users_own_is_not() -> None:
    for name in (TINY, "resnet34", "resnet50x2"):
        kinds = {type(module) for module in build_backbone(name).modules()}
        assert not kinds & set(fused_blocks.FUSED) and kinds & set(fused_blocks.FUSED.values())
    own = "torchvision.models:resnet18"
    assert type(build_backbone(own, named_now=own)) is resnet.ResNet


@pytest.mark.gpu
@needs_card
def test_only_batch_statistics_of_whole_groups_have_a_kernel() -> None:
    x = drawn(8, 16, 4, 4)

    def works(norm: nn.Module, x: Tensor = x, residual: Tensor | None = None) -> bool:
        return has_kernel(norm.to(DEVICE), x, residual)

    assert works(nn.BatchNorm2d(16)) and works(GroupedBatchNorm(4, 16)) and works(nn.BatchNorm1d(16), x[:, :, 0, 0])
    assert works(nn.BatchNorm2d(16), x, x) and works(nn.BatchNorm2d(16), x.bfloat16())
    assert not works(nn.BatchNorm2d(16).eval()) and not works(SynchronisedBatchNorm(16))
    assert not works(GroupedBatchNorm(3, 16)) and not works(nn.GroupNorm(4, 16))
    assert not works(nn.BatchNorm2d(16, affine=False)) and not works(nn.BatchNorm2d(16, momentum=None))
    assert not works(nn.BatchNorm2d(16, track_running_stats=False)) and not works(nn.BatchNorm2d(16), x.cpu())
    assert not works(nn.BatchNorm2d(16).double(), x.double()) and not works(nn.BatchNorm2d(16), x, x.bfloat16())
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm_act(nn.BatchNorm1d(16).to(DEVICE), x[:1, :, 0, 0])


@pytest.fixture
def exact_convolutions() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def trained(network: nn.Module, images: Tensor) -> dict[str, Any]:
    """The features, gradients and buffers of one pass."""
    features = network(images)
    features.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    return {"features": features.detach(), **gradients, **dict(network.named_buffers())}


@pytest.mark.gpu
@needs_card
@pytest.mark.usefixtures("exact_convolutions")
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("name", "compiled"), [(TINY, False), ("resnet18", False), ("resnet50", False), (TINY, True)])
def test_a_network_with_kernels_is_as_near_to_float64_as_the_plain_one(
    name: str, groups: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values near 0 pass a ReLU or do not, so a gradient of float32 is off by far more than its rounding: by up to 5 %
    in ResNet-50. torch's own form tells by how much."""
    torch.manual_seed(0)
    network = build_backbone(name, stem="small")
    part_batch_norms(network, groups)
    network.to(DEVICE, memory_format=torch.channels_last)
    images = drawn(16, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    found = {}
    for kernels in ("off", "all"):
        monkeypatch.setattr(fused_blocks, "KERNELS", kernels)
        own = copy.deepcopy(network)
        if compiled and kernels == "all":
            own.compile(dynamic=False)
        found[kernels] = trained(own, images)
    exact = trained(copy.deepcopy(network).double(), images.double())
    for key, true in exact.items():
        if true.double().norm() > 1e-3 * true.numel() ** 0.5:  # smaller gradients cancelled: noise in both
            plain, ours = (off(found[kernels][key], true.double()) for kernels in ("off", "all"))
            assert ours < 3 * plain + 1e-5, key


@pytest.mark.gpu
@needs_card
def test_a_recording_is_replayed_with_new_values() -> None:
    norm = GroupedBatchNorm(2, 32).to(DEVICE)
    plain = copy.deepcopy(norm)
    x = drawn(8, 32, 6, 6, dtype=torch.bfloat16).requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        norm_act(norm, x, nn.ReLU()).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    x.grad = None
    norm.load_state_dict(plain.state_dict())
    with torch.cuda.graph(graph, stream=side):
        y = norm_act(norm, x, nn.ReLU())
        (y * y).sum().backward()
    for seed in (1, 2, 3):
        with torch.no_grad():
            x.copy_(drawn(8, 32, 6, 6, seed=seed, dtype=torch.bfloat16))
        graph.replay()
        theirs = x.detach().clone().requires_grad_()
        expected = plain(theirs).relu()
        (expected * expected).sum().backward()
        assert off(y, expected.double()) < 2**-7 and off(x.grad, theirs.grad.double()) < 2**-6
        torch.testing.assert_close(norm.running_mean, plain.running_mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(norm.running_var, plain.running_var, rtol=1e-5, atol=1e-6)
    assert norm.num_batches_tracked == 3
