"""Norms without a batch against closed forms in float64 and torch's own layer norm."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unitsphere.common.errors import UsageError
from unitsphere.modules import norms
from unitsphere.modules.backbones import TINY, StemConv, build_backbone
from unitsphere.modules.heads import projection_head
from unitsphere.modules.image_norms import (
    StandardisedConv,
    StandardisedLinear,
    StandardisedStemConv,
    standardised,
    use_norm,
)
from unitsphere.modules.names import NORMS
from unitsphere.modules.norms import groups_of, part_batch_norms, split_groups

EXACT = {"rtol": 0, "atol": 1e-12}  # float64, a few hundred terms


def convolution(channels: int = 12) -> nn.Sequential:
    """A convolution and its norm, whose weight and bias are not the initial ones."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, channels, 3, bias=False), nn.BatchNorm2d(channels, eps=1e-3)).double()
    for parameter in module[1].parameters():
        nn.init.normal_(parameter)
    return module


def normalised(x: Tensor, parts: int, norm: nn.Module) -> Tensor:
    """The definition: mean 0 and variance 1 over each of `parts` parts of an image's channels, then scale and shift."""
    out = torch.empty_like(x)
    channels = x.shape[1] // parts
    for n in range(len(x)):
        for part in range(parts):
            values = x[n, part * channels : (part + 1) * channels]
            variance = ((values - values.mean()) ** 2).mean()
            out[n, part * channels : (part + 1) * channels] = (values - values.mean()) / (variance + norm.eps).sqrt()
    return out * norm.weight[:, None, None] + norm.bias[:, None, None]


@pytest.mark.parametrize(("name", "parts"), [("layer", 1), ("group", 4)])
def test_maps_are_normalised_over_all_or_part_of_an_images_channels(name: str, parts: int) -> None:
    plain = convolution()
    module = copy.deepcopy(plain)
    use_norm(module, name, groups=4)
    x = torch.randn(5, 3, 7, 6, dtype=torch.float64)
    torch.testing.assert_close(module(x), normalised(plain[0](x), parts, plain[1]), **EXACT)
    torch.testing.assert_close(module(x)[:1], module(x[:1]), **EXACT)  # other images do not matter


@pytest.mark.parametrize("name", ["layer", "group", "standardised"])
def test_vectors_are_normalised_as_a_whole(name: str) -> None:
    head = projection_head("mlp-bn", 20, 6, hidden=64).double()
    nn.init.normal_(head[1].weight)
    plain = copy.deepcopy(head)
    use_norm(head, name)
    x = torch.randn(5, 20, dtype=torch.float64)
    weight = plain[0].weight
    if name == "standardised":
        centred = weight - weight.mean(1, keepdim=True)
        weight = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
    hidden = F.layer_norm(x @ weight.T, [64], plain[1].weight, plain[1].bias, 1e-5)
    torch.testing.assert_close(head(x), plain[3](hidden.relu()), **EXACT)


def test_standardised_weights_have_mean_zero_and_variance_one_for_each_output() -> None:
    weight = 3 + 2 * torch.randn(5, 4, 3, 3, dtype=torch.float64)
    flat = weight.flatten(1)
    expected = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(standardised(weight).flatten(1), expected, **EXACT)


def test_standardised_convolutions_are_convolutions_with_standardised_weights_before_group_norm() -> None:
    plain = convolution()
    module = copy.deepcopy(plain)
    use_norm(module, "standardised", groups=3)
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    maps = F.conv2d(x, standardised(plain[0].weight))
    torch.testing.assert_close(module(x), normalised(maps, 3, plain[1]), **EXACT)
    shifted = copy.deepcopy(module)
    with torch.no_grad():
        shifted[0].weight.add_(0.7)
    torch.testing.assert_close(shifted(x), module(x), **EXACT)  # what is standardised has no mean


def test_the_gradient_reaches_the_weights_that_are_standardised() -> None:
    module = convolution()
    use_norm(module, "standardised", groups=3)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    pull = torch.randn(2, 12, 3, 3, dtype=torch.float64)

    def value(weight: Tensor) -> Tensor:
        return (torch.func.functional_call(module, {"0.weight": weight}, x) * pull).sum()

    assert torch.autograd.gradcheck(value, module[0].weight.detach().requires_grad_())


@pytest.mark.parametrize("channels", [3, 1])
def test_the_standardised_stem_convolves_as_the_stem_does(channels: int) -> None:
    stem = nn.Sequential(StemConv(channels), nn.BatchNorm2d(64)).double()
    use_norm(stem, "standardised")
    assert type(stem[0]) is StandardisedStemConv
    images = torch.randn(2, channels, 12, 16, dtype=torch.float64)
    expected = F.conv2d(images, standardised(stem[0].weight), stride=2, padding=3)
    torch.testing.assert_close(stem[0](images), expected, **EXACT)
    torch.testing.assert_close(stem[0].blocked(images, standardised(stem[0].weight)), expected, **EXACT)


@pytest.mark.parametrize("backbone", [TINY, "resnet18"])
@pytest.mark.parametrize("name", NORMS)
def test_a_whole_backbone_keeps_its_parameters_and_takes_one_image(backbone: str, name: str) -> None:
    network = build_backbone(backbone, zero_init_residual=True)
    before = dict(network.named_parameters())
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    use_norm(network, name)
    after = dict(network.named_parameters())
    assert list(after) == list(before) and all(after[key] is before[key] for key in after)
    assert any(isinstance(m, nn.BatchNorm2d) for m in network.modules()) == (name == "batch")
    assert all(isinstance(m, StandardisedConv) == (name == "standardised") for m in convolutions)
    if name != "batch":
        assert not dict(network.named_buffers())
        images = torch.randn(3, 3, 64, 64)
        whole = network.train()(images)
        assert whole.isfinite().all() and whole.std(0).max() > 0
        torch.testing.assert_close(network(images[:1]), whole[:1], rtol=1e-3, atol=1e-4)  # float32 convolutions
        copy.deepcopy(network)(images).sum().backward()


def test_only_layers_before_a_norm_are_standardised() -> None:
    head = projection_head("mlp-bn", 8, 4)
    use_norm(head, "standardised")
    assert [type(layer) for layer in (head[0], head[3])] == [StandardisedLinear, nn.Linear]
    head = projection_head("mlp-bn-bn", 8, 4)
    use_norm(head, "standardised")
    assert [type(layer) for layer in (head[0], head[3])] == [StandardisedLinear, StandardisedLinear]


def test_norms_without_parameters_are_replaced_too() -> None:
    head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False, track_running_stats=False))
    use_norm(head, "layer")
    assert not list(head[1].parameters())
    torch.testing.assert_close(head(torch.randn(1, 4)).mean(), torch.tensor(0.0), rtol=0, atol=1e-6)


def test_what_has_no_batch_norm_is_refused_and_nothing_is_left_to_group() -> None:
    with pytest.raises(UsageError, match=r"layer, but the network has no BatchNorm"):
        use_norm(projection_head("mlp", 8, 4), "layer")
    with pytest.raises(ValueError, match="known are batch, layer"):
        use_norm(projection_head("mlp-bn", 8, 4), "instance")
    head = projection_head("mlp-bn", 8, 4)
    mixed = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm3d(4))
    with pytest.raises(UsageError, match="the network has BatchNorm3d, whose place it cannot take"):
        use_norm(mixed, "layer")
    assert type(mixed[0]) is nn.BatchNorm2d  # not one of two
    use_norm(head, "layer")
    with pytest.raises(UsageError, match="no BatchNorm to group"):
        part_batch_norms(head, 4)


def test_a_norms_own_momentum_is_kept_and_a_cumulative_average_is_refused():
    net = nn.Sequential(nn.BatchNorm1d(4, momentum=0.0), nn.BatchNorm1d(4))
    part_batch_norms(net, 2)
    assert not any(type(norm) is nn.BatchNorm1d for norm in net) and [norm.momentum for norm in net] == [0.0, 0.1]
    with pytest.raises(UsageError, match="can be neither grouped nor synchronised"):
        part_batch_norms(nn.Sequential(nn.BatchNorm1d(4, momentum=None)), 2)


def test_with_as_many_groups_as_processes_every_norm_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(norms, "world", lambda: 2)
    net = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False))
    part_batch_norms(net, 2)
    assert all(type(norm) is nn.BatchNorm1d for norm in net)


@pytest.mark.parametrize(("groups", "said"), [(1, "from all images. In"), (2, "from all images of a process. In")])
def test_norms_without_groups_are_not_split_on_several_ranks(groups, said, monkeypatch):
    monkeypatch.setattr(norms, "world", lambda: 2)
    net = convolution()
    part_batch_norms(net, groups)
    split_groups(net, 1)
    with pytest.raises(UsageError, match=f"key_chunks: given 3 on 2 processes, .*{said}.* a multiple of 6"):
        split_groups(net, 3)


def test_whole_groups_and_norms_without_a_batch_are_split_on_any_number_of_ranks(monkeypatch):
    split_groups(convolution(), 3)  # on one rank each pass may have statistics of its own
    monkeypatch.setattr(norms, "world", lambda: 2)
    net = convolution()
    part_batch_norms(net, 8)
    split_groups(net, 2)
    assert groups_of(net) == [2]
    use_norm(net := convolution(), "layer")
    split_groups(net, 3)
