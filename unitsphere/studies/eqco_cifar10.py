"""EqCo's claims on CIFAR-10 with a ResNet-18: a grid of ours, since the paper has ImageNet alone.

MoCo with 16 to 4096 negatives, plain and weighed as 4096, drawn for each query or once for all; SimCLR with 16 and with
255 of the batch's 511, SiMo with few and with all.
"""

from __future__ import annotations

from unitsphere.studies.cifar10 import ACCURACIES, HARMLESS, QUANTITY, cells, judged, needs
from unitsphere.studies.claims import above, no_worse
from unitsphere.studies.study import Cell, Claim, Settings, Study

MOCO = (  # K, alpha, shared draw
    *((k, alpha, False) for k in (16, 64, 256) for alpha in (None, 4096)),
    *((64, alpha, True) for alpha in (None, 4096)),
    (4096, None, False),
)
SIMCLR = ((16, 255), (16, 4096), (255, 255), (255, 4096))
ALPHAS = (255, 511, 4096)
SIMO = ((16, None), (16, 511), (64, 511), (511, 511), (16, 4096), (64, 4096), (511, 4096))
# What the published numbers were measured with, whatever the methods' own settings are by now.
MEASURED_WITH: dict[str, dict[str, object]] = {
    "simclr": {"both_views": False, "head": "mlp-bn"},
    "simo": {"zero_init_residual": True},
}


def runs() -> tuple[Cell, ...]:
    found: list[Cell] = []
    for method, k, alpha, shared in (
        *(("moco-v2", *row) for row in MOCO),
        *(("simclr", *row, False) for row in SIMCLR),
        *(("simo", *row, False) for row in SIMO),
    ):
        fields: dict[str, object] = {"method": method, "negatives": k, "alpha": alpha, "shared_draw": shared}
        fields |= MEASURED_WITH.get(method, {})
        drawn = "once" if shared else "for each"
        found += cells({"method": method, "k": k, "alpha": alpha or k, "drawn": drawn}, fields)
    return tuple(found)


def lines(at: Settings) -> list[str]:
    """Where alpha is K, EqCo and the plain loss are the same."""
    drawn = ", drawn once" if at["drawn"] == "once" else ""
    found = [f"alpha {at['alpha']}{drawn}"] if at["alpha"] in ALPHAS else []
    return [*found, f"alpha K{drawn}"] if at["alpha"] == at["k"] else found


def claims(judge: str) -> tuple[Claim, ...]:
    def moco(k: int, alpha: int, drawn: str = "for each") -> dict[str, object]:
        return {"method": "moco-v2", "k": k, "alpha": alpha, "drawn": drawn, "judge": judge}

    def simo(k: int, alpha: int) -> dict[str, object]:
        return {"method": "simo", "k": k, "alpha": alpha, "judge": judge}

    all_keys = moco(4096, 4096)
    few = moco(64, 64)
    return (
        no_worse(f"with EqCo 64 negatives lose at most 2 points on 4096 ({judge})", moco(64, 4096), all_keys, 2.0),
        above(f"without it 64 negatives lose at least 2 points ({judge})", all_keys, few, 2.0),
        above(f"at 64 negatives drawn for each query EqCo helps ({judge})", moco(64, 4096), few),
        above(f"at 64 negatives drawn once EqCo helps ({judge})", moco(64, 4096, "once"), moco(64, 64, "once")),
        no_worse(f"SiMo loses at most 2 points from 511 to 16 negatives ({judge})", simo(16, 511), simo(511, 511), 2.0),
        no_worse(
            f"SiMo with 16 negatives is within 2 points of MoCo v2 or above ({judge})", simo(16, 511), all_keys, 2.0
        ),
        no_worse(f"a larger alpha costs SiMo at most 2 points ({judge})", simo(511, 4096), simo(511, 511), 2.0),
    )


CIFAR10 = Study(
    id="eqco/cifar10",
    title="few negatives on CIFAR-10, with and without EqCo",
    paper="a grid of unitsphere's own, after EqCo's Fig. 3 and 4",
    needs=needs(len(MOCO) + len(SIMCLR) + len(SIMO)),
    quantity=QUANTITY,
    columns="judge",
    harmless=HARMLESS,
    runner=judged(),
    cells=runs(),
    claims=tuple(claim for judge in ACCURACIES for claim in claims(judge)),
    over="k",
    panels=("judge", "method"),
    lines=lines,
)
