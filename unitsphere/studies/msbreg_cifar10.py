"""MSBReg's claims on CIFAR-10 with a ResNet-18: a grid of ours, with the forms that the supplement leaves open.

All cells have one recipe and, but for what follows, one learning rate: 0.12 for 256 images is MSBReg's on CIFAR-10
(0.03 times 4 views) and BYOL's. An epoch with 4 views is twice the work of one with 2: so 4 views are also trained for
half as long, and the forms of the centroid are compared there. A collapse shows within a few epochs; as it may depend
on the optimiser, layer norm is tried with SGD and with the supplement's LARS.
"""

from __future__ import annotations

from math import hypot

from unitsphere.studies.cifar10 import ACCURACIES, EPOCHS, HARMLESS, QUANTITY, cells, judged, needs
from unitsphere.studies.claims import above
from unitsphere.studies.msbreg import BYOL, METHODS, NORMS, OURS, PAPER, WITH_FORCES, forces
from unitsphere.studies.msbreg import JUDGES as OF_TABLE_3
from unitsphere.studies.study import Cell, Claim, Study, Table

JUDGES = {**ACCURACIES, "alignment": OF_TABLE_3["alignment"], "uniformity": OF_TABLE_3["uniformity"]}
RATE, DECAY = 0.12, 5e-4
HALF = EPOCHS // 2
HALF_AS_LONG = f"{OURS} for {HALF} epochs"
GRAM, CORRELATION = f"{WITH_FORCES} (gram)", f"{WITH_FORCES} (correlation)"
SPLIT, HALF_SPLIT, HALF_ALL = f"{OURS} (split)", f"{HALF_AS_LONG} (split)", f"{HALF_AS_LONG} (all)"
LN, LN_AND_FORCE, LN_AND_MORE = "BYOL with LN", "BYOL + L_b with LN", "BYOL + 100 L_b with LN"
LN_AND_BOTH = f"{WITH_FORCES} with LN"
BY_SGD = " by SGD"
MOVED = ("alignment", "uniformity")
COLLAPSED = -0.05  # uniformity above which embeddings are in a point

SHORT: dict[str, object] = {**NORMS["LN"], "epochs": EPOCHS // 4}
LARS: dict[str, object] = {**SHORT, "optimizer": "lars", "base_lr": 0.5, "weight_decay": 1e-5}
RUNS: dict[str, dict[str, object]] = {
    BYOL: forces(2, 0.0, 0.0),
    WITH_FORCES: forces(2, 0.004, 0.25),
    OURS: forces(4, 0.004, 0.5),
    SPLIT: {**forces(4, 0.004, 0.5), "centroid": "split"},
    HALF_AS_LONG: {**forces(4, 0.004, 0.5), "epochs": HALF},
    HALF_SPLIT: {**forces(4, 0.004, 0.5), "epochs": HALF, "centroid": "split"},
    HALF_ALL: {**forces(4, 0.004, 0.5), "epochs": HALF, "centroid": "all"},
    LN: {**forces(2, 0.0, 0.0), **LARS},
    LN_AND_FORCE: {**forces(2, 0.0, 5e-3), **LARS},
    LN_AND_MORE: {**forces(2, 0.0, 0.5), **LARS},
    LN_AND_BOTH: {**forces(2, 0.004, 5e-3), **LARS},
    LN + BY_SGD: {**forces(2, 0.0, 0.0), **SHORT},
    LN_AND_MORE + BY_SGD: {**forces(2, 0.0, 0.5), **SHORT},
    LN_AND_BOTH + BY_SGD: {**forces(2, 0.004, 5e-3), **SHORT},
    GRAM: {**forces(2, 0.004, 0.25), "singular_form": "gram"},
    CORRELATION: {**forces(2, 0.004, 0.25), "singular_form": "correlation"},
}


def claims(judge: str) -> tuple[Claim, ...]:
    def claim(statement: str, high: str, low: str) -> Claim:
        return above(f"{statement} ({judge})", {"method": high, "judge": judge}, {"method": low, "judge": judge})

    return (
        claim("L_b and L_s help BYOL", WITH_FORCES, BYOL),
        claim("4 views are above BYOL after as many epochs", OURS, BYOL),
        claim("4 views are above BYOL after as many passes of the encoder", HALF_AS_LONG, BYOL),
        claim("4 views are above BYOL with the forces after as many passes", HALF_AS_LONG, WITH_FORCES),
        claim("a view that meets the others is better than halves that meet", HALF_AS_LONG, HALF_SPLIT),
        claim("a view that meets the others is better than all that meet all", HALF_AS_LONG, HALF_ALL),
    )


def spreads(method: str) -> Claim:
    return above(
        f"{method}: uniformity is at least 1 below BYOL's",
        {"method": BYOL, "judge": "uniformity"},
        {"method": method, "judge": "uniformity"},
        by=1.0,
    )


def nearest_to_table_3(default: str, others: tuple[str, ...], named: str) -> Claim:
    """That uniformity and alignment move from BYOL's as in Table 3 with the default, more so than with other forms."""
    _, (_, *base) = METHODS[BYOL]
    _, (_, *moved) = METHODS[named]
    wanted = [after - before for after, before in zip(moved, base, strict=True)]

    def check(table: Table) -> tuple[float, str]:
        def moves(method: str) -> list[float]:
            values = [table.row(method=name, judge=judge)[0] for judge in MOVED for name in (method, BYOL)]
            return [values[0] - values[1], values[2] - values[3]]

        far = {m: hypot(*(x - y for x, y in zip(moves(m), wanted, strict=True))) for m in (default, *others)}
        told = "; ".join(f"{method} {', '.join(f'{move:+.2f}' for move in moves(method))}" for method in far)
        told += f"; Table 3 {wanted[0]:+.2f}, {wanted[1]:+.2f}"
        return min(far[other] for other in others) - far[default], told

    return Claim(f"{default} moves alignment and uniformity most as in Table 3", check)


def collapses(method: str) -> Claim:
    def check(table: Table) -> tuple[float, str]:
        (value,) = table.row(method=method, judge="uniformity")
        return value - COLLAPSED, f"uniformity {value:.3f}"

    return Claim(f"{method} collapses", check, f"uniformity {COLLAPSED:g}")


def prevents(method: str, without: str) -> Claim:
    def check(table: Table) -> tuple[float | None, str]:
        (alone,), (forced,) = (table.row(method=name, judge="uniformity") for name in (without, method))
        evidence = f"uniformity {forced:.3f}, without it {alone:.3f}"
        return (COLLAPSED - forced if alone > COLLAPSED else None), evidence

    return Claim(f"{method}: the collapse is prevented", check, f"uniformity {COLLAPSED:g}")


def grid() -> tuple[Cell, ...]:
    return tuple(cell for name, fields in RUNS.items() for cell in cells({"method": name}, fields, JUDGES))


CIFAR10 = Study(
    id="msbreg/cifar10",
    title="BYOL, both forces and 4 views on CIFAR-10, with the forms that are open; layer norm",
    paper=f"a grid of unitsphere's own, after Tables 3 and 4 of {PAPER}",
    needs=needs(len(RUNS), f"{EPOCHS // 4} to {EPOCHS}"),
    quantity=QUANTITY,
    columns="judge",
    harmless=HARMLESS,
    runner=judged(method="msbreg", lr_per_view=False, base_lr=RATE, weight_decay=DECAY, keep_epochs=[]),
    cells=grid(),
    claims=(
        *(claim for judge in ACCURACIES for claim in claims(judge)),
        *(spreads(method) for method in (WITH_FORCES, OURS)),
        *(collapses(method) for method in (LN, LN + BY_SGD)),
        *(prevents(method, LN) for method in (LN_AND_FORCE, LN_AND_MORE, LN_AND_BOTH)),
        *(prevents(method + BY_SGD, LN + BY_SGD) for method in (LN_AND_MORE, LN_AND_BOTH)),
        nearest_to_table_3(WITH_FORCES, (GRAM, CORRELATION), WITH_FORCES),
        nearest_to_table_3(HALF_AS_LONG, (HALF_SPLIT, HALF_ALL), OURS),
    ),
)
