"""MSBReg's forces on methods that are not its own: a grid of ours, on CIFAR-10 with a ResNet-18.

The paper's abstract says that they improve other methods further; the supplement has no table of it. Beside the weights
that it gives them with two views, ten times these: a contrastive loss divides its scores by a temperature of 0.1 or
0.2, so its gradient is about that much larger than that of a squared distance.
"""

from __future__ import annotations

from unitsphere.studies.cifar10 import ACCURACIES, HARMLESS, QUANTITY, cells, judged, needs
from unitsphere.studies.claims import above
from unitsphere.studies.msbreg import PAPER
from unitsphere.studies.msbreg_cifar10 import JUDGES
from unitsphere.studies.study import Claim, Study

METHODS = {"MoCo v2": "moco-v2", "SimCLR": "simclr"}
HEADS: dict[str, dict[str, object]] = {"moco-v2": {}, "simclr": {"head": "mlp-bn"}}  # as measured
NONE, USUAL, STRONG = "none", "L_b + L_s", "10 (L_b + L_s)"
FORCES: dict[str, dict[str, object]] = {
    NONE: {},
    USUAL: {"singular_weight": 0.004, "brownian_weight": 0.25},
    STRONG: {"singular_weight": 0.04, "brownian_weight": 2.5},
}


def helped(method: str, forces: str, judge: str) -> Claim:
    place = {"method": method, "judge": judge}
    return above(f"{forces} help {method} ({judge})", {**place, "forces": forces}, {**place, "forces": NONE})


def spread(method: str, forces: str) -> Claim:
    place = {"method": method, "judge": "uniformity"}
    return above(f"{forces} spread {method}'s embeddings", {**place, "forces": NONE}, {**place, "forces": forces})


FORCED = [(method, forces) for method in METHODS for forces in (USUAL, STRONG)]
ELSEWHERE = Study(
    id="msbreg/elsewhere",
    title="MSBReg's forces on MoCo v2 and SimCLR on CIFAR-10",
    paper=f"a grid of unitsphere's own, after the abstract of {PAPER}",
    needs=needs(len(METHODS) * len(FORCES)),
    quantity=QUANTITY,
    columns="judge",
    harmless=HARMLESS,
    runner=judged(),
    cells=tuple(
        cell
        for method, name in METHODS.items()
        for forces, fields in FORCES.items()
        for cell in cells({"method": method, "forces": forces}, {"method": name, **HEADS[name], **fields}, JUDGES)
    ),
    claims=(
        *(helped(*each, judge) for each in FORCED for judge in ACCURACIES),
        *(spread(*each) for each in FORCED),
    ),
)
