from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.data.loader import Loader
from unitsphere.data.source import Images, open_images
from unitsphere.evaluation.linear import linear
from unitsphere.evaluation.recipes import LinearRecipe
from unitsphere.features.extract import AugmentedFeatures, CachedFeatures, extract, images_at_once
from unitsphere.features.inputs import usable_rows
from unitsphere.views.evaluation import Preprocess

STILL = Preprocess(8, 8, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))


def grey_images(levels: list[int]) -> Images:
    """Image n is evenly grey, of a size of its own."""
    arrays = [np.full((8 + n % 3, 9, 3), level, np.uint8) for n, level in enumerate(levels)]
    return Images("grey", [f"grey/{n}" for n in range(len(levels))], None, None, arrays.__getitem__)


class MeanColour(nn.Module):
    """Features that tell the image: its mean, thrice."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean((1, 2, 3))[:, None].repeat(1, 3)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Dropout(0.5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_rows_are_in_the_order_of_the_images(resident: bool, batch_size: int) -> None:
    levels = list(range(0, 250, 23))
    loader = Loader(grey_images(levels), resident=resident)
    seen: list[int] = []
    features = extract(MeanColour(), loader, STILL, batch_size=batch_size, progress=seen.append)
    expected = (torch.tensor(levels)[:, None].expand(-1, 3) / 255 - 0.5) / 0.25
    assert features.dtype == torch.float32 and features.shape == (11, 3)
    assert torch.allclose(features, expected, atol=1e-5)  # a resize of a constant, in float32
    assert seen[-1] == 11 and seen == sorted(seen)
    some = torch.tensor([9, 0, 4])
    assert torch.equal(extract(MeanColour(), loader, STILL, batch_size=2, indices=some), features[some])


def test_the_backbone_is_left_as_it_was() -> None:
    backbone = network()
    backbone[1].eval()  # a part frozen by its owner stays frozen
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    loader = Loader(grey_images([3, 200, 90]))
    one, two = (extract(backbone, loader, STILL) for _ in range(2))
    assert torch.equal(one, two)  # no dropout
    assert [module.training for module in backbone] == [True, False, True, True, True, True]
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())


def test_the_training_mode_comes_back_after_a_failure() -> None:
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(7, 2))  # the wrong size
    with pytest.raises(RuntimeError):
        extract(backbone, Loader(grey_images([1, 2])), STILL)
    assert all(module.training for module in backbone.modules())


def test_features_are_those_of_a_plain_forward_and_can_be_trained_on() -> None:
    backbone, loader = network(), Loader(grey_images([3, 200, 90, 17]))
    features = extract(backbone, loader, STILL, batch_size=3)
    _, canvas = next(loader.batches([torch.arange(4)]))
    with torch.no_grad():
        expected = backbone.eval()(STILL(canvas))
    assert torch.allclose(features, expected, atol=1e-6)
    nn.Linear(5, 2)(features).sum().backward()  # inference tensors would refuse


def test_a_map_is_averaged_and_anything_else_refused() -> None:
    loader = Loader(grey_images([3, 200, 90]))
    backbone = network()
    pooled = extract(backbone, loader, STILL)
    assert torch.allclose(extract(backbone[:4], loader, STILL), pooled, atol=1e-6)
    with pytest.raises(UsageError, match=r"\(3, 3, 64\)"):
        extract(nn.Flatten(2), loader, STILL)


def test_bf16_is_near_fp32_and_returned_as_float32() -> None:
    backbone, loader = network(), Loader(grey_images([3, 200, 90]))
    fine, coarse = (extract(backbone, loader, STILL, precision=precision) for precision in ("fp32", "bf16"))
    assert coarse.dtype == torch.float32
    assert not torch.equal(coarse, fine)
    assert torch.allclose(coarse, fine, rtol=0.05, atol=0.02)  # 8 bits of mantissa over a 27-term sum


def test_features_fetched_in_several_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, loader = network(), Loader(grey_images(list(range(0, 250, 23))))
    whole = extract(backbone, loader, STILL, batch_size=2)
    monkeypatch.setattr("unitsphere.features.extract.VALUES_WAITING", 4 * 5)  # four images of five features
    assert torch.equal(extract(backbone, loader, STILL, batch_size=2), whole)


def test_bfloat16_keeps_what_a_backbone_gives_under_bf16() -> None:
    backbone, loader = network(), Loader(grey_images([3, 200, 90]))
    kept = extract(backbone, loader, STILL, precision="bf16", dtype=torch.bfloat16)
    assert kept.dtype == torch.bfloat16
    assert torch.equal(kept.float(), extract(backbone, loader, STILL, precision="bf16"))


def test_small_images_go_through_a_card_in_larger_batches() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    photo = Preprocess(224, 256, mean=(0.5,) * 3, std=(0.25,) * 3)
    assert images_at_once(photo, cuda) == images_at_once(STILL, cpu) == 256
    assert images_at_once(Preprocess(32, 32, STILL.mean, STILL.std), cuda) == 1024


@pytest.mark.parametrize("resident", [True, False])
def test_a_broken_image_has_no_features(tmp_path: Path, resident: bool) -> None:
    for n in range(6):
        Image.new("RGB", (10, 10), (40 * n,) * 3).save(tmp_path / f"{n}.png")
    (tmp_path / "2.png").write_bytes(b"this is no picture")
    loader = Loader(open_images(tmp_path, "train", holdout=0.0), resident=resident, max_broken=0.5)
    features = extract(MeanColour(), loader, STILL, batch_size=4)
    where = list(loader.images.names).index("2.png")
    assert features[where].isnan().all()
    assert usable_rows(features).tolist() == [n for n in range(6) if n != where]


def test_a_backbone_that_gives_only_nan_has_diverged() -> None:
    with pytest.raises(UnitsphereError, match="diverged"):
        usable_rows(torch.full((3, 2), torch.nan))


def bright_or_dark(n: int) -> tuple[Images, np.ndarray]:
    random = np.random.default_rng(0)
    labels = np.arange(n) % 2
    arrays = [random.integers(90 * label, 160 + 90 * label, (12, 12, 3)).astype(np.uint8) for label in labels]
    return Images("light", [str(i) for i in range(n)], labels, ("dark", "bright"), arrays.__getitem__), labels


def test_augmented_features_are_fresh_in_every_epoch_and_repeatable() -> None:
    images, _ = bright_or_dark(10)
    source = AugmentedFeatures(network(), Loader(images), STILL)
    batches = torch.randperm(10).split(4)
    epochs = [list(source.epoch(batches, seed=1, epoch=epoch)) for epoch in (0, 0, 1)]
    for first, again, other in zip(*epochs, strict=True):
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
        assert not torch.allclose(first[1], other[1], atol=1e-3)
    assert [indices.tolist() for indices, _ in epochs[0]] == [part.tolist() for part in batches]
    assert all(module.training for module in source.backbone.modules())


def test_augmented_features_without_augmentation_are_the_cached_ones() -> None:
    """On even grey images no crop or flip shows: the two sources must agree."""
    loader = Loader(grey_images([10, 60, 110, 160, 210]))
    augmented = AugmentedFeatures(network(), loader, STILL)
    cached = CachedFeatures(extract(augmented.backbone, loader, STILL))
    order = torch.tensor([4, 0, 2, 1, 3])
    assert torch.equal(augmented.still(order), cached.still(order))
    sources = (list(source.epoch(order.split(2), 0, 0)) for source in (augmented, cached))
    for (some, features), (others, expected) in zip(*sources, strict=True):
        assert torch.equal(some, others)
        assert torch.allclose(features, expected, atol=1e-5)


def test_the_faithful_linear_protocol_learns_and_leaves_the_backbone_alone() -> None:
    images, labels = bright_or_dark(60)
    backbone, loader = network(), Loader(images)
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    test = extract(backbone, loader, STILL)
    source = AugmentedFeatures(backbone, loader, STILL)
    protocol = LinearRecipe(lr=(5.0, 1e-6), batch_size=16, epochs=8, drops=(6,))
    result = linear(source, labels, test, labels, protocol)
    assert result.chosen.lr == 5.0 and result.chosen.top1 > 95
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    assert all(parameter.grad is None for parameter in backbone.parameters())
