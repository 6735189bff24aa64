"""MoCHi's Figure 4: the proxy task on ImageNet-100 on the way from MoCo to MoCo v2, one change after the other.

All with a temperature of 0.2. The figure comes without its values, and the text (B.1) with words: here "no noticeable
change" is at most 2 points. Which (N, s, s') its MoCHi has is not said, only that they are many. The numbers are of the
end of training; `unitsphere analyse --what training` draws the runs over epochs, as the figure does.
"""

from __future__ import annotations

from dataclasses import replace

from unitsphere.studies.claims import above, near
from unitsphere.studies.mochi import BEST, PAPER, WORDS, judged, mixing
from unitsphere.studies.study import Cell, Claim, Settings, Study

UNNOTICED = 2.0
MOCO = {"method": "moco-v1", "temperature": 0.2, "lr_schedule": "step"}
RUNGS: dict[str, dict[str, object]] = {
    "MoCo": MOCO,
    "cosine": {**MOCO, "lr_schedule": "cosine"},
    "MLP": {**MOCO, "lr_schedule": "cosine", "head": "mlp"},
    "augmentation": {"method": "moco-v2"},
    "MoCHi": {"method": "mochi", **mixing(BEST)},
}
REAL, ALL = "real", "real and synthetic"


def at(rung: str, negatives: str = REAL) -> Settings:
    return {"rung": rung, "negatives": negatives}


def unnoticed(statement: str, one: Settings, other: Settings) -> Claim:
    return near(f"{statement}: within {UNNOTICED:g} points", one, other, UNNOTICED)


FIGURE_4 = Study(
    id="mochi/figure-4",
    title="the proxy task from MoCo to MoCo v2 and MoCHi: schedule, head, augmentation, mixtures",
    paper=PAPER,
    needs="ImageNet and a GPU: 5 runs of 200 epochs on 100 classes, ResNet-50",
    quantity="queries whose key is above all negatives, %",
    columns="negatives",
    runner=replace(judged("imagenet100"), protocol={"protocol": "hardness", "images": 4096}, read="proxy"),
    cells=(
        *(Cell(at(rung), None, fields) for rung, fields in RUNGS.items()),
        Cell(at("MoCHi", ALL), None, {**RUNGS["MoCHi"], "evaluate.read": "proxy_synthetic"}),
    ),
    claims=(
        unnoticed("a cosine schedule is not noticed", at("cosine"), at("MoCo")),
        unnoticed("an MLP head is not noticed", at("MLP"), at("cosine")),
        above("stronger augmentation makes the proxy task harder", at("MLP"), at("augmentation")),
        above("MoCHi's mixtures make it harder", at("augmentation"), at("MoCHi", ALL)),
        unnoticed("without them it is as hard as MoCo v2's (section 4.3)", at("MoCHi"), at("augmentation")),
    ),
    words=WORDS,
)
