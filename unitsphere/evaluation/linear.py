"""Linear classification on frozen features: MoCo's protocol and its relatives.

One fully connected layer under a softmax is trained by SGD on what a frozen backbone gives, and judged on
the test images after the last epoch. Several learning rates are trained side by side on the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.common.randomness import generator
from unitsphere.evaluation.backbone import JudgedBackbone, Judgement, LabelledImages, LinearModel, accuracies
from unitsphere.evaluation.recipes import LINEAR_RECIPES, TRANSFER, LinearRecipe, adapted
from unitsphere.evaluation.settings import LinearSettings
from unitsphere.features.extract import AugmentedFeatures, CachedFeatures, Features
from unitsphere.features.inputs import class_numbers, require_finite, stratified_split, usable_rows

HELD_OUT = 0.1  # of the training images, to choose between learning rates


def judge(backbone: JudgedBackbone, data: LabelledImages, settings: LinearSettings) -> Judgement:
    """Train the layer on all training images and judge it on the test images."""
    name = settings.recipe or "moco"
    recipe = adapted(LINEAR_RECIPES, name, settings.epochs)
    if settings.lr is not None:
        recipe = replace(recipe, lr=settings.lr)
    train, test = backbone.open_labelled(data)
    refuse_unknown_classes(data)
    queries, truth = backbone.frozen_features(test, "features to judge")
    loaded, labels = backbone.loaded, data.train.labels
    source: CachedFeatures | AugmentedFeatures
    if settings.augment:
        source = AugmentedFeatures(
            loaded.backbone, train.loader, loaded.preprocess, backbone.device, backbone.precision
        )
    else:
        features, labels = backbone.frozen_features(train, "features to train on")
        source = CachedFeatures(backbone.where_it_fits(features))
    epochs = recipe.epochs * (2 if len(recipe.lr) > 1 else 1)
    found = linear(
        source,
        labels,
        queries,
        truth,
        recipe,
        seed=settings.seed,
        device=backbone.device,
        progress=backbone.progress("linear", epochs),
    )
    return Judgement(
        value=accuracies(found.chosen.top1, found.chosen.top5),
        constants={**asdict(recipe), "recipe": name, "augment": settings.augment, "chosen_lr": found.chosen.lr},
        train=train,
        test=test,
        model=LinearModel(found.weight, found.bias, data.train.classes),
    )


def judge_transfer(backbone: JudgedBackbone, data: LabelledImages, settings: LinearSettings) -> Judgement:
    """Do the same with MSBReg's settings for this data set; other data have those of iNaturalist, the longer ones."""
    recipe = settings.recipe or (data.train.name if data.train.name in TRANSFER else "inaturalist2018")
    return judge(backbone, data, settings.model_copy(update={"recipe": recipe}))


@dataclass(frozen=True)
class Layers:
    """L linear layers side by side: weight (L, C, F), bias (L, C)."""

    weight: Tensor
    bias: Tensor

    def finite(self) -> Tensor:
        """(L,) which of them have not diverged."""
        return (self.weight.flatten(1).isfinite().all(1) & self.bias.isfinite().all(1)).cpu()

    def __call__(self, features: Tensor) -> Tensor:
        """(N, F) to scores (N, L, C)."""
        scores = torch.addmm(self.bias.flatten(), features, self.weight.flatten(0, 1).T)
        return scores.unflatten(1, self.bias.shape)


@dataclass(frozen=True)
class Rate:
    """What one learning rate gave, in percent; held_out is None where there was nothing to choose."""

    lr: float
    held_out: float | None
    top1: float
    top5: float | None


@dataclass(frozen=True)
class LinearResult:
    """The accuracy on the test images after the last epoch, the rates it was chosen from, and the chosen layer: weight
    (C, F), bias (C,)."""

    chosen: Rate
    rates: tuple[Rate, ...]
    weight: Tensor
    bias: Tensor


def linear(
    train: Features,
    train_labels: Tensor | np.ndarray | None,
    test: Tensor,
    test_labels: Tensor | np.ndarray | None,
    recipe: LinearRecipe = LINEAR_RECIPES["moco"],
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> LinearResult:
    """Train on `train`, judge on the test features (N, F).

    Several rates are compared on a stratified tenth of the training images; all are then trained on all of
    them, and the one that was best on that tenth is the result. The test images choose nothing.
    progress is called with the number of epochs trained, recipe.epochs in all (twice that to choose).
    """
    train_labels = class_numbers(train_labels, "the training images")
    test_labels = class_numbers(test_labels, "the test images")
    require_finite(test, "the test images")
    classes = count_classes(train_labels, test_labels)

    def fit(indices: Tensor, epochs_before: int) -> Layers:
        batches = shuffled_batches(train, train_labels, indices, recipe.batch_size, seed)
        report = progress and (lambda epoch: progress(epochs_before + epoch))
        layers = train_linear(batches, test.shape[1], classes, recipe, seed=seed, device=device, progress=report)
        require_any(layers.finite(), recipe)
        return layers

    held_out: list[float | None] = [None] * len(recipe.lr)
    survives = torch.ones(len(recipe.lr), dtype=torch.bool)
    choosing = len(recipe.lr) > 1
    if choosing:
        kept, held = tenth_to_choose_on(train_labels, seed)
        features = train.still(held)
        whole = usable_rows(features)
        tried = fit(kept, 0)
        survives = tried.finite()
        held_out = top_accuracies(tried, features[whole], train_labels[held[whole]])[:, 0].tolist()
    layers = fit(torch.arange(len(train_labels)), recipe.epochs if choosing else 0)
    survives = survives & layers.finite()
    require_any(survives, recipe)
    tops = top_accuracies(layers, test, test_labels).tolist()
    rates = tuple(
        Rate(lr, held, top[0], top[4] if classes > 5 else None)
        for lr, held, top in zip(recipe.lr, held_out, tops, strict=True)
    )
    eligible = [place for place, alive in enumerate(survives.tolist()) if alive]
    best = max(eligible, key=lambda place: rates[place].held_out or 0.0)
    return LinearResult(rates[best], rates, layers.weight[best], layers.bias[best])


def tenth_to_choose_on(labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    kept, held = stratified_split(labels, HELD_OUT, generator(seed, "linear-held-out"))
    if not len(held):
        raise UsageError(
            f"lr: several rates are compared on a tenth of each class; {len(labels)} images, one of each class, leave "
            "none to compare on. Give one rate each."
        )
    return kept, held


def require_any(survives: Tensor, recipe: LinearRecipe) -> None:
    if not survives.any():
        raise UnitsphereError(
            f"linear: the classifier diverged with lr {recipe.lr}. Take a lower one; and all features must be finite "
            "and not huge."
        )


def count_classes(train_labels: Tensor, test_labels: Tensor) -> int:
    """How many outputs the layer needs, from the training labels alone."""
    known = train_labels.unique()
    if len(known) < 2:
        raise UsageError(f"labels: the training images have {len(known)} class; a classifier needs at least 2.")
    unknown = test_labels[~torch.isin(test_labels, known)].unique().tolist()
    if unknown:
        raise UsageError(
            f"labels: the test images have classes that the training images lack: {unknown[:10]} (training "
            f"has {len(known)} classes). Take both from the same data set, or name the classes to use."
        )
    return int(known.max()) + 1


def refuse_unknown_classes(data: LabelledImages) -> None:
    """Raise UsageError where test images have a class that is never taught: they cannot be judged right."""
    count_classes(*(class_numbers(images.labels, images.name) for images in (data.train, data.test)))


def shuffled_batches(
    source: Features, labels: Tensor, indices: Tensor, batch_size: int, seed: int
) -> Callable[[int], Iterator[tuple[Tensor, Tensor]]]:
    """epoch -> (features, labels) of those images in an order of its own, the last partial batch included."""
    labels = labels.to(source.asked_on)

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = indices[torch.randperm(len(indices), generator=generator(seed, "linear-order", epoch))]
        for chosen, features in source.epoch(order.to(source.asked_on).split(batch_size), seed, epoch):
            yield features, labels[chosen]

    return batches


def train_linear(
    batches: Callable[[int], Iterable[tuple[Tensor, Tensor]]],
    dim: int,
    classes: int,
    recipe: LinearRecipe,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Layers:
    """The layers after the last epoch, one for each rate, all from the same start N(0, 0.01) with zero bias.

    batches: epoch (from 0) -> features (n, dim) and labels (n,) of each mini-batch.
    """
    start = first_weights(classes, dim, seed)
    rates = torch.tensor(recipe.lr, device=device)[:, None]
    bias = torch.zeros(len(rates), classes, device=device)
    layers = Layers(start.repeat(len(rates), 1, 1).to(device), bias)
    momenta = Layers(torch.zeros_like(layers.weight), torch.zeros_like(layers.bias))
    for epoch in range(recipe.epochs):
        now = rates * recipe.factor(epoch)
        for features, labels in batches(epoch):
            sgd_step(layers, momenta, features.to(device), labels.to(device, non_blocking=True), now, recipe)
        if progress:
            progress(epoch + 1)
    return layers


def first_weights(classes: int, dim: int, seed: int) -> Tensor:
    """(C, F) from N(0, 0.01)."""
    return 0.01 * torch.randn(classes, dim, generator=generator(seed, "linear-start"))


def sgd_step(
    layers: Layers, momenta: Layers, features: Tensor, labels: Tensor, rates: Tensor, recipe: LinearRecipe
) -> None:
    """One step of torch's SGD on the mean cross-entropy of each layer, in place. rates: (L, 1).

    Written out, for the gradient is one difference and one product: softmax less one-hot, times the features.
    """
    error = layers(features).softmax(2)  # (N, L, C)
    error -= one_hot(labels, error.shape[2])[:, None]
    error /= len(features)
    weight_gradient = (error.flatten(1).T @ features).view_as(layers.weight)
    for parameter, momentum, gradient, rate in (
        (layers.weight, momenta.weight, weight_gradient, rates[:, None]),
        (layers.bias, momenta.bias, error.sum(0), rates),
    ):
        if recipe.weight_decay:
            gradient.add_(parameter, alpha=recipe.weight_decay)
        momentum.mul_(recipe.momentum).add_(gradient)
        direction = gradient.add_(momentum, alpha=recipe.momentum) if recipe.nesterov else momentum
        parameter.addcmul_(direction, rate, value=-1)


def top_accuracies(layers: Layers, features: Tensor, labels: Tensor) -> Tensor:
    """(L, t) percent: how often the class is among the best 1, 2, .. t = min(5, C) scores."""
    hits = torch.zeros(len(layers.bias), min(5, layers.bias.shape[1]))
    for part, truth in zip(features.split(4096), labels.split(4096), strict=True):
        ranked = layers(part.to(layers.bias.device)).topk(hits.shape[1], dim=2).indices.cpu()
        hits += (ranked == truth[:, None, None]).cumsum(2).sum(0)
    return (100 * hits / len(features)).where(layers.finite()[:, None], 0.0)  # a diverged layer knows nothing
