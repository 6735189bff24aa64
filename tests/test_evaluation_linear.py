from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.common.randomness import generator as seeded
from unitsphere.evaluation.linear import (
    Layers,
    linear,
    sgd_step,
    shuffled_batches,
    top_accuracies,
    train_linear,
)
from unitsphere.evaluation.recipes import LINEAR_RECIPES, LinearRecipe
from unitsphere.features.extract import CachedFeatures
from unitsphere.features.inputs import stratified_split


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Products this small are slower on several threads, and very slow where other work shares the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


QUICK = LinearRecipe(lr=(1.0,), batch_size=32, epochs=6, drops=(3, 5))


def clusters(n: int, classes: int = 6, dim: int = 8, seed: int = 0, spread: float = 1.2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(99))
    labels = torch.arange(n) % classes
    return centres[labels] + spread * torch.randn(n, dim, generator=generator), labels


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_steps_are_those_of_autograd_and_torch_sgd(nesterov: bool, weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (40,), generator=generator)
    rates = [0.3, 0.05]
    oracles = [nn.Linear(5, 3, dtype=torch.float64) for _ in rates]
    layers = Layers(
        torch.stack([o.weight.detach().clone() for o in oracles]),
        torch.stack([o.bias.detach().clone() for o in oracles]),
    )
    momenta = Layers(torch.zeros_like(layers.weight), torch.zeros_like(layers.bias))
    protocol = LinearRecipe(nesterov=nesterov, weight_decay=weight_decay)
    optimisers = [
        torch.optim.SGD(o.parameters(), lr, momentum=0.9, nesterov=nesterov, weight_decay=weight_decay)
        for o, lr in zip(oracles, rates, strict=True)
    ]
    for part in torch.arange(40).split(16):  # the last batch is partial
        sgd_step(layers, momenta, x[part], y[part], torch.tensor(rates, dtype=torch.float64)[:, None], protocol)
        for oracle, optimiser in zip(oracles, optimisers, strict=True):
            optimiser.zero_grad()
            cross_entropy(oracle(x[part]), y[part]).backward()
            optimiser.step()
    for n, oracle in enumerate(oracles):
        assert torch.allclose(layers.weight[n], oracle.weight, atol=1e-12)
        assert torch.allclose(layers.bias[n], oracle.bias, atol=1e-12)


def test_training_is_torch_sgd_under_a_multi_step_schedule() -> None:
    x, y = clusters(96)
    batches = shuffled_batches(CachedFeatures(x), y, torch.arange(96), 32, seed=0)
    oracle = nn.Linear(8, 6)
    start = train_linear(lambda epoch: [], 8, 6, QUICK)
    oracle.load_state_dict({"weight": start.weight[0], "bias": start.bias[0]})
    optimiser = torch.optim.SGD(oracle.parameters(), QUICK.lr[0], QUICK.momentum)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, list(QUICK.drops), QUICK.gamma)
    for epoch in range(QUICK.epochs):
        for features, labels in batches(epoch):
            optimiser.zero_grad()
            cross_entropy(oracle(features), labels).backward()
            optimiser.step()
        schedule.step()
    layers = train_linear(batches, 8, 6, QUICK)
    assert torch.allclose(layers.weight[0], oracle.weight, atol=1e-4)  # 18 float32 steps of weights near 1


def test_training_approaches_the_optimum_of_logistic_regression() -> None:
    x, y = clusters(600)
    test, truth = clusters(3000, seed=1)
    oracle = LogisticRegression(C=1e6, max_iter=2000, tol=1e-8).fit(x.double().numpy(), y.numpy())
    least = -oracle.predict_log_proba(x.double().numpy())[np.arange(600), y.numpy()].mean()

    protocol = LinearRecipe(lr=(0.5,), batch_size=300, epochs=400, drops=(300,))
    batches = shuffled_batches(CachedFeatures(x), y, torch.arange(600), 300, seed=0)
    layers = train_linear(batches, 8, 6, protocol)
    loss = cross_entropy(layers(x)[:, 0], y).item()
    assert least - 1e-5 <= loss <= least + 1e-3  # float32, and SGD stops short of the optimum
    accuracy = top_accuracies(layers, test, truth)[0, 0].item()
    # near the same optimum, only points at the boundary can differ
    assert accuracy == pytest.approx(100 * oracle.score(test.numpy(), truth.numpy()), abs=0.3)


def test_several_rates_at_once_are_several_trainings() -> None:
    x, y = clusters(200)
    test, truth = clusters(100, seed=1)
    rates = (3.0, 0.1, 0.01)
    together = linear(CachedFeatures(x), y, test, truth, replace(QUICK, lr=rates))
    alone = [linear(CachedFeatures(x), y, test, truth, replace(QUICK, lr=(lr,))) for lr in rates]
    assert [r.lr for r in together.rates] == list(rates)
    # float32 sums in another order may turn one of the 100 test images
    for one, of_many in zip(alone, together.rates, strict=True):
        assert one.chosen.top1 == pytest.approx(of_many.top1, abs=1.0)
        assert one.chosen.held_out is None
    batches = shuffled_batches(CachedFeatures(x), y, torch.arange(200), 32, seed=0)
    layers = train_linear(batches, 8, 6, replace(QUICK, lr=rates))
    for n, lr in enumerate(rates):
        single = train_linear(batches, 8, 6, replace(QUICK, lr=(lr,)))
        assert torch.allclose(layers.weight[n], single.weight[0], atol=1e-4)


def test_the_rate_is_chosen_on_held_out_training_images_only() -> None:
    """Test labels are shuffled so that the useless rate wins on the test images: it must not be chosen."""
    x, y = clusters(600, spread=0.5)
    protocol = replace(QUICK, lr=(1e-9, 0.5))
    useless = train_linear(
        shuffled_batches(CachedFeatures(x), y, torch.arange(600), 32, 0), 8, 6, replace(QUICK, lr=(1e-9,))
    )
    fooled = useless(x)[:, 0].argmax(1)  # what the untrained layer says is declared true
    result = linear(CachedFeatures(x), y, x, fooled, protocol)
    worst, best = result.rates
    assert worst.top1 > best.top1
    assert result.chosen == best
    assert best.held_out is not None and worst.held_out is not None and best.held_out > 90 > worst.held_out


def test_top_accuracies_count_the_best_five() -> None:
    layers = Layers(torch.eye(7)[None], torch.zeros(1, 7))
    scores = torch.tensor([[7.0, 6, 5, 4, 3, 2, 1]]).repeat(4, 1)
    accuracies = top_accuracies(layers, scores, torch.tensor([0, 1, 4, 6]))
    assert accuracies.tolist() == [[25, 50, 50, 50, 75]]


def test_top5_is_reported_only_above_five_classes() -> None:
    x, y = clusters(60, classes=6)
    top5 = linear(CachedFeatures(x), y, x, y, QUICK).chosen.top5
    assert top5 is not None and top5 <= 100
    assert linear(CachedFeatures(x), y % 5, x, y % 5, QUICK).chosen.top5 is None


def test_every_epoch_shows_every_image_once_in_an_order_of_its_own() -> None:
    x = torch.arange(10.0)[:, None]
    labels = torch.arange(100, 110)
    chosen = torch.tensor([1, 3, 5, 7, 9])
    batches = shuffled_batches(CachedFeatures(x), labels, chosen, 2, seed=3)
    epochs = [[(f[:, 0].tolist(), y.tolist()) for f, y in batches(epoch)] for epoch in range(4)]
    for epoch in epochs:
        assert [len(f) for f, _ in epoch] == [2, 2, 1]
        assert sorted(v for f, _ in epoch for v in f) == [1, 3, 5, 7, 9]
        assert all([100 + v for v in f] == y for f, y in epoch)
    assert len({str(epoch) for epoch in epochs}) > 1
    again = shuffled_batches(CachedFeatures(x), labels, chosen, 2, seed=3)
    assert [(f[:, 0].tolist(), y.tolist()) for f, y in again(2)] == epochs[2]


def test_the_start_is_small_gaussian_with_zero_bias() -> None:
    layers = train_linear(lambda epoch: [], 400, 50, replace(LINEAR_RECIPES["moco"], lr=(30.0, 10.0)))
    assert layers.weight.std().item() == pytest.approx(0.01, rel=0.03)  # 20,000 draws: error 0.5 %
    assert layers.bias.count_nonzero() == 0
    assert torch.equal(layers.weight[0], layers.weight[1])


def test_the_rate_drops_after_the_stated_epochs() -> None:
    factors = [LINEAR_RECIPES["mochi-imagenet100"].factor(epoch) for epoch in (0, 29, 30, 39, 40, 49, 50, 59)]
    assert factors == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_progress_counts_epochs_over_both_trainings() -> None:
    x, y = clusters(60)
    seen: list[int] = []
    linear(CachedFeatures(x), y, x, y, replace(QUICK, lr=(1.0, 0.1), epochs=2), progress=seen.append)
    assert seen == [1, 2, 3, 4]


def test_the_same_seed_gives_the_same_number_and_another_seed_another_training() -> None:
    x, y = clusters(200)
    batches = shuffled_batches(CachedFeatures(x), y, torch.arange(200), 32, 0)
    one, two = (train_linear(batches, 8, 6, QUICK, seed=seed).weight for seed in (0, 1))
    assert torch.equal(one, train_linear(batches, 8, 6, QUICK, seed=0).weight)
    assert not torch.allclose(one, two, atol=1e-4)


def test_a_stratified_split_holds_out_a_share_of_every_class() -> None:
    labels = torch.tensor([0] * 100 + [1] * 11 + [2] * 2 + [5])
    kept, held = stratified_split(labels, 0.1, torch.Generator().manual_seed(0))
    assert torch.equal(torch.cat([kept, held]).sort().values, torch.arange(len(labels)))
    assert labels[held].bincount(minlength=6).tolist() == [10, 2, 1, 0, 0, 0]
    assert held[:10].tolist() != list(range(10))


def test_labels_that_cannot_be_learned_are_refused() -> None:
    x, y = clusters(60)
    cached = CachedFeatures(x)
    with pytest.raises(UsageError, match="training images have none"):
        linear(cached, None, x, y)
    with pytest.raises(UsageError, match="test images have none"):
        linear(cached, y, x, None)
    with pytest.raises(UsageError, match="at least 2"):
        linear(cached, torch.zeros_like(y), x, torch.zeros_like(y))
    with pytest.raises(UsageError, match=r"training images lack: \[6, 8\]"):
        linear(cached, y, x[:3], torch.tensor([0, 8, 6]))


def test_features_that_are_not_finite_are_an_error() -> None:
    x, y = clusters(60)
    broken = x.clone()
    broken[7] = torch.nan
    with pytest.raises(UnitsphereError, match="1 of 60 of the test images"):
        linear(CachedFeatures(x), y, broken, y, QUICK)
    with pytest.raises(UnitsphereError, match="diverged"):
        linear(CachedFeatures(broken), y, x, y, QUICK)


def test_a_rate_that_diverges_is_not_chosen_and_spoils_no_other() -> None:
    train, labels = clusters(300)
    test, truth = clusters(200, seed=1)
    wild = replace(QUICK, lr=(1.0, float("inf")))
    found = linear(CachedFeatures(train), labels, test, truth, wild)
    assert found.chosen.lr == 1.0 and found.chosen.top1 > 50
    with pytest.raises(UnitsphereError, match="diverged"):
        linear(CachedFeatures(train), labels, test, truth, replace(QUICK, lr=(float("inf"),)))


def test_a_rate_that_diverges_only_on_all_images_is_not_chosen() -> None:
    """The better rate meets a huge feature only once the held-out tenth is trained on too."""
    x, y = clusters(300)
    _, held = stratified_split(y, 0.1, seeded(0, "linear-held-out"))
    x[held[0]] = 1e25
    found = linear(CachedFeatures(x), y, *clusters(60, seed=1), replace(QUICK, lr=(1.0, 1e-30)))
    wild, tame = found.rates
    assert wild.held_out is not None and tame.held_out is not None and wild.held_out > tame.held_out
    assert found.chosen == tame
