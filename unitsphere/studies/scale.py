"""A study on one's own machine: the same rows, columns, claims and pictures with a small network and few images.

One rule for all of them, by the scale's numbers (SCALES):

- a count of images or negatives (batch, queue, K, alpha, N, s, s', a rank) becomes itself to the power that makes the
  study's largest queue the scale's: what was more stays more, and what was a quarter is still less
- epochs become the same share of the scale's epochs as they are of 200 (24 in our grids), at least one
- the rate of a step stays what it was; heads are at most as wide as the scale's, the network is `resnet-tiny`
- images are 1,000 drawn shapes, fewer where the study would take more than an hour on two cores
- linear classifiers are trained on stored features for a few epochs, with a rate chosen on a tenth of the training
  images

The verdicts are of this scale, and say so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from unitsphere.common.errors import check_word
from unitsphere.config.config import Config
from unitsphere.methods.contrastive import ContrastiveConfig
from unitsphere.studies.costs import images_of, minutes_on_2_cores
from unitsphere.studies.own_trainer import OwnTrainer
from unitsphere.studies.pretraining import CONTINUED_AT, Pretraining, configured
from unitsphere.studies.study import Settings, Study, on_other


@dataclass(frozen=True)
class Scale:
    """queue: keys for the study's largest queue; epochs: for 200; k: neighbours; looked_at: images of an analysis."""

    name: str
    data: str
    image_size: int
    queue: int
    epochs: int
    wide: int
    k: int
    looked_at: int
    linear: Mapping[str, Any]


IMAGES, MINUTES = 1000, 50
SCALES = {
    "small": Scale("small", "shapes=1000x32", 32, 512, 12, 256, 20, 512, {"epochs": 20, "lr": [0.3, 1.0, 3.0, 10.0]}),
    "tiny": Scale("tiny", "shapes=64x16", 16, 48, 2, 32, 5, 32, {"epochs": 2, "lr": [1.0]}),
}
USUAL_EPOCHS = {"cifar10": 24}  # of our grids; the papers' runs have 200
COUNTS = ("queue_size", "negatives", "alpha", "hardest", "pairs", "with_query")
# Wider networks stay the larger ones.
NETWORKS = {"resnet50x2": "resnet18", "resnet50x4": "resnet34"}


def at_scale(study: Study, name: str, data: str | None = None) -> Study:
    """The study at a scale of SCALES, on the drawn shapes or on `data`."""
    check_word("scale", name, SCALES)
    scale = SCALES[name] if data is None else replace(SCALES[name], data=data)
    runner = study.runner
    if isinstance(runner, OwnTrainer):
        where = ""
        runner = type(runner)(name)
    else:
        assert isinstance(runner, Pretraining)
        where = f", {scale.data}"
        configs = [configured(runner.split({**cell.given, "seed": 0})[0])[0].config for cell in study.cells]
        queue = max((config.queue_size for config in configs if isinstance(config, ContrastiveConfig)), default=65536)
        runner = ScaledPretraining(runner.base, runner.protocol, runner.read, scale, queue)
        if data is None and (full := minutes(study, runner)) > MINUTES:  # fewer images, so that it ends in time
            images = max(200, int(IMAGES * MINUTES / full) // 50 * 50)
            scale = replace(scale, data=f"shapes={images}x{scale.image_size}")
            runner = replace(runner, scale=scale)
    return replace(
        study,
        title=f"{study.title} [scale {name}{where}]",
        quantity=on_other(study.quantity, scale.data) if where else study.quantity,
        needs="this machine",
        runner=runner,
        scale=name,
    )


def minutes(study: Study, runner: ScaledPretraining) -> float:
    """About how long the study's runs take with one seed."""
    given = {runner.row_of({**cell.given, "seed": 0}): {**cell.given, "seed": 0} for cell in study.cells}
    return 60 * sum(runner.hours(each) or 0.0 for each in given.values())


@dataclass(frozen=True)
class ScaledPretraining(Pretraining):
    """The runs and judges of a study by the rule above."""

    scale: Scale = SCALES["small"]
    largest_queue: int = 65536

    def split(self, given: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
        fields, judging = super().split(given)
        resolved, own = configured(fields)
        config = resolved.config
        count = Count(math.log(self.scale.queue) / math.log(self.largest_queue))
        run = self.run_fields(config, count)
        if CONTINUED_AT in own:
            run[CONTINUED_AT] = self.epochs(own[CONTINUED_AT], config.recipe)
        return run, self.judging(judging, count, config.recipe)

    def hours(self, given: Settings) -> float | None:
        """On two cores. Of images that are given it is not known how many they are: as many as are drawn."""
        resolved, own = configured(self.split(given)[0])
        config = resolved.config
        images = images_of(config) or IMAGES
        return minutes_on_2_cores(config, config.epochs - own.get(CONTINUED_AT, 0), images) / 60

    def epochs(self, epochs: float, recipe: str | None) -> int:
        usual = USUAL_EPOCHS.get(recipe or "", 200)
        return max(min(1, math.ceil(epochs)), round(epochs * self.scale.epochs / usual))

    def run_fields(self, config: Config, count: Count) -> dict[str, Any]:
        """All fields are given, so that the recipe of other data changes none."""
        values = config.model_dump(mode="json")
        for name in COUNTS:
            if values.get(name):
                values[name] = count(values[name])
        batch = max(4, 2 * round(count(config.batch_size) / 2))
        epochs = self.epochs(config.epochs, config.recipe)
        groups = max(n for n in range(1, min(config.bn_groups, batch // 2) + 1) if batch % n == 0)
        rate = config.base_lr if config.base_lr is not None else config.learning_rate * 256 / config.batch_size
        values |= {
            "data": self.scale.data,
            "holdout": 0.1,
            "classes": None,
            "image_size": self.scale.image_size,
            "backbone": NETWORKS.get(config.backbone, "resnet-tiny"),
            "stem": "small",
            "views": config.views.removesuffix("-small") + "-small",
            "batch_size": batch,
            "bn_groups": groups,
            "lr": None,
            "base_lr": rate * config.batch_size / batch,
            "epochs": epochs,
            "warmup_epochs": config.warmup_epochs * epochs / config.epochs,
            "keep_epochs": sorted({self.epochs(epoch, config.recipe) for epoch in config.keep_epochs}),
            "log_every": 5,
            "tensorboard": False,
            "compile": False,
        }
        if values.get("mixing_warmup"):
            values["mixing_warmup"] = min(self.epochs(values["mixing_warmup"], config.recipe), epochs - 1)
        if "head" in values:
            values["dim"] = min(values["dim"], self.scale.wide)
            values["hidden"] = min(values["hidden"] or self.scale.wide, self.scale.wide)
        if values["mean"] is None:  # the recipe normalises as it does
            del values["normalise"]
        scaled, _ = configured(values)
        return {name: value for name, value in values.items() if not scaled.why_unused(name)}

    def judging(self, judging: Settings, count: Count, recipe: str | None) -> dict[str, Any]:
        found = {**judging, "data": self.scale.data}
        if found["protocol"] == "linear":
            found = {**found, **self.scale.linear, "augment": False}
            found.pop("recipe", None)
        if "k" in found:
            found |= {"k": [self.scale.k], "read": f"k={self.scale.k}"}
        if "epoch" in found:
            found["epoch"] = self.epochs(found["epoch"], recipe)
        if found["protocol"] in ("hardness", "similarity", "gradient"):
            found["images"] = self.scale.looked_at
        if "augmentations" in found:
            found["augmentations"] = 8
        if "mixing" in found:
            found["mixing"] = [count(number) for number in found["mixing"]]
        if "negatives" in found:
            found |= {"negatives": [count(number) for number in found["negatives"]], "alpha": count(found["alpha"])}
        if found["read"].startswith("matching."):
            found["read"] = f"matching.{count(int(found['read'].partition('.')[2]) + 1) - 1}"
        return found


@dataclass(frozen=True)
class Count:
    """The rule for counts."""

    power: float

    def __call__(self, number: float) -> int:
        return round(number**self.power) if number else 0
