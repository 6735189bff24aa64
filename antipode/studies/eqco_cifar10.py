"""EqCo's claims on CIFAR-10 with a ResNet-18: a grid of ours, since the paper has ImageNet alone.

MoCo with 16 to 4096 negatives, plain and weighed as 4096, drawn for each query or once for all; SimCLR and SiMo with
few and all of the batch's. The recipe is the small-data one of `antipode pretrain --data cifar10`; where a method is
compared with itself only the negatives differ.
"""

from __future__ import annotations

from antipode.studies.pretraining import Pretraining
from antipode.studies.study import Cell, Claim, Study, Table

EPOCHS = 40
JUDGES: dict[str, dict[str, object]] = {  # both on the backbone's features, last epoch
    "k-NN": {"evaluate.protocol": "knn", "evaluate.k": [200], "evaluate.temperature": 0.1, "evaluate.read": "k=200"},
    "linear": {"evaluate.protocol": "linear", "evaluate.read": "top1"},
}
MOCO = (  # K, alpha, shared draw
    *((k, alpha, False) for k in (16, 64, 256) for alpha in (None, 4096)),
    *((64, alpha, True) for alpha in (None, 4096)),
    (4096, None, False),
)
SIMCLR = ((16, 255), (16, 4096), (255, 255), (255, 4096))
SIMO = ((16, None), (16, 511), (64, 511), (511, 511), (16, 4096), (511, 4096))


def cell(method: str, k: int, alpha: int | None, judge: str, shared: bool = False) -> Cell:
    patch: dict[str, object] = {
        "method": method,
        "negatives": k,
        "alpha": alpha,
        "shared_draw": shared,
        **JUDGES[judge],
    }
    if method == "simclr":
        patch["both_views"] = False
    at: dict[str, object] = {
        "method": method,
        "k": k,
        "alpha": alpha or k,
        "drawn": "once" if shared else "for each",
        "judge": judge,
    }
    return Cell(at, None, patch)


def value(table: Table, judge: str, **at: object) -> float:
    (found,) = table.row(judge=judge, **{"drawn": "for each", **at})
    return found


def compared(judge: str, low: dict[str, object], high: dict[str, object], by: float, what: str) -> Claim:
    """That one cell is at least `by` points above another."""

    def check(table: Table) -> tuple[bool, str]:
        a, b = value(table, judge, **low), value(table, judge, **high)
        return b - a >= by, f"{a:.1f} and {b:.1f}"

    return Claim(f"{what} ({judge})", check)


def claims(judge: str) -> tuple[Claim, ...]:
    def moco(k: int, alpha: int, drawn: str = "for each") -> dict[str, object]:
        return {"method": "moco-v2", "k": k, "alpha": alpha, "drawn": drawn}

    def simo(k: int, alpha: int) -> dict[str, object]:
        return {"method": "simo", "k": k, "alpha": alpha}

    all_keys = moco(4096, 4096)
    return (
        compared(judge, all_keys, moco(64, 4096), -2.0, "with EqCo 64 negatives lose less than 2 points on 4096"),
        compared(judge, moco(64, 64), all_keys, 2.0, "without it 64 negatives lose at least 2 points"),
        compared(judge, moco(64, 64), moco(64, 4096), 0.0, "at 64 negatives drawn for each query EqCo helps"),
        compared(judge, moco(64, 64, "once"), moco(64, 4096, "once"), 0.0, "at 64 negatives drawn once EqCo helps"),
        compared(judge, simo(511, 511), simo(16, 511), -2.0, "SiMo loses less than 2 points from 511 to 16 negatives"),
        compared(judge, all_keys, simo(16, 511), -2.0, "SiMo with 16 negatives is within 2 points of MoCo v2 or above"),
        compared(judge, simo(511, 511), simo(511, 4096), -2.0, "a larger alpha costs SiMo less than 2 points"),
    )


CIFAR10 = Study(
    id="eqco/cifar10",
    title="few negatives on CIFAR-10, with and without EqCo",
    paper="a grid of antipode's own, after EqCo's Fig. 3 and 4",
    needs=f"CIFAR-10 and a GPU: 19 runs of {EPOCHS} epochs, ResNet-18",
    quantity="accuracy on the test images, %",
    columns="judge",
    runner=Pretraining(base={"data": "cifar10", "epochs": EPOCHS}, protocol={}, read="k=200"),
    cells=tuple(
        made
        for judge in JUDGES
        for made in (
            *(cell("moco-v2", k, alpha, judge, shared) for k, alpha, shared in MOCO),
            *(cell("simclr", k, alpha, judge) for k, alpha in SIMCLR),
            *(cell("simo", k, alpha, judge) for k, alpha in SIMO),
        )
    ),
    claims=tuple(claim for judge in JUDGES for claim in claims(judge)),
)
