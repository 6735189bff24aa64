"""How the papers train a classifier on a backbone: a recipe for each, by name. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

from unitsphere.optimisation.schedules import learning_rate


@dataclass(frozen=True)
class LinearRecipe:
    """How a linear layer is trained. lr: one rate, or several to choose from; drops: the numbers of epochs after
    which the rate is multiplied by gamma; without any it follows a cosine."""

    lr: tuple[float, ...] = (30.0,)
    batch_size: int = 256
    epochs: int = 100
    drops: tuple[int, ...] = (60, 80)
    gamma: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    def factor(self, epoch: int) -> float:
        """Return what the rates are multiplied by in this epoch, counted from 0."""
        if not self.drops:
            return learning_rate(epoch, peak=1.0, epochs=self.epochs, steps_per_epoch=1)
        return self.gamma ** sum(epoch >= drop for drop in self.drops)


@dataclass(frozen=True)
class FineTuningRecipe(LinearRecipe):
    """lr: of the classifier; encoder_lr: of the backbone, 0 to leave it as it is. Several of either: every pair is
    tried. views: the name of a policy."""

    drops: tuple[int, ...] = ()
    nesterov: bool = True
    encoder_lr: tuple[float, ...] = (0.0,)
    views: str = "supervised"

    @property
    def pairs(self) -> list[tuple[float, float]]:
        return list(product(self.lr, self.encoder_lr))

    def images(self, count: int) -> int:
        """How many go by, if there are `count`: all in every epoch, and to choose between pairs once more for each."""
        trainings = 1 if len(self.pairs) == 1 else 1 + len(self.pairs)
        return trainings * self.epochs * count

    def with_batch_size(self, batch_size: int) -> FineTuningRecipe:
        """Return the recipe for steps of another number of images: its rates are in proportion to that number."""
        scale = batch_size / self.batch_size
        lr, encoder_lr = (tuple(scale * rate for rate in rates) for rates in (self.lr, self.encoder_lr))
        return replace(self, batch_size=batch_size, lr=lr, encoder_lr=encoder_lr)


LINEAR_RECIPES = {
    "moco": LinearRecipe(),
    "simclr": LinearRecipe(lr=(0.1,), epochs=90, weight_decay=1e-6),  # EqCo's author's, for SGD
    "mochi-imagenet": LinearRecipe(batch_size=512),
    "jcl-imagenet100": LinearRecipe(lr=(10.0,)),
    "mochi-imagenet100": LinearRecipe(lr=(10.0,), batch_size=128, epochs=60, drops=(30, 40, 50)),
    # 0.2 per 256 images; the cosine is that of BYOL's released code
    "byol": LinearRecipe(lr=(0.2 * 1024 / 256,), batch_size=1024, epochs=80, drops=(), nesterov=True),
    # MSBReg's transfer, by the data's name: x0.1 twice at equal intervals
    "inaturalist2018": LinearRecipe(lr=(0.2,), epochs=84, drops=(28, 56), weight_decay=1e-4),
    "places205": LinearRecipe(lr=(0.2,), epochs=28, drops=(9, 19), weight_decay=1e-4),
}
TRANSFER = ("inaturalist2018", "places205")  # data whose recipes are named after them

FINE_TUNING_RECIPES = {
    # MSBReg's supplement, section 2.2. It says nothing of length and schedule: 50 epochs and the cosine are ours.
    "msbreg-1%": FineTuningRecipe(lr=(2.0,), encoder_lr=(0.0,), batch_size=1024, epochs=50),
    "msbreg-10%": FineTuningRecipe(lr=(0.25,), encoder_lr=(2.5e-4,), batch_size=1024, epochs=50),
    # No paper's: all layers alike.
    "full": FineTuningRecipe(lr=(0.05,), encoder_lr=(0.05,), batch_size=256, epochs=30),
}

Recipe = TypeVar("Recipe", bound=LinearRecipe)


def adapted(recipes: dict[str, Recipe], name: str, epochs: int | None) -> Recipe:
    """Return a recipe by name, or the same at another length, at which the drops keep their places."""
    recipe = recipes[name]
    if epochs is None:
        return recipe
    drops = tuple(max(1, round(drop * epochs / recipe.epochs)) for drop in recipe.drops)
    return replace(recipe, epochs=epochs, drops=drops)
