"""Fine-tuning: against the linear protocol, and on something that a frozen random backbone cannot do."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.common.randomness import generator
from unitsphere.data.images import Images
from unitsphere.data.loader import Loader
from unitsphere.evaluation.finetune import finetune
from unitsphere.evaluation.linear import linear, shuffled_batches, train_linear
from unitsphere.evaluation.recipes import FINE_TUNING_RECIPES, FineTuningRecipe
from unitsphere.features.extract import AugmentedFeatures, extract
from unitsphere.features.inputs import stratified_split
from unitsphere.modules.backbones import TinyResNet
from unitsphere.modules.norms import part_batch_norms
from unitsphere.views.evaluation import Preprocess

SEEN = Preprocess(size=8, resize=8, mean=(0.5,) * 3, std=(0.25,) * 3)
QUICK = FineTuningRecipe(lr=(0.2,), encoder_lr=(0.1,), batch_size=16, epochs=4)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stripes(count: int, seed: int, classes: int = 2) -> Loader:
    """Noise whose columns (class 0) or rows (class 1) alternate: the colours tell nothing. More classes: finer ones."""
    draws = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    pixels = draws.integers(60, 140, (count, 8, 8, 3))
    for n, label in enumerate(labels):
        wave = 50 * (np.arange(8) // (1 + label // 2) % 2)
        pixels[n] += (wave if label % 2 else wave[:, None])[..., None]
    names = [str(n) for n in range(count)]
    kinds = tuple(f"class {n}" for n in range(classes))
    return Loader(Images("stripes", names, labels, kinds, lambda n: pixels[n].astype(np.uint8)))


def backbone(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TinyResNet(width=4).eval()


def everything(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_fine_tuning_changes_the_backbone_and_beats_the_frozen_one() -> None:
    train, test = stripes(96, 0), stripes(100, 1)
    start = backbone()
    before = everything(start)
    frozen = finetune(start, train, test, SEEN, replace(QUICK, epochs=8, encoder_lr=(0.0,)))
    tuned = finetune(start, train, test, SEEN, replace(QUICK, epochs=8))
    assert same(everything(start), before) and not start.training  # what was given stays as it was
    assert same(everything(frozen.network.backbone), before)  # bit for bit, statistics included
    after = everything(tuned.network.backbone)
    assert all(not torch.equal(after[name], before[name]) for name in before)  # statistics included
    assert tuned.top1 > 90 > frozen.top1


def test_the_frozen_form_is_the_linear_protocol_on_fresh_views() -> None:
    train, test = stripes(96, 0), stripes(50, 1)
    rules = replace(QUICK, encoder_lr=(0.0,), weight_decay=1e-3)
    found = finetune(backbone(), train, test, SEEN, rules, seed=7)
    source = AugmentedFeatures(backbone(), train, SEEN)
    labels = torch.as_tensor(train.images.labels)
    layers = train_linear(shuffled_batches(source, labels, torch.arange(96), 16, 7), 16, 2, rules, seed=7)
    assert torch.allclose(found.network.classifier.weight, layers.weight[0], atol=1e-5)  # 24 float32 steps
    result = linear(source, labels, extract(backbone(), test, SEEN), test.images.labels, rules, seed=7)
    assert found.top1 == pytest.approx(result.chosen.top1, abs=2.0)  # one of 50 images may lie on the boundary


def test_one_step_moves_each_part_by_its_own_rate() -> None:
    """From one gradient: twice the encoder's rate moves the encoder twice as far and the classifier as before."""
    train, test = stripes(16, 0), stripes(10, 1)
    once = replace(QUICK, epochs=1, nesterov=False, lr=(0.3,), encoder_lr=(0.001,))
    start = backbone()
    one = finetune(start, train, test, SEEN, once).network
    two = finetune(start, train, test, SEEN, replace(once, encoder_lr=(0.002,))).network
    assert torch.equal(one.classifier.weight, two.classifier.weight)
    for first, (name, begin), second in zip(
        one.backbone.parameters(), start.named_parameters(), two.backbone.parameters(), strict=True
    ):
        moved = first - begin
        assert moved.abs().max() > 0, name
        assert torch.allclose(second - begin, 2 * moved, atol=1e-6), name  # weights near 1 in float32


def test_the_same_seed_gives_the_same_network_and_another_another() -> None:
    train, test = stripes(40, 0), stripes(10, 1)
    rules = replace(QUICK, epochs=1)
    one, again, other = (
        everything(finetune(backbone(), train, test, SEEN, rules, seed=s).network.backbone) for s in (0, 0, 1)
    )
    assert same(one, again) and not same(one, other)


def test_rates_follow_a_cosine_or_drop() -> None:
    assert [replace(QUICK, epochs=4).factor(epoch) for epoch in range(4)] == pytest.approx(
        [(1 + np.cos(np.pi * epoch / 4)) / 2 for epoch in range(4)]
    )
    assert [replace(QUICK, drops=(2, 3)).factor(epoch) for epoch in range(4)] == pytest.approx([1, 1, 0.1, 0.01])


def test_rates_are_chosen_on_held_out_training_images_only() -> None:
    """The test labels are turned round, so that the rate that learns nothing looks better there."""
    train, test = stripes(96, 0), stripes(100, 1)
    turned = Loader(replace(test.images, labels=1 - test.images.labels))
    seen: list[int] = []
    rules = replace(QUICK, lr=(1e-6, 0.2), encoder_lr=(0.0, 0.1), epochs=3)
    found = finetune(backbone(), train, turned, SEEN, rules, progress=seen.append)
    assert [(trial.lr, trial.encoder_lr) for trial in found.trials] == rules.pairs and len(rules.pairs) == 4
    assert found.chosen == max(found.trials, key=lambda trial: trial.held_out)
    assert found.chosen.lr == 0.2 and found.chosen.encoder_lr == 0.1 and found.top1 < 40
    assert seen == sorted(seen) and seen[-1] == rules.images(96) == 5 * 3 * 96
    again = finetune(backbone(), train, test, SEEN, replace(rules, lr=(0.2,), encoder_lr=(0.1,)))
    assert same(everything(again.network.backbone), everything(found.network.backbone))  # the best, on all images


def test_the_held_out_tenth_is_not_trained_on() -> None:
    """A rate so wild that it breaks wherever it meets the one huge image is fine while that image is held out."""
    train = stripes(60, 0)
    _, held = stratified_split(torch.as_tensor(train.images.labels), 0.1, generator(0, "linear-held-out"))
    tuned: list[Tensor] = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, images: Tensor) -> Tensor:
            if self.training:
                tuned.append(images.detach().amax((1, 2, 3)))
            return self.scale * images.mean((2, 3))

    images = train.images
    marked = replace(images, read=lambda n: np.full((8, 8, 3), 255 if n in held.tolist() else 100, np.uint8))
    finetune(Watching(), Loader(marked), stripes(10, 1), SEEN, replace(QUICK, lr=(0.1, 0.2), epochs=1))
    bright = torch.cat(tuned) > 1.9  # (1 - 0.5) / 0.25
    assert bright[:108].sum() == 0 and bright[108:].sum() == len(held) == 6  # two trials of 54 images, then all 60


def test_parts_of_an_epoch_are_equal() -> None:
    sizes: list[int] = []

    class Counting(nn.Flatten):
        def forward(self, images: Tensor) -> Tensor:
            if len(images) > 1 and torch.is_grad_enabled():
                sizes.append(len(images))
            return super().forward(images)

    finetune(Counting(), stripes(33, 0), stripes(4, 1), SEEN, replace(QUICK, epochs=1))
    assert sizes == [11, 11, 11]  # not 16, 16 and 1
    sizes.clear()
    finetune(Counting(), stripes(5, 0), stripes(4, 1), SEEN, replace(QUICK, epochs=1, batch_size=2))
    assert sizes == [3, 2]  # not 2, 2 and 1: one image has no batch statistics


def test_groups_of_norms_belong_to_pre_training() -> None:
    train, test = stripes(30, 0), stripes(10, 1)
    plain = finetune(backbone(), train, test, SEEN, replace(QUICK, epochs=1))
    grouped = copy.deepcopy(backbone())
    part_batch_norms(grouped, 8)
    found = finetune(grouped, train, test, SEEN, replace(QUICK, epochs=1))
    one, other = everything(plain.network.backbone), everything(found.network.backbone)
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)  # two steps in float32


def test_top5_only_above_five_classes_and_broken_test_images_are_left_out() -> None:
    six = finetune(backbone(), stripes(36, 0, 6), stripes(12, 1, 6), SEEN, replace(QUICK, epochs=1))
    assert six.top5 is not None and six.top1 <= six.top5 <= 100
    test = stripes(10, 1)
    good = finetune(backbone(), stripes(16, 0), test, SEEN, QUICK)
    spoilt = replace(test.images, read=lambda n: b"no image" if n == 3 else test.images.read(n))
    found = finetune(backbone(), stripes(16, 0), Loader(spoilt, max_broken=0.5), SEEN, QUICK)
    assert good.top5 is None and found.top1 * 9 / 100 == pytest.approx(round(found.top1 * 9 / 100))


def test_rates_that_diverge_are_not_chosen_and_alone_an_error() -> None:
    train, test = stripes(32, 0), stripes(10, 1)
    found = finetune(backbone(), train, test, SEEN, replace(QUICK, encoder_lr=(1e30, 0.1)))
    assert found.chosen.encoder_lr == 0.1 and found.trials[0].held_out == 0
    with pytest.raises(UnitsphereError, match=r"diverged with rates 0.2 \(classifier\) and 1e\+30"):
        finetune(backbone(), train, test, SEEN, replace(QUICK, encoder_lr=(1e30,)))


def test_one_image_of_each_class_leaves_none_to_choose_on() -> None:
    train = stripes(2, 0)
    with pytest.raises(UsageError, match="Give one rate each"):
        finetune(backbone(), train, stripes(4, 1), SEEN, replace(QUICK, lr=(0.1, 0.2)))
    assert finetune(backbone(), train, stripes(4, 1), SEEN, replace(QUICK, epochs=1)).chosen.held_out is None


def test_the_rows_are_the_supplements() -> None:
    few, more = FINE_TUNING_RECIPES["msbreg-1%"], FINE_TUNING_RECIPES["msbreg-10%"]
    assert (few.lr, few.encoder_lr, more.lr, more.encoder_lr) == ((2.0,), (0.0,), (0.25,), (2.5e-4,))
    for row in (few, more):
        assert (row.batch_size, row.momentum, row.nesterov, row.weight_decay) == (1024, 0.9, True, 0.0)
