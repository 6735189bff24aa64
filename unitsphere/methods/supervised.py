"""Cross-entropy with the images' labels: the reference for all methods that learn without them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from unitsphere.common.errors import UsageError
from unitsphere.config.config import Config
from unitsphere.config.fields import Count, Section
from unitsphere.config.layers import Patch
from unitsphere.methods.declaration import About, Method

if TYPE_CHECKING:
    from torch import nn

    from unitsphere.methods.learners.learner import Learner


class SupervisedFields(Section):
    """Supervised learning"""

    class_count: Count | None = Field(None, description="classes to tell apart; default: those of the data")


class SupervisedConfig(SupervisedFields, Config):
    """A supervised run, in full."""

    @property
    def needs_labels(self) -> bool:
        return True


class SupervisedMethod(Method):
    """A linear classifier on the backbone, trained with it."""

    family = "supervised"
    Config = SupervisedConfig
    sections = (SupervisedFields,)

    def build(self, config: SupervisedConfig, backbone: nn.Module, features: int) -> Learner:
        from torch import nn

        from unitsphere.methods.learners.supervised import SupervisedLearner
        from unitsphere.modules.encoder import Projection
        from unitsphere.modules.norms import part_batch_norms

        if config.class_count is None:
            raise UsageError("class_count: it must be given where there are no data to count the classes of.")
        encoder = Projection(backbone, nn.Identity())
        part_batch_norms(encoder, config.bn_groups)
        return SupervisedLearner(encoder, nn.Linear(features, config.class_count))


SMALL: Patch = {"base_lr": 0.1, "warmup_epochs": 5, "lr_update": "step", "nesterov": True, "epochs": 200}

SUPERVISED = About(
    title="cross-entropy with the labels, the reference from above",
    paper="He et al., CVPR 2016",
    needs="1 view, labels",
    defaults={
        "views": "supervised",
        "bn_groups": 1,
        "base_lr": 0.1,
        "lr_schedule": "step",
        "lr_drops": (0.33, 0.66),
        "epochs": 90,
    },
    recipes={
        "imagenet100": {"batch_size": 256, "base_lr": 0.1},
        "cifar10": {"views": "supervised-small", **SMALL},
        "cifar100": {"views": "supervised-small", **SMALL},
        "stl10": SMALL,
        "shapes": {"views": "supervised-small"},
    },
)
