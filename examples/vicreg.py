"""VICReg (Bardes, Ponce & LeCun, ICLR 2022, arXiv 2105.04906): a method of one's own, from outside the package.

    unitsphere pretrain vicreg:VICReg --data ./photos --out runs/vicreg     (in the folder of this file)

Copy it, rename it, change the loss. It has what the named methods have: --help of its fields, --dry-run, --resume,
several ranks, telemetry, `evaluate`. Resuming needs its name once more; judging a run needs nothing of this file.
"""

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from unitsphere import About, Config, Learner, Method, Section, StepOutput
from unitsphere.common.distributed import gather_with_gradient
from unitsphere.modules.encoder import Projection
from unitsphere.modules.norms import part_batch_norms


class VICRegFields(Section):
    """VICReg"""  # the title of these fields in --help

    expander: int = Field(8192, ge=1, description="width of the three layers of the expander")
    invariance_weight: float = Field(25.0, ge=0, description="of the distance between the two views")
    deviation_weight: float = Field(25.0, ge=0, description="of the hinge that keeps each dimension's deviation at 1")
    covariance_weight: float = Field(1.0, ge=0, description="of the covariance between dimensions")


class VICRegConfig(VICRegFields, Config):
    def problems(self, sizes_are_known):
        yield from super().problems(sizes_are_known)
        if self.accumulate > 1:
            yield "accumulate: the covariance is that of a whole batch: it must come at once"


class VICReg(Method):
    about = About(
        title="keep the deviation of every dimension, and decorrelate dimensions",
        paper="Bardes et al., ICLR 2022",
        needs="2 views; no negatives, no slow copy, no labels",
        defaults={
            "views": "byol", "optimizer": "lars", "base_lr": 0.2, "weight_decay": 1e-6, "warmup_epochs": 10,
            "lr_update": "step", "bn_groups": 1, "batch_size": 2048, "epochs": 1000,
        },
        recipes={
            "shapes": {"views": "byol-small", "optimizer": "sgd", "expander": 256, "base_lr": 0.03, "warmup_epochs": 2},
        },
    )  # fmt: skip
    Config = VICRegConfig
    sections = (VICRegFields,)

    def size(self, sizes, facts, given):
        """On data without a recipe: an expander in proportion to a small backbone."""
        return {"expander": 8192 if sizes["backbone"] == "resnet50" else 1024}

    def build(self, config, backbone, features):
        layers = []
        for inputs in (features, config.expander):
            layers += [nn.Linear(inputs, config.expander), nn.BatchNorm1d(config.expander), nn.ReLU(inplace=True)]
        expander = nn.Sequential(*layers, nn.Linear(config.expander, config.expander, bias=False))
        return VICRegLearner(Projection(backbone, expander), config)


class VICRegLearner(Learner):
    views = 2

    def __init__(self, encoder: nn.Module, config: VICRegConfig):
        super().__init__()
        part_batch_norms(encoder, config.bn_groups)  # statistics of the whole batch, or of parts of it
        self.online, self.slow = encoder, None
        self.weights = config.invariance_weight, config.deviation_weight, config.covariance_weight

    def forward(self, views, inputs=None):
        first, second = (self.online(view) for view in views)  # (n, D), of this rank's images
        with torch.autocast(first.device.type, enabled=False):
            terms = vicreg_terms(first, second)
            loss = sum(weight * term for weight, term in zip(self.weights, terms, strict=True))
        health = dict(zip(("loss", "invariance", "deviation", "covariance"), (loss, *terms), strict=True))
        health = {name: value.detach() for name, value in health.items()}
        return StepOutput(loss, health, F.normalize(first.detach(), dim=1))


def vicreg_terms(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Invariance (equation 5), variance (1) and covariance (4) of two views (n, D); the last two over all ranks."""
    deviation = covariance = first.new_zeros(())
    for embedding in (gather_with_gradient(first), gather_with_gradient(second)):
        centred = embedding - embedding.mean(dim=0)
        n, d = centred.shape
        deviation = deviation + F.relu(1 - (centred.var(dim=0) + 1e-4).sqrt()).mean() / 2
        matrix = centred.T @ centred / (n - 1)
        covariance = covariance + (matrix.square().sum() - matrix.diagonal().square().sum()) / d
    return F.mse_loss(first, second), deviation, covariance
