"""JCL's ablations on ImageNet-100 (Cai et al., supplement, Table 1): Fig. M.2 a-c of the main paper.

Only the supplement is at hand. It says what is held fixed (M' 5, lambda 4, tau 0.2; ResNet-18, 100 epochs at 0.1 with
batches of 128), and neither the values on the axes nor any result: the grids are ours, and the claims say only that
what the authors fixed is no worse than the ends of each axis. Whether lambda is ramped is not stated either: it is, as
in the released code.
Fig. M.3 is `unitsphere analyse --what similarity` of Fig. M.2a's runs with 1 key, which is MoCo v2, and with 9.
"""

from __future__ import annotations

from collections.abc import Sequence

from unitsphere.studies.claims import no_worse
from unitsphere.studies.pretraining import Pretraining
from unitsphere.studies.study import Cell, Claim, Study

PAPER = "JCL, Cai et al., NeurIPS 2020, supplement"
RUNNER = Pretraining(
    base={"method": "jcl", "data": "imagenet100"},  # the recipe is that of these ablations
    protocol={"protocol": "linear", "recipe": "jcl-imagenet100", "augment": True},
    read="top1",
)


def ablation(letter: str, title: str, columns: str, cells: Sequence[Cell], claims: Sequence[Claim]) -> Study:
    return Study(
        id=f"jcl/figure-2{letter}",
        title=title,
        paper=PAPER,
        needs=f"ImageNet and a GPU: {len(cells)} runs of 100 epochs on 100 classes, ResNet-18",
        quantity="ImageNet-100 top-1 of a linear classifier, %",
        columns=columns,
        runner=RUNNER,
        cells=tuple(cells),
        claims=tuple(claims),
        over=columns,
    )


def of_jcl(keys: int) -> dict[str, object]:
    return {"method": "JCL", "keys": keys}


FIGURE_2A = ablation(
    "a",
    "JCL with different numbers of keys M', beside the vanilla form with as many (M' = 1 is MoCo v2)",
    "keys",
    [
        *(Cell(of_jcl(keys), None, {"keys": keys}) for keys in (1, 2, 3, 5, 7, 9)),
        *(
            Cell({"method": "vanilla", "keys": keys}, None, {"method": "jcl-vanilla", "keys": keys})
            for keys in (2, 3, 5, 7, 9)
        ),
    ],
    [
        no_worse("5 keys are no worse than one (MoCo v2)", of_jcl(5), of_jcl(1)),
        no_worse("9 keys are no worse than 2", of_jcl(9), of_jcl(2)),
        # section 2 of the supplement, which measures memory: M' keys cost vanilla at least what they cost JCL
        no_worse("JCL with 5 keys is no worse than vanilla with 5", of_jcl(5), {"method": "vanilla", "keys": 5}),
    ],
)

FIGURE_2B = ablation(
    "b",
    "JCL with different weights lambda of the variance, 5 keys",
    "lambda",
    [Cell({"lambda": weight}, None, {"variance_weight": weight}) for weight in (0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0)],
    [
        no_worse("lambda 4 is no worse than none", {"lambda": 4.0}, {"lambda": 0.0}),
        no_worse("lambda 4 is no worse than 10", {"lambda": 4.0}, {"lambda": 10.0}),
    ],
)

FIGURE_2C = ablation(
    "c",
    "JCL at different temperatures, 5 keys",
    "tau",
    [Cell({"tau": tau}, None, {"temperature": tau}) for tau in (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)],
    [
        no_worse("tau 0.2 is no worse than 0.05", {"tau": 0.2}, {"tau": 0.05}),
        no_worse("tau 0.2 is no worse than 0.5", {"tau": 0.2}, {"tau": 0.5}),
    ],
)

STUDIES = (FIGURE_2A, FIGURE_2B, FIGURE_2C)
