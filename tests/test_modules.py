"""Queue, slow copy, grouped norms, heads and backbones against the plainest possible equals."""

import copy
import sys

import pytest
import torch
from torch import nn

from unitsphere.common.errors import UsageError
from unitsphere.modules.backbones import TINY, StemConv, build_backbone, feature_dim, wide_resnet50
from unitsphere.modules.heads import projection_head
from unitsphere.modules.norms import GroupedBatchNorm, part_batch_norms
from unitsphere.modules.queue import KeyQueue
from unitsphere.modules.slow_copy import follow, slow_copy
from unitsphere.runs import loading
from unitsphere.weights import names


@pytest.mark.parametrize(
    ("size", "batches"), [(7, [3, 3, 3, 3]), (4, [4, 4]), (3, [8, 1, 5]), (16, [5, 1, 7, 16, 2]), (1, [2, 2])]
)
def test_queue_holds_what_a_list_would(size, batches):
    """Any size against any batch. The oracle is a list of the last `size` keys ever pushed."""
    queue = KeyQueue(size, 2, labelled=True)
    initial = [row.tolist() for row in queue.keys]
    history: list[list[float]] = []
    number = 0
    for batch in batches:
        keys = torch.arange(number, number + batch).float()[:, None].repeat(1, 2)
        queue.push(keys, torch.arange(number, number + batch))
        history += keys.tolist()
        number += batch
    kept = history[-size:]
    expected = sorted(kept + initial[len(history) :]) if len(history) < size else sorted(kept)
    assert sorted(queue.keys.tolist()) == expected
    assert queue.fill == pytest.approx(min(1, number / size))
    real = queue.labels >= 0
    assert torch.equal(queue.keys[real][:, 0].long(), queue.labels[real])


def test_queue_overwrites_the_oldest_first():
    queue = KeyQueue(4, 1)
    for value in range(6):
        queue.push(torch.tensor([[float(value)]]))
    assert queue.keys[:, 0].tolist() == [4.0, 5.0, 2.0, 3.0]


def test_queue_starts_with_unit_vectors_and_keeps_labels_only_on_demand():
    queue = KeyQueue(100, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(queue.keys.norm(dim=1), torch.ones(100))
    assert set(queue.state_dict()) == {"keys", "pushed"}


def test_slow_copy_is_an_exponential_average_of_parameters_only():
    fast = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    slow = slow_copy(fast)
    expected = [p.clone() for p in fast.parameters()]
    for _ in range(5):
        with torch.no_grad():
            for parameter in fast.parameters():
                parameter.add_(torch.randn_like(parameter))
            fast[1].running_mean += 1
        follow(slow, fast, 0.9)
        expected = [0.9 * e + 0.1 * p for e, p in zip(expected, fast.parameters(), strict=True)]
    for got, want in zip(slow.parameters(), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert not got.requires_grad
    assert torch.equal(slow[1].running_mean, torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize(("n", "groups"), [(8, 2), (8, 4), (9, 2)])
def test_grouped_norm_is_batch_norm_on_each_contiguous_part(n, groups):
    """R groups on one device are R ranks with plain batch norm: outputs, gradients and running statistics."""
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3).double()
    with torch.no_grad():
        plain.weight.uniform_(0.5, 2)
        plain.bias.normal_()
    grouped = GroupedBatchNorm(groups, 3).double()
    grouped.load_state_dict(plain.state_dict())
    x = torch.randn(n, 3, 4, 5, dtype=torch.float64)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    ranks = [copy.deepcopy(plain) for _ in range(groups)]
    for _ in range(2):
        expected = torch.cat([rank(part) for rank, part in zip(ranks, theirs.tensor_split(groups), strict=True)])
        actual = grouped(ours)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(x)
    (g_ours,) = torch.autograd.grad((actual * weights).sum(), ours)
    (g_theirs,) = torch.autograd.grad((expected * weights).sum(), theirs)
    torch.testing.assert_close(g_ours, g_theirs, rtol=1e-12, atol=1e-12)
    for name in ("running_mean", "running_var"):
        mean = torch.stack([getattr(rank, name) for rank in ranks]).mean(0)
        torch.testing.assert_close(getattr(grouped, name), mean, rtol=1e-12, atol=1e-12)
    assert grouped.num_batches_tracked == 2
    grouped.eval()
    plain.load_state_dict(grouped.state_dict())
    torch.testing.assert_close(grouped(x), plain.eval()(x))


def test_the_form_for_compilers_equals_the_plain_one():
    torch.manual_seed(0)
    plain, at_once = GroupedBatchNorm(4, 3).double(), GroupedBatchNorm(4, 3).double()
    at_once.forward = at_once.all_groups
    x = torch.randn(8, 3, 4, 5, dtype=torch.float64)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    weights = torch.randn_like(x)
    outputs = at_once(mine), plain(theirs)
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad((o * weights).sum(), i)[0] for o, i in zip(outputs, (mine, theirs), strict=True)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(at_once, name), getattr(plain, name), rtol=1e-12, atol=1e-12)


def test_grouped_norm_keeps_channels_last():
    x = torch.randn(8, 6, 5, 5).to(memory_format=torch.channels_last)
    assert GroupedBatchNorm(4, 6)(x).is_contiguous(memory_format=torch.channels_last)


def test_grouping_replaces_every_batch_norm_and_keeps_names():
    plain = build_backbone(TINY)
    names = list(plain.state_dict())
    count = sum(isinstance(m, nn.BatchNorm2d) for m in plain.modules())
    part_batch_norms(plain, 4)
    assert list(plain.state_dict()) == names
    assert sum(isinstance(m, GroupedBatchNorm) for m in plain.modules()) == count


def test_heads_have_the_papers_shapes():
    assert [type(m).__name__ for m in projection_head("mlp", 512, 128)] == ["Linear", "ReLU", "Linear"]
    assert projection_head("mlp", 512, 128)[0].out_features == 512
    assert projection_head("mlp", 512, 128, hidden=64)[2].in_features == 64
    assert isinstance(projection_head("linear", 512, 128), nn.Linear)


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_the_stem_in_blocks_is_the_stem(channels):
    stem = StemConv(channels).double()
    images = torch.randn(2, channels, 20, 34, dtype=torch.float64)
    plain, blocked = stem(images), stem.blocked(images, stem.weight)
    torch.testing.assert_close(blocked, plain, rtol=0, atol=1e-12)
    pull = torch.randn_like(plain)
    gradients = [torch.autograd.grad(out, stem.weight, pull)[0] for out in (plain, blocked)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("name", "features", "millions"), [("resnet18", 512, 11.2), ("resnet50", 2048, 23.5)])
def test_torchvision_backbones_have_no_classifier(name, features, millions):
    backbone = build_backbone(name)
    assert feature_dim(backbone, 3, 64) == features
    # published counts less the classifier
    assert sum(p.numel() for p in backbone.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


def test_the_wide_resnet_of_width_one_is_torchvisions():
    plain, wide = build_backbone("resnet50"), wide_resnet50(1, 3, "imagenet")
    assert {name: p.shape for name, p in wide.state_dict().items()} == {
        name: p.shape for name, p in plain.state_dict().items()
    }
    wide.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(wide.eval()(images), plain.eval()(images))
    for ours, theirs in zip(wide_resnet50(1, 3, "imagenet").parameters(), plain.parameters(), strict=True):
        if ours.dim() == 4:  # drawn from the same distribution: 1e4 weights or more tell a deviation to a few percent
            assert float(ours.detach().std()) == pytest.approx(float(theirs.detach().std()), rel=0.05)


@pytest.mark.parametrize(("name", "features", "millions"), [("resnet50x2", 4096, 94), ("resnet50x4", 8192, 375)])
def test_wide_resnets_have_the_published_size(name, features, millions):
    """EqCo's Table 8 counts the backbone alone, without any head."""
    with torch.device("meta"):
        backbone = build_backbone(name, zero_init_residual=True)
        assert round(sum(p.numel() for p in backbone.parameters()) / 1e6) == millions
        assert feature_dim(backbone, 3, 64) == features
    assert isinstance(backbone.conv1, StemConv)


def test_wide_resnets_take_the_small_stem_and_start_at_the_shortcuts():
    backbone = build_backbone("resnet50x2", channels=4, stem="small", zero_init_residual=True)
    assert backbone.maxpool(backbone.conv1(torch.zeros(1, 4, 32, 32))).shape == (1, 128, 32, 32)
    gammas = [block.bn3.weight for layer in (backbone.layer1, backbone.layer4) for block in layer]
    assert len(gammas) == 6 and all((gamma == 0).all() for gamma in gammas)


def test_small_stem_keeps_the_resolution_and_other_channels_are_taken():
    backbone = build_backbone("resnet18", channels=5, stem="small")
    maps = backbone.layer1(backbone.maxpool(backbone.conv1(torch.zeros(1, 5, 32, 32))))
    assert maps.shape == (1, 64, 32, 32)
    assert feature_dim(build_backbone("resnet18", channels=1), 1, 64) == 512
    assert feature_dim(build_backbone(TINY, channels=2), 2, 32) == 64


def test_a_function_of_the_users_own_package_is_a_backbone(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert feature_dim(build_backbone("mine:net", named_now="mine:net"), 3, 8) == 10
    with pytest.raises(UsageError, match="nothing"):
        build_backbone("mine:nothing", named_now="mine:nothing")
    sys.modules.pop("mine")


def test_a_function_that_gives_no_backbone_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def nothing(): pass\ndef needy(width): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="gave NoneType"):
        build_backbone("mine:nothing", named_now="mine:nothing")
    with pytest.raises(UsageError, match="without arguments"):
        build_backbone("mine:needy", named_now="mine:needy")


def test_timm_weights_fit_networks_whose_first_parameter_is_no_convolution(monkeypatch):
    pytest.importorskip("timm")
    name = "timm:vit_tiny_patch16_224"
    source, fresh = build_backbone(name), build_backbone(name)
    made = []

    def pretrained(name, channels, pretrained):
        made.append((name, channels, pretrained))
        return source

    monkeypatch.setattr(names, "timm_backbone", pretrained)
    loading.initialise(fresh, name, 3)
    assert made == [("vit_tiny_patch16_224", 3, True)]
    assert torch.equal(fresh.patch_embed.proj.weight, source.patch_embed.proj.weight)


def test_timm_names_are_taken():
    pytest.importorskip("timm")
    assert feature_dim(build_backbone("timm:resnet10t", channels=4), 4, 64) == 512
    with pytest.raises(UsageError, match="timm knows no model"):
        build_backbone("timm:no_such_model")


def test_unknown_backbones_and_wrong_outputs_are_refused():
    with pytest.raises(UsageError, match=r"resnet19.*Allowed"):
        build_backbone("resnet19")
    with pytest.raises(UsageError, match=r"features \(N, F\) are needed"):
        feature_dim(nn.Conv2d(3, 4, 3), 3, 16)
