"""What the grids of ours on CIFAR-10 share: the length of the runs, and how they are judged.

The recipe is the small-data one of `unitsphere pretrain --data cifar10`, with one schedule for all methods: a cosine by
step after a short warm-up, and the rate that was best for MoCo v2 in so short a run (docs/cifar10.md). Where a method
is compared with itself, only what is studied differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from unitsphere.studies.pretraining import Pretraining
from unitsphere.studies.study import Cell, Settings

EPOCHS = 24
SCHEDULE: dict[str, object] = {
    "epochs": EPOCHS,
    "base_lr": 0.24,
    "lr_update": "step",
    "warmup_epochs": EPOCHS // 12,
    "warmup_kind": "before",
}
# A copy of CIFAR-10 in another form, with its recipe, is CIFAR-10.
HARMLESS = ("data", "recipe")
QUANTITY = "accuracy on the test images, %, or what the column says"
ACCURACIES: dict[str, dict[str, object]] = {  # both on the backbone's features, last epoch
    "k-NN": {"evaluate.protocol": "knn", "evaluate.k": [200], "evaluate.temperature": 0.1, "evaluate.read": "k=200"},
    # A rate that suits a ResNet-50 on ImageNet (30) suits little else: chosen on a tenth of the training images.
    "linear": {
        "evaluate.protocol": "linear",
        "evaluate.lr": [0.3, 1.0, 3.0, 10.0],
        "evaluate.epochs": 20,
        "evaluate.read": "top1",
    },
}


def judged(**fields: object) -> Pretraining:
    """The base of all cells; each says itself how it is judged. Runs are shared between these studies, so all keep
    what one of them looks at: the checkpoint half-way. Residual branches began as they do elsewhere, whatever the
    methods' own settings are by now."""
    base = {"data": "cifar10", **SCHEDULE, "zero_init_residual": False, "keep_epochs": [EPOCHS // 2], **fields}
    return Pretraining(base=base, protocol={}, read="k=200")


def cells(at: Settings, fields: Settings, judges: Mapping[str, Settings] = ACCURACIES) -> Iterable[Cell]:
    """One run under each of the judges, next to each other so that parts of a study share few runs."""
    return (Cell({**at, "judge": judge}, None, {**fields, **settings}) for judge, settings in judges.items())


def needs(runs: int, epochs: str = str(EPOCHS)) -> str:
    return f"CIFAR-10 and a GPU: {runs} runs of {epochs} epochs, ResNet-18"
