"""A family of methods has the common fields and its own; what must hold between fields is checked here."""

from __future__ import annotations

import math

from pydantic import ValidationInfo, model_validator

from unitsphere.config.fields import (
    ContrastiveFields,
    DataFields,
    DispersionFields,
    EmbeddingFields,
    JointFields,
    MixingFields,
    ModelFields,
    OptimisationFields,
    RegressionFields,
    RunFields,
    RunningFields,
    Section,
    SupervisedFields,
    ViewFields,
)


class Config(RunningFields, OptimisationFields, ModelFields, ViewFields, DataFields, RunFields):
    """What every run has."""

    @model_validator(mode="after")
    def consistent(self, info: ValidationInfo) -> Config:
        """With the context "provisional" sizes are still to come."""
        if self.nesterov and (self.momentum == 0 or self.optimizer != "sgd"):
            raise ValueError("nesterov: it is for sgd with a momentum greater than 0")
        if info.context == "provisional":
            return self
        if self.batch_size < 2 * self.bn_groups:
            raise ValueError(
                f"bn_groups: given {self.bn_groups} for a batch_size of {self.batch_size}; "
                f"each group needs 2 images, so at most {self.batch_size // 2} groups"
            )
        if self.batch_size % self.bn_groups:
            raise ValueError(
                f"bn_groups: given {self.bn_groups} for a batch_size of {self.batch_size}; groups must be alike: use "
                f"batch_size {self.batch_size // self.bn_groups * self.bn_groups}, or bn_groups "
                f"{math.gcd(self.batch_size, self.bn_groups)}"
            )
        whole = math.lcm(self.accumulate, self.bn_groups)
        if self.batch_size % whole:
            raise ValueError(
                f"accumulate: given {self.accumulate} with bn_groups {self.bn_groups}; all parts must be alike, so "
                f"batch_size ({self.batch_size}) must be a multiple of {whole}"
            )
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std: give both or neither")
        for name in ("mean", "std"):
            given = getattr(self, name)
            if given is not None and len(given) != self.channels:
                raise ValueError(f"{name}: {len(given)} numbers given for {self.channels} channels")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError("std: every deviation must be greater than 0")
        if self.warmup_epochs >= self.epochs and self.warmup_epochs > 0:
            raise ValueError(f"warmup_epochs: it is {self.warmup_epochs:g}, and must be below epochs ({self.epochs})")
        return self

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
        return False

    @property
    def reconstructed(self) -> list[str]:
        """The losses in use whose formula is no paper's own."""
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


class EmbeddingConfig(DispersionFields, EmbeddingFields, Config):
    """What every method has whose loss sees embeddings."""

    @model_validator(mode="after")
    def embedding_is_consistent(self) -> EmbeddingConfig:
        for name in ("singular_weight", "uniformity_weight"):
            if self.accumulate > 1 and getattr(self, name):
                raise ValueError(f"accumulate: the loss of {name} compares all images of a batch: it must come at once")
        return self

    @property
    def reconstructed(self) -> list[str]:
        return [f"{name}_loss" for name in ("singular", "brownian") if getattr(self, f"{name}_weight")]


class ContrastiveConfig(MixingFields, JointFields, ContrastiveFields, EmbeddingConfig):
    """A contrastive run, in full."""

    @model_validator(mode="after")
    def contrastive_is_consistent(self, info: ValidationInfo) -> ContrastiveConfig:
        if self.symmetric and self.keys > 1:
            raise ValueError(f"symmetric: it is for one key of an image; keys is {self.keys}")
        if self.key_encoder == "online" and (self.negatives_from == "queue" or self.keys > 1 or self.symmetric):
            raise ValueError(
                "key_encoder: online takes negatives_from batch and one key, and asks both ways as it is: leave out "
                "symmetric"
            )
        if self.both_views and self.key_encoder != "online":
            raise ValueError("both_views: it is for key_encoder online; a slow copy encodes the key's view alone")
        if self.accumulate > 1 and self.negatives_from == "batch":
            raise ValueError("accumulate: with negatives_from batch the negatives are the batch: it must come at once")
        if self.positives == "repeated" and (self.negatives_from == "batch" or self.symmetric):
            raise ValueError("positives: repeated is for negatives_from queue, one way")
        for name in ("negatives", "hardest"):
            if self.pairs and self.mix_distinct and getattr(self, name) == 1:
                raise ValueError(f"pairs: a pair is of two negatives, and {name} is 1")
        if self.mix_until is not None and self.pairs != self.with_query:
            raise ValueError(f"mix_until: takes both kinds in turn: give as many pairs ({self.pairs}) as with_query")
        if self.key_encoder == "online" and self.bn_groups > 1 and info.context != "provisional":
            raise ValueError(f"bn_groups: given {self.bn_groups}; with key_encoder online both views share one: use 1")
        return self

    @property
    def needs_labels(self) -> bool:
        return self.oracle

    @property
    def mixes(self) -> bool:
        return self.pairs + self.with_query > 0

    @property
    def notes(self) -> list[str]:
        in_batch = 2 * self.batch_size - 2 if self.both_views else self.batch_size - 1
        at_hand = self.queue_size if self.negatives_from == "queue" else in_batch
        found = super().notes
        if self.negatives is not None and self.negatives > at_hand:
            found.append(f"negatives: {self.negatives} asked for, and all {at_hand} at hand are taken.")
        if self.mixes and self.mixing_warmup >= self.epochs:
            found.append(f"mixing_warmup: nothing is mixed before epoch {self.mixing_warmup + 1}, beyond this run.")
        at_hand = min(at_hand, self.negatives or at_hand)
        if self.mixes and self.hardest is not None and self.hardest > at_hand:
            found.append(f"hardest is {self.hardest}, but a query has {at_hand} negatives: all are taken.")
        return found


class RegressionConfig(RegressionFields, EmbeddingConfig):
    """A regression run, in full."""

    @model_validator(mode="after")
    def regression_is_consistent(self, info: ValidationInfo) -> RegressionConfig:
        if self.joint_statistics and self.bn_groups > 1 and info.context != "provisional":
            raise ValueError(f"joint_statistics: the views share one group; bn_groups is {self.bn_groups}: use 1")
        if self.accumulate > 1 and self.joint_statistics:
            raise ValueError(
                "accumulate: with joint_statistics the views share the statistics of one batch: it must come at once"
            )
        return self

    @property
    def reconstructed(self) -> list[str]:
        return [*(["centroids"] if self.view_count > 2 else []), *super().reconstructed]

    @property
    def learning_rate(self) -> float:
        scaled = super().learning_rate
        return scaled * self.view_count if self.lr_per_view and self.lr is None else scaled


class SupervisedConfig(SupervisedFields, Config):
    """A supervised run, in full."""

    @property
    def needs_labels(self) -> bool:
        return True


FAMILIES: dict[str, type[Config]] = {
    "contrastive": ContrastiveConfig,
    "regression": RegressionConfig,
    "supervised": SupervisedConfig,
}

SECTIONS: tuple[type[Section], ...] = (
    RunFields, DataFields, ViewFields, ModelFields, EmbeddingFields, ContrastiveFields, JointFields, MixingFields,
    RegressionFields, DispersionFields, SupervisedFields, OptimisationFields, RunningFields,
)  # fmt: skip
FIELDS = {name: field for section in SECTIONS for name, field in section.model_fields.items()}

# What changes how a run is carried out but not what it is.
INCIDENTAL = {"device", "resident", "workers", "accumulate", *RunningFields.model_fields}
# What a resumed run may change: data only if these are the same images, which are compared. All else would make it
# another run.
FIELDS_FREE_ON_RESUME = {"epochs", "data", "max_broken", *INCIDENTAL}


def families_of(field: str) -> list[str]:
    """The families whose methods have a field."""
    return [family for family, config in FAMILIES.items() if field in config.model_fields]
