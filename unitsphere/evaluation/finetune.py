"""Fine-tuning: a classifier on a backbone, both trained; or the classifier alone, where the backbone's rate is 0.

As in the linear protocols the classifier begins with N(0, 0.01), is trained on fresh crops and flips, and is judged on
the test images after the last epoch. With the backbone frozen it is the linear protocol in its faithful form.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unitsphere.common.devices import send
from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.common.randomness import generator
from unitsphere.data.loader import Loader
from unitsphere.evaluation.backbone import JudgedBackbone, Judgement, LabelledImages, accuracies
from unitsphere.evaluation.linear import Layers, count_classes, first_weights, tenth_to_choose_on, top_accuracies
from unitsphere.evaluation.recipes import FINE_TUNING_RECIPES, FineTuningRecipe, adapted
from unitsphere.evaluation.settings import FinetuneSettings
from unitsphere.features.extract import encode, extract, forward, fresh_views, frozen
from unitsphere.features.inputs import class_numbers, usable_rows
from unitsphere.modules.norms import GroupedBatchNorm
from unitsphere.views.evaluation import Preprocess
from unitsphere.views.policies import POLICIES

Progress = Callable[[int], None]
SMALL = 64  # inputs up to this size are fine-tuned on larger crops, as they are pre-trained on views of their own


def judge(backbone: JudgedBackbone, data: LabelledImages, settings: FinetuneSettings) -> Judgement:
    """Fine-tune on all training images. backbone.batch_size: the images of a step. The rates of the recipe follow it in
    proportion; given ones do not."""
    loaded, name = backbone.loaded, settings.recipe or "full"
    recipe = adapted(FINE_TUNING_RECIPES, name, settings.epochs)
    if backbone.batch_size is not None:
        recipe = recipe.with_batch_size(backbone.batch_size)
    if loaded.preprocess.size <= SMALL:
        recipe = replace(recipe, views="supervised-small")
    if settings.lr is not None:
        recipe = replace(recipe, lr=settings.lr)
    if settings.encoder_lr is not None:
        recipe = replace(recipe, encoder_lr=settings.encoder_lr)
    if not list(loaded.backbone.parameters()):  # pixels
        if settings.encoder_lr is not None and any(settings.encoder_lr):
            given = list(settings.encoder_lr)
            raise UsageError(f"encoder_lr: given {given}, but nothing in {loaded.name} can be trained. Leave it out.")
        recipe = replace(recipe, encoder_lr=(0.0,))
    train, test = backbone.open_labelled(data)
    found = finetune(
        loaded.backbone,
        train.loader,
        test.loader,
        loaded.preprocess,
        recipe,
        seed=settings.seed,
        device=backbone.device,
        precision=backbone.precision,
        progress=backbone.progress("fine-tuning", recipe.images(len(data.train))),
    )
    chosen = {"chosen_lr": found.chosen.lr, "chosen_encoder_lr": found.chosen.encoder_lr}
    return Judgement(
        value=accuracies(found.top1, found.top5),
        constants={**asdict(recipe), "recipe": name, **chosen},
        train=train,
        test=test,
        model=FineTunedModel(found.network.backbone, found.network.classifier, data.train.classes),
    )


@dataclass(frozen=True)
class FineTunedModel:
    """A backbone, the classifier on it, and the names of the classes where they have some."""

    backbone: nn.Module
    classifier: nn.Linear
    classes: tuple[str, ...] | None


@dataclass(frozen=True)
class Trial:
    """A pair of rates, and its accuracy in percent on held-out training images; None where nothing was to choose."""

    lr: float
    encoder_lr: float
    held_out: float | None


@dataclass(frozen=True)
class Network:
    backbone: nn.Module
    classifier: nn.Linear

    def finite(self) -> bool:
        everything = [*self.backbone.parameters(), *self.classifier.parameters()]
        return bool(torch.stack([parameter.isfinite().all() for parameter in everything]).all())


@dataclass(frozen=True)
class FineTuned:
    """What was trained, and its accuracy in percent on the test images; top5 only above five classes."""

    network: Network
    chosen: Trial
    trials: tuple[Trial, ...]
    top1: float
    top5: float | None


def finetune(
    backbone: nn.Module,
    train: Loader,
    test: Loader,
    preprocess: Preprocess,
    recipe: FineTuningRecipe = FINE_TUNING_RECIPES["full"],
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    progress: Progress | None = None,
) -> FineTuned:
    """Train a copy of the backbone under a classifier, judge it on the test images. `backbone` stays as it is.

    Several pairs of rates are compared on a stratified tenth of the training images; the best is then trained on all
    of them. The test images choose nothing. progress is called with the images seen, recipe.images(N) in all.
    """
    labels = class_numbers(train.images.labels, "the training images")
    truth = class_numbers(test.images.labels, "the test images")
    classes = count_classes(labels, truth)
    tuner = Tuner(backbone, train, labels, classes, preprocess, recipe, seed, torch.device(device), precision)
    trials = [Trial(lr, encoder_lr, None) for lr, encoder_lr in recipe.pairs]
    before = 0
    if len(trials) > 1:
        kept, held = tenth_to_choose_on(labels, seed)
        for number, trial in enumerate(trials):
            network = tuner.fit(kept, trial, shifted(progress, before))
            held_out = tuner.accuracies(network, train, labels, held)[0] if network.finite() else 0.0
            trials[number] = replace(trial, held_out=held_out)
            before += recipe.epochs * len(train)
    chosen = max(trials, key=lambda trial: trial.held_out or 0.0)
    network = tuner.fit(torch.arange(len(train)), chosen, shifted(progress, before))
    if not network.finite():
        raise UnitsphereError(
            f"fine-tuning diverged with rates {chosen.lr:g} (classifier) and {chosen.encoder_lr:g} (encoder). "
            "Take lower ones."
        )
    tops = tuner.accuracies(network, test, truth, torch.arange(len(test)))
    return FineTuned(network, chosen, tuple(trials), tops[0], tops[4] if classes > 5 else None)


def shifted(progress: Progress | None, before: int) -> Progress | None:
    return progress and (lambda done: progress(before + done))


@dataclass(frozen=True)
class Tuner:
    """labels: (N,) of the loader's images."""

    backbone: nn.Module
    loader: Loader
    labels: Tensor
    classes: int
    preprocess: Preprocess
    recipe: FineTuningRecipe
    seed: int
    device: torch.device
    precision: str

    def fit(self, indices: Tensor, trial: Trial, progress: Progress | None) -> Network:
        """The network after the last epoch on the images of `indices`."""
        recipe, seed, policy = self.recipe, self.seed, POLICIES[self.recipe.views]
        network = self.new_network(trains=trial.encoder_lr > 0)
        optimizer = torch.optim.SGD(
            [{"params": list(network.classifier.parameters())}, {"params": list(network.backbone.parameters())}],
            lr=trial.lr,
            momentum=recipe.momentum,
            nesterov=recipe.nesterov,
            weight_decay=recipe.weight_decay,
            fused=self.device.type == "cuda" or None,
        )
        # Equal parts: batch statistics of a few images left over would be poor, and one image has none.
        steps = max(1, min(math.ceil(len(indices) / recipe.batch_size), len(indices) // 2))
        for epoch in range(recipe.epochs):
            for group, rate in zip(optimizer.param_groups, (trial.lr, trial.encoder_lr), strict=True):
                group["lr"] = rate * recipe.factor(epoch)
            order = indices[torch.randperm(len(indices), generator=generator(seed, "linear-order", epoch))]
            seen = epoch * len(indices)
            batches = order.tensor_split(steps)
            for delivered, views in fresh_views(self.loader, batches, self.preprocess, seed, epoch, policy):
                optimizer.zero_grad(set_to_none=True)
                scores = network.classifier(encode(network.backbone, views.to(self.device), self.precision))
                cross_entropy(scores, send(self.labels[delivered], self.device)).backward()
                optimizer.step()
                seen += len(delivered)
                if progress:
                    progress(seen)
        return network

    def new_network(self, trains: bool) -> Network:
        """A copy of the backbone under a new classifier. One that trains has its norms in training mode, over the whole
        batch whatever the groups of its pre-training; one that does not is in evaluation mode."""
        seen, device = self.preprocess, self.device
        encoder = copy.deepcopy(self.backbone).to(device)
        for norm in encoder.modules():
            if isinstance(norm, GroupedBatchNorm):
                norm.groups = 1
        with frozen(encoder):
            dim = forward(encoder, torch.zeros(1, seen.channels, seen.size, seen.size, device=device), "fp32").shape[1]
        classifier = nn.Linear(dim, self.classes, device=device)
        with torch.no_grad():
            classifier.weight.copy_(first_weights(self.classes, dim, self.seed))
            classifier.bias.zero_()
        return Network(encoder.requires_grad_(trains).train(trains), classifier)

    def accuracies(self, network: Network, loader: Loader, labels: Tensor, indices: Tensor) -> list[float]:
        """Percent, among the best 1, 2, .. 5 scores, of those images of `indices` that can be read."""
        features = extract(
            network.backbone,
            loader,
            self.preprocess,
            indices=indices,
            device=self.device,
            precision=self.precision,
        )
        rows = usable_rows(features)
        layers = Layers(network.classifier.weight.detach()[None], network.classifier.bias.detach()[None])
        return top_accuracies(layers, features[rows], labels[indices[rows]])[0].tolist()
