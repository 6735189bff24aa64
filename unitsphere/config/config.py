"""The configuration that every run has, and what must hold between its fields. A method adds fields of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from pydantic import ValidationInfo, model_validator

from unitsphere.config.fields import (
    DataFields,
    ModelFields,
    OptimisationFields,
    RunFields,
    RunningFields,
    ViewFields,
)

__all__ = ["Config"]

# These fields change how a run is carried out, but not what it is.
INCIDENTAL = {"device", "resident", "workers", "accumulate", *RunningFields.model_fields}
# A resumed run may change these. `data` may only name the same images at another place, which is checked. Any other
# field would make it another run.
FREE_ON_RESUME = {"epochs", "data", "max_broken", "max_pixels", *INCIDENTAL}


LARGEST = 1e38


class Config(RunningFields, OptimisationFields, ModelFields, ViewFields, DataFields, RunFields):
    """What every run has."""

    @model_validator(mode="after")
    def consistent(self, info: ValidationInfo) -> Config:
        """Refuse fields that contradict each other. With the context "provisional" sizes are still to come."""
        for problem in self.problems(sizes_are_known=info.context != "provisional"):
            raise ValueError(problem)
        return self

    def problems(self, sizes_are_known: bool) -> Iterator[str]:
        """Yield what is wrong between fields, each as a sentence that begins with a field's name.

        A method's configuration extends it. sizes_are_known: false while the batch and its groups may still change.
        """
        if self.nesterov and (self.momentum == 0 or self.optimizer != "sgd"):
            yield "nesterov: it is for sgd with a momentum greater than 0"
        if not sizes_are_known:
            return
        batch, groups = self.batch_size, self.bn_groups
        if batch < 2 * groups:
            yield (
                f"bn_groups: given {groups} for a batch_size of {batch}; "
                f"each group needs 2 images, so at most {batch // 2} groups"
            )
        if batch % groups:
            yield (
                f"bn_groups: given {groups} for a batch_size of {batch}; groups must be alike: use "
                f"batch_size {batch // groups * groups}, or bn_groups {math.gcd(batch, groups)}"
            )
        whole = math.lcm(self.accumulate, groups)
        if batch % whole:
            yield (
                f"accumulate: given {self.accumulate} with bn_groups {groups}; all parts must be alike, so "
                f"batch_size ({batch}) must be a multiple of {whole}"
            )
        for name, value in (("lr", self.learning_rate), ("weight_decay", self.weight_decay)):
            if value > LARGEST:
                yield f"{name}: it comes to {value:g}, and float32 holds at most {LARGEST:g}"
        if (self.mean is None) != (self.std is None):
            yield "mean and std: give both or neither"
        for name in ("mean", "std"):
            given = getattr(self, name)
            if given is not None and len(given) != self.channels:
                yield f"{name}: {len(given)} numbers given for {self.channels} channels"
        if self.std is not None and min(self.std) <= 0:
            yield "std: every deviation must be greater than 0"
        if self.warmup_epochs >= self.epochs and self.warmup_epochs > 0:
            yield f"warmup_epochs: it is {self.warmup_epochs:g}, and must be below epochs ({self.epochs})"

    @property
    def learning_rate(self) -> float:
        """The absolute rate: lr, or base_lr scaled by the images of a step (never by the negatives)."""
        if self.lr is not None:
            return self.lr
        assert self.base_lr is not None
        return self.base_lr * self.batch_size / 256

    @property
    def decays_norms(self) -> bool:
        return self.optimizer != "lars" if self.decay_norms is None else self.decay_norms

    @property
    def needs_labels(self) -> bool:
        """Whether the training images must have labels."""
        return False

    @property
    def reconstructed(self) -> list[str]:
        """The losses in use whose formula no paper states."""
        return []

    @property
    def caveats(self) -> dict[str, list[str]]:
        """What results must say of these settings, if anything."""
        return {"reconstructed": self.reconstructed} if self.reconstructed else {}

    @property
    def notes(self) -> list[str]:
        """What a person should know of these settings before the run starts."""
        if not self.reconstructed:
            return []
        return [f"{', '.join(self.reconstructed)}: reconstructed from MSBReg's supplement, which has no formula."]

    @property
    def memory_advice(self) -> Mapping[str, object]:
        """The fields to lower when memory runs out, with their values now."""
        return {"batch_size": self.batch_size, "image_size": self.image_size}
