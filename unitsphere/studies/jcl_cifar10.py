"""JCL's claims on CIFAR-10 with a ResNet-18: a grid of ours."""

from __future__ import annotations

from unitsphere.studies.cifar10 import ACCURACIES, HARMLESS, QUANTITY, cells, judged, needs
from unitsphere.studies.claims import above, no_worse
from unitsphere.studies.study import Cell, Claim, Study

MOCO: dict[str, object] = {"method": "MoCo v2"}
VANILLA: dict[str, object] = {"method": "vanilla", "keys": 5}
ALONG_KEYS = ((2, 4.0), (5, 4.0), (9, 4.0))
ALONG_LAMBDA = ((5, 0.0), (5, 1.0), (5, 10.0))
# Fig. M.3 in one number: the mean over images of how alike their augmentations are.
SIMILARITY = {
    "evaluate.protocol": "similarity",
    "evaluate.images": 4096,
    "evaluate.augmentations": 32,
    "evaluate.read": "similarity.mean",
}
LOOKED_AT = {**ACCURACIES, "similarity": SIMILARITY}


def of_jcl(keys: int, weight: float) -> dict[str, object]:
    return {"method": "JCL", "keys": keys, "lambda": weight}


def grid() -> tuple[Cell, ...]:
    found = [
        *cells(MOCO, {"method": "moco-v2"}, LOOKED_AT),
        *cells(VANILLA, {"method": "jcl-vanilla", "keys": 5}),
    ]
    for keys, weight in (*ALONG_KEYS, *ALONG_LAMBDA):
        fields = {"method": "jcl", "keys": keys, "variance_weight": weight}
        # the supplement looks at 9 keys; lambda 0 tells the keys' share from the variance's
        looked_at = LOOKED_AT if (keys, weight) in ((5, 0.0), (5, 4.0), (9, 4.0)) else ACCURACIES
        found += cells(of_jcl(keys, weight), fields, looked_at)
    return tuple(found)


def claims(judge: str) -> tuple[Claim, ...]:
    def at(place: dict[str, object]) -> dict[str, object]:
        return {**place, "judge": judge}

    usual = at(of_jcl(5, 4.0))
    return (
        above(f"JCL with 5 keys is above MoCo v2 ({judge})", usual, at(MOCO)),
        above(f"JCL with 5 keys is above vanilla with 5 ({judge})", usual, at(VANILLA)),
        no_worse(f"9 keys are no worse than 2 ({judge})", at(of_jcl(9, 4.0)), at(of_jcl(2, 4.0))),
        above(f"lambda 4 is above none ({judge})", usual, at(of_jcl(5, 0.0))),
        no_worse(f"lambda 4 is no worse than 10 ({judge})", usual, at(of_jcl(5, 10.0))),
    )


CIFAR10 = Study(
    id="jcl/cifar10",
    title="JCL with several keys and lambdas on CIFAR-10, beside MoCo v2 and the vanilla form",
    paper="a grid of unitsphere's own, after JCL's Fig. M.2 and M.3",
    needs=needs(8),
    quantity=QUANTITY,
    columns="judge",
    harmless=HARMLESS,
    runner=judged(),
    cells=grid(),
    claims=(
        *(claim for judge in ACCURACIES for claim in claims(judge)),
        above(
            "with 9 keys the features of an image are more alike than MoCo v2's",
            {**of_jcl(9, 4.0), "judge": "similarity"},
            {**MOCO, "judge": "similarity"},
        ),
    ),
)
