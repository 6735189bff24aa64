"""MSBReg's claims on CIFAR-10 with a ResNet-18: a grid of ours, with the forms that the supplement leaves open.

All cells have one recipe and one learning rate: 0.12 for 256 images is MSBReg's on CIFAR-10 (0.03 times 4 views) and
BYOL's. An epoch with 4 views is twice the work of one with 2: so 4 views are also trained for half as long.
"""

from __future__ import annotations

from antipode.studies.cifar10 import ACCURACIES, EPOCHS, QUANTITY, cells, judged, needs
from antipode.studies.claims import above, at_most
from antipode.studies.msbreg import BYOL, NORMS, OURS, WITH_FORCES, forces
from antipode.studies.msbreg import JUDGES as OF_TABLE_3
from antipode.studies.study import Cell, Claim, Study

JUDGES = {**ACCURACIES, "alignment": OF_TABLE_3["alignment"], "uniformity": OF_TABLE_3["uniformity"]}
HALF_AS_LONG = f"{OURS} for {EPOCHS // 2} epochs"
CORRELATION = f"{WITH_FORCES} (correlation)"
OTHERS, ALL = f"{OURS} (others)", f"{OURS} (all)"
LN, LN_AND_FORCE = "BYOL with LN", "BYOL + L_b with LN"
RUNS: dict[str, dict[str, object]] = {
    BYOL: forces(2, 0.0, 0.0),
    WITH_FORCES: forces(2, 0.004, 0.25),
    CORRELATION: {**forces(2, 0.004, 0.25), "singular_form": "correlation"},
    OURS: forces(4, 0.004, 0.5),
    HALF_AS_LONG: {**forces(4, 0.004, 0.5), "epochs": EPOCHS // 2},
    OTHERS: {**forces(4, 0.004, 0.5), "centroid": "others"},
    ALL: {**forces(4, 0.004, 0.5), "centroid": "all"},
    LN: {**forces(2, 0.0, 0.0), **NORMS["LN"]},
    LN_AND_FORCE: {**forces(2, 0.0, 5e-3), **NORMS["LN"]},
}


def claims(judge: str) -> tuple[Claim, ...]:
    def claim(statement: str, high: str, low: str, by: float = 0.0) -> Claim:
        return above(f"{statement} ({judge})", {"method": high, "judge": judge}, {"method": low, "judge": judge}, by)

    return (
        claim("L_b and L_s help BYOL", WITH_FORCES, BYOL),
        claim("4 views are above BYOL after as many epochs", OURS, BYOL),
        claim("4 views are above BYOL after as many passes of the encoder", HALF_AS_LONG, BYOL),
        at_most(f"with layer norm BYOL collapses ({judge})", {"method": LN, "judge": judge}, 20.0),
        claim("L_b prevents it", LN_AND_FORCE, LN, 20.0),
    )


def spreads(method: str) -> Claim:
    """The pattern of Table 3: uniformity falls, by much more than alignment rises."""
    return above(
        f"{method}: uniformity is at least 1 below BYOL's",
        {"method": BYOL, "judge": "uniformity"},
        {"method": method, "judge": "uniformity"},
        by=1.0,
    )


def grid() -> tuple[Cell, ...]:
    return tuple(cell for name, fields in RUNS.items() for cell in cells({"method": name}, fields, JUDGES))


CIFAR10 = Study(
    id="msbreg/cifar10",
    title="BYOL, both forces and 4 views on CIFAR-10, with the forms that are open; layer norm",
    paper="a grid of antipode's own, after MSBReg's Tables 3 and 4",
    needs=needs(len(RUNS)),
    quantity=QUANTITY,
    columns="judge",
    runner=judged(method="msbreg", lr_per_view=False, base_lr=0.12),
    cells=grid(),
    claims=(
        *(claim for judge in ACCURACIES for claim in claims(judge)),
        *(spreads(method) for method in (WITH_FORCES, CORRELATION, OURS, OTHERS, ALL)),
    ),
)
