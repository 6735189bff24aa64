"""EqCo's toy study, Table 5 (Zhu et al., arXiv 2010.01929): how much mutual information a contrastive loss sees."""

from __future__ import annotations

from itertools import pairwise

from unitsphere.studies.gaussian_pairs import GaussianPairs
from unitsphere.studies.study import Cell, Claim, Study, Table

PAPER = "EqCo, Zhu et al., arXiv 2010.01929"

# Table 5: mutual information -> objective -> the bound at each K.
K = (64, 128, 256, 512)
BOUNDS = {
    2.0: {"InfoNCE": (1.7, 1.8, 1.9, 1.9), "EqCo": (1.9, 1.9, 1.9, 1.9)},
    4.0: {"InfoNCE": (2.9, 3.2, 3.4, 3.6), "EqCo": (3.8, 3.7, 3.6, 3.6)},
    6.0: {"InfoNCE": (3.6, 4.1, 4.5, 4.9), "EqCo": (5.1, 5.0, 4.9, 4.9)},
    8.0: {"InfoNCE": (3.9, 4.6, 5.1, 5.6), "EqCo": (5.8, 5.7, 5.7, 5.6)},
    10.0: {"InfoNCE": (4.1, 4.7, 5.4, 6.0), "EqCo": (6.1, 6.0, 6.0, 6.0)},
}
ALPHA = {"InfoNCE": None, "EqCo": 512.0}


def near_the_paper(table: Table) -> tuple[float, str]:
    gap, cell = max(((abs(value - cell.paper), cell) for cell, value in table if cell.paper is not None), key=first)
    return 0.15 - gap, f"the farthest, {cell.label}, is {gap:.2f} away"


def info_nce_rises(table: Table) -> tuple[float, str]:
    rows = {mi: table.row(mutual_information=mi, objective="InfoNCE") for mi in table.axis("mutual_information")}
    rise, mi = min((min(b - a for a, b in pairwise(row)), mi) for mi, row in rows.items())
    return rise, f"the smallest rise from one K to the next is {rise:+.3f}, at mutual information {mi:g}"


def eqco_is_steady(table: Table) -> tuple[float, str]:
    rows = {mi: table.row(mutual_information=mi, objective="EqCo") for mi in table.axis("mutual_information")}
    spread, mi = max((max(row) - min(row), mi) for mi, row in rows.items())
    return 0.35 - spread, f"the largest spread over K is {spread:.2f}, at mutual information {mi:g}"


def equal_at_512(table: Table) -> tuple[float, str]:
    both = zip(table.row(k=512, objective="InfoNCE"), table.row(k=512, objective="EqCo"), strict=True)
    gap = max(abs(eqco - info_nce) for info_nce, eqco in both)
    return 0.05 - gap, f"the largest difference is {gap:.4f}"


def first(pair: tuple[float, Cell]) -> float:
    return pair[0]


TABLE_5 = Study(
    id="eqco/table-5",
    title="mutual information of Gaussian pairs, estimated with InfoNCE and with EqCo",
    paper=PAPER,
    needs="a CPU: 11 minutes on 2 cores",
    quantity="bound of the mutual information, nats",
    columns="k",
    runner=GaussianPairs(),
    cells=tuple(
        Cell(
            at={"mutual_information": mi, "objective": objective, "k": k},
            paper=value,
            patch={"mutual_information": mi, "k": k, "alpha": ALPHA[objective]},
        )
        for mi, rows in BOUNDS.items()
        for objective, row in rows.items()
        for k, value in zip(K, row, strict=True)
    ),
    claims=(
        Claim("every cell is within 0.15 of the paper's", near_the_paper, "0.15"),
        Claim("InfoNCE's bound rises with K", info_nce_rises),
        Claim("EqCo's bound varies by less than 0.35 over K", eqco_is_steady, "0.35"),
        # 511 negatives weigh as 512 in EqCo, and log 513 replaces log 512: each shifts by under 0.002. The paper prints
        # one decimal.
        Claim("at K = 512 both are equal to within 0.05", equal_at_512, "0.05"),
    ),
    over="k",
    panels=("objective",),
    words={
        "dimensions": "X is a 20-dimensional random variable (3)",
        "hidden": "each MLP has 1 hidden layer of 256 units, followed by ReLU activation function (3)",
        "lr": "We use Adam optimizer with learning rate of 0.0005 (3)",
        "steps": "to optimize InfoNCE or EqCo for 5000 steps (3)",
        "evaluations": "we repeat estimating the lower bound of MI for 1000 times (3)",
        "alpha": "For experiments with EqCo, we set the alpha = 512 (3)",
    },
)
