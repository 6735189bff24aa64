"""EqCo's tables and figures on ImageNet (Zhu et al., arXiv 2010.01929): a linear classifier on ResNet-50, 200 epochs.

The figures come without their values: they have a grid and claims, and only the numbers that the text gives.
"""

from __future__ import annotations

from collections.abc import Mapping

from unitsphere.studies.claims import above, no_worse
from unitsphere.studies.eqco import PAPER
from unitsphere.studies.pretraining import Pretraining
from unitsphere.studies.study import Cell, Claim, Study, Table

LINEAR = {"protocol": "linear", "recipe": "moco", "augment": True}
QUANTITY = "ImageNet top-1 of a linear classifier, %"


def judged(method: str, **fields: object) -> Pretraining:
    base = {"method": method, "data": "imagenet", "epochs": 200, "base_lr": 0.03, **fields}
    return Pretraining(base=base, protocol=LINEAR, read="top1")


def needs(runs: int, epochs: int = 200) -> str:
    return f"ImageNet and GPUs: {runs} runs of {epochs} epochs, ResNet-50"


def span(table: Table) -> tuple[float, str]:
    values = [value for _, value in table]
    return max(values) - min(values), f"they lie between {min(values):.1f} and {max(values):.1f}"


def within_half(table: Table) -> tuple[bool, str]:
    width, evidence = span(table)
    return width <= 0.5, evidence


TABLE_1 = Study(
    id="eqco/table-1",
    title="MoCo v2 with more queries in a batch, the learning rate scaled with them",
    paper=PAPER,
    needs=needs(3),
    quantity=QUANTITY,
    columns="n",
    runner=judged("moco-v2"),
    cells=tuple(Cell({"n": n}, paper, {"batch_size": n}) for n, paper in ((256, 67.5), (512, 67.5), (1024, 67.4))),
    claims=(Claim("the accuracies lie within 0.5 of each other", within_half),),
)

SIMO_ROWS = (  # epochs, K, alpha, top-1
    (200, 16, 256, 68.1),
    (200, 256, 256, 68.0),
    (200, 256, 65536, 68.5),
    (800, 256, 256, 71.8),
    (800, 256, 65536, 72.1),
)


TABLE_2 = Study(
    id="eqco/table-2",
    title="SiMo beside MoCo v2 (the rows of other methods are not ours to run)",
    paper=PAPER,
    needs="ImageNet and GPUs: 4 runs of 200 and 3 of 800 epochs, ResNet-50",
    quantity=QUANTITY,
    columns="epochs",
    runner=judged("simo"),
    cells=(
        *(
            Cell({"method": "MoCo v2", "epochs": epochs}, paper, {"method": "moco-v2", "epochs": epochs})
            for epochs, paper in ((200, 67.5), (800, 71.1))
        ),
        *(
            Cell(
                {"method": "SiMo", "k": k, "alpha": alpha, "epochs": epochs},
                paper,
                {"negatives": k, "alpha": alpha, "epochs": epochs},
            )
            for epochs, k, alpha, paper in SIMO_ROWS
        ),
    ),
    claims=(
        no_worse(
            "SiMo with 16 negatives is no worse than MoCo v2",
            {"method": "SiMo", "epochs": 200, "k": 16},
            {"method": "MoCo v2", "epochs": 200},
        ),
    ),
)

TABLE_3 = Study(
    id="eqco/table-3",
    title="SiMo with different alpha",
    paper=PAPER,
    needs=needs(5),
    quantity=QUANTITY,
    columns="alpha",
    runner=judged("simo"),
    cells=tuple(
        Cell({"alpha": alpha}, paper)
        for alpha, paper in ((256, 68.0), (1024, 68.1), (4096, 68.1), (16384, 68.4), (65536, 68.5))
    ),
    claims=(no_worse("alpha 65536 is no worse than 256", {"alpha": 65536}, {"alpha": 256}),),
)

TABLE_4 = Study(
    id="eqco/table-4",
    title="MoCo v2 with different K",
    paper=PAPER,
    needs=needs(5),
    quantity=QUANTITY,
    columns="k",
    runner=judged("moco-v2"),
    cells=tuple(
        Cell({"k": k}, paper, {"queue_size": k})
        for k, paper in ((256, 67.0), (1024, 67.1), (4096, 67.6), (16384, 67.3), (65536, 67.5))
    ),
    # The paper's text says that accuracy "descends"; its numbers rise.
    claims=(no_worse("K = 65536 is no worse than K = 256", {"k": 65536}, {"k": 256}),),
)

TABLE_6 = Study(
    id="eqco/table-6",
    title="SiMo with and without a slow copy",
    paper=PAPER,
    needs=needs(2, 100),
    quantity=QUANTITY,
    columns="momentum",
    runner=judged("simo", epochs=100),
    cells=tuple(Cell({"momentum": m}, paper, {"key_momentum": m}) for m, paper in ((0.0, 62.1), (0.999, 64.4))),
    claims=(above("the slow copy is better", {"momentum": 0.999}, {"momentum": 0.0}),),
)

TABLE_7 = Study(
    id="eqco/table-7",
    title="SiMo with shuffled and with synchronised batch norm",
    paper=PAPER,
    needs=needs(2, 100),
    quantity=QUANTITY,
    columns="norm",
    runner=judged("simo", epochs=100),
    cells=(
        Cell({"norm": "shuffled"}, 58.8, {"bn_groups": 8}),
        Cell({"norm": "synchronised"}, 64.4, {"bn_groups": 1}),
    ),
    claims=(above("synchronised batch norm is better", {"norm": "synchronised"}, {"norm": "shuffled"}),),
)

# EqCo trains SimCLR as MoCo, on batches that its cards hold.
SGD = {"optimizer": "sgd", "batch_size": 256, "weight_decay": 1e-4}
KS = (16, 64, 256, 1024, 4096, 16384, 65536)


def steady_with_eqco(table: Table) -> tuple[bool, str]:
    width, evidence = span(table.part(eqco=True))
    return width <= 1.0, f"with EqCo {evidence}"


def falls_without(table: Table) -> tuple[bool, str]:
    plain = table.row(eqco=False)
    return plain[0] < max(plain) - 1.0, f"without EqCo {plain[0]:.1f} at the smallest K, {max(plain):.1f} at best"


EQCO_CLAIMS = (
    Claim("with EqCo the accuracies lie within 1 point over K", steady_with_eqco),
    Claim("without it the smallest K loses more than 1 point", falls_without),
)


MORE = "with alpha 4096"  # SimCLR's one point beyond its batch


def figure(
    number: str,
    method: str,
    ks: tuple[int, ...],
    alpha: int,
    papers: Mapping[tuple[object, int], float] | None = None,
    more: tuple[Cell, ...] = (),
    claims: tuple[Claim, ...] = EQCO_CLAIMS,
    **fields: object,
) -> Study:
    """papers: what the text has, by whether with EqCo and K."""
    known = papers or {}
    cells = (
        *(
            Cell({"eqco": eqco, "k": k}, known.get((eqco, k)), {"negatives": k, "alpha": alpha if eqco else None})
            for eqco in (False, True)
            for k in ks
        ),
        *more,
    )
    return Study(
        id=f"eqco/figure-{number}",
        title=f"{method} with and without EqCo (alpha {alpha}) over the number of negatives",
        paper=PAPER,
        needs=needs(len(cells)),
        quantity=QUANTITY,
        columns="k",
        runner=judged(method, **fields),
        cells=cells,
        claims=claims,
        over="k",
    )


def closes_the_gap(table: Table) -> tuple[bool, str]:
    """The paper: "from 6.1% decrease to 0.2%"."""
    plain, eqco = ([table.row(eqco=on, k=k)[0] for k in (65536, 256)] for on in (False, True))
    lost, still = plain[0] - plain[1], eqco[0] - eqco[1]
    return lost > 3.0 and still < 1.0, f"256 negatives lose {lost:.1f} points without EqCo and {still:.1f} with it"


FIGURE_3A = figure("3a", "moco-v2", KS, 65536)
FIGURE_3A_V1 = figure(
    "3a-v1", "moco-v1", KS, 65536, claims=(*EQCO_CLAIMS, Claim("EqCo closes the gap from 65536 to 256", closes_the_gap))
)
FIGURE_3B = figure(
    "3b", "simclr", (16, 64, 256), 256, {(False, 256): 62.0, (True, 256): 62.0},
    more=(Cell({"eqco": MORE, "k": 256}, 65.3, {"negatives": 256, "alpha": 4096}),),
    claims=(*EQCO_CLAIMS, above("a larger alpha is better still", {"eqco": MORE}, {"eqco": True, "k": 256})),
    both_views=False, **SGD,
)  # fmt: skip
FIGURE_4 = figure("4", "simo", (4, 16, 64, 256), 256, {(True, 16): 68.1, (True, 256): 68.0, (False, 256): 68.0})

STUDIES = (
    TABLE_1,
    TABLE_2,
    TABLE_3,
    TABLE_4,
    TABLE_6,
    TABLE_7,
    FIGURE_3A,
    FIGURE_3A_V1,
    FIGURE_3B,
    FIGURE_4,
)
