"""EqCo's figures on ImageNet: accuracy over K (3, 4), the bound of mutual information (1), the gradient's norm (2).

They come without their values: they have a grid and claims, and the numbers that the text and Tables 2 and 4 give.
Where alpha is K, EqCo and the plain loss are one run, a point of both lines.

Below a batch of 256 the paper's MoCo has a bank "of K random keys sampled from the previous batch": one draw for all
queries, as written. Each query drawing its own is run too, since Remark 2 says that it matters little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from unitsphere.studies.claims import ROUNDING, above, ratio
from unitsphere.studies.eqco import PAPER
from unitsphere.studies.eqco_imagenet import LINEAR, LOOKED_AT, QUANTITY, TABLE_4_NUMBERS, WORDS, judged, needs
from unitsphere.studies.study import Cell, Claim, Settings, Study, Table

BATCH = 256
KS = (16, 64, 256, 1024, 4096, 16384, 65536)
ALL, ONCE, EACH = "all there are", "once", "for each query"
PLAIN = "K"  # the alpha of the plain loss
MARGIN = 1.0  # points that count as a loss here


def point(k: int, alpha: int | str, drawn: str) -> dict[str, object]:
    return {"k": k, "alpha": alpha, "drawn": drawn}


def lines(at: Settings) -> list[str]:
    """What takes all keys belongs to the lines of both draws, and what has alpha = K to that of the plain loss too."""
    draws = (", drawn once", ", drawn for each query") if at["drawn"] == ALL else (f", drawn {at['drawn']}",)
    alphas = [f"alpha {at['alpha']}", *(["alpha K"] if at["alpha"] == at["k"] else [])]
    return [alpha + drawn for alpha in alphas for drawn in draws]


def grid(
    ks: Sequence[int],
    alpha: int,
    whole: Callable[[int], Settings],
    draws: Sequence[str],
    papers: Mapping[tuple[int | str, int], float],
) -> tuple[Cell, ...]:
    """whole: the fields of a run whose queries meet all K that there are; papers: by (alpha, K)."""
    cells: list[Cell] = []
    for k in ks:
        for weight in (alpha,) if k == alpha else (PLAIN, alpha):
            weighed = {"alpha": None if weight == PLAIN or whole(k).get("queue_size") == weight else weight}
            for drawn in (ALL,) if k >= BATCH else draws:
                fields = whole(k) if drawn == ALL else {"negatives": k, "shared_draw": drawn == ONCE}
                cells.append(Cell(point(k, weight, drawn), papers.get((weight, k)), {**fields, **weighed}))
    return tuple(cells)


def steady(alpha: int, drawn: str, least: int) -> Claim:
    """Over the K from `least` on, with EqCo."""

    def check(table: Table) -> tuple[float, str]:
        own = [cell for cell in table.part(alpha=alpha).cells if cell.at["drawn"] in (drawn, ALL)]
        values = [value for cell in own if cell.at["k"] >= least for value in table.row(**cell.at)]
        return MARGIN - (max(values) - min(values)) + ROUNDING, f"they lie in {min(values):.1f}..{max(values):.1f}"

    return Claim(f"with EqCo all from K {least} on are within 1 point (drawn {drawn})", check, "1")


def loses(statement: str, few: Settings, many: Settings) -> Claim:
    return above(f"{statement} ({few['drawn']})", many, few, MARGIN)


def closes_the_gap(table: Table) -> tuple[float, str]:
    """The paper: "from 6.1% decrease to 0.2%"."""
    (best,), (plain,), (eqco,) = (
        table.row(**point(k, alpha, ALL)) for k, alpha in ((65536, 65536), (BATCH, PLAIN), (BATCH, 65536))
    )
    told = f"256 negatives lose {best - plain:.1f} points without EqCo and {best - eqco:.1f} with it"
    return min(best - plain - 3.0, 1.0 - (best - eqco)), told


def figure(number: str, method: str, cells: tuple[Cell, ...], claims: tuple[Claim, ...], **fields: object) -> Study:
    return Study(
        id=f"eqco/figure-{number}",
        title=f"{method} with and without EqCo over the number of negatives",
        paper=PAPER,
        needs=needs(len(cells)),
        quantity=QUANTITY,
        columns="k",
        runner=replace(
            judged(method, **fields), protocol={**LINEAR, "recipe": "simclr" if method == "simclr" else "moco"}
        ),
        cells=cells,
        claims=claims,
        over="k",
        lines=lines,
        words=WORDS,
    )


def of_queue(k: int) -> Settings:
    return {"queue_size": k}


def of_batch(k: int) -> Settings:
    return {"negatives": k, "shared_draw": False}


TOP = point(65536, 65536, ALL)
ON_MOCO = tuple(
    claim
    for drawn in (ONCE, EACH)
    for claim in (
        steady(65536, drawn, 64),
        loses("without EqCo 16 negatives lose more than a point", point(16, PLAIN, drawn), TOP),
    )
)
DEGRADES = tuple(
    loses("with EqCo MoCo v2 still degrades at K 16", point(16, 65536, drawn), TOP) for drawn in (ONCE, EACH)
)
ALONG_TABLE_4: dict[tuple[int | str, int], float] = {
    (65536 if k == 65536 else PLAIN, k): paper for k, paper in TABLE_4_NUMBERS.items()
}
FIGURE_3A = figure("3a", "moco-v2", grid(KS, 65536, of_queue, (ONCE, EACH), ALONG_TABLE_4), (*ON_MOCO, *DEGRADES))
FIGURE_3A_V1 = figure(
    "3a-v1", "moco-v1", grid(KS, 65536, of_queue, (ONCE, EACH), {}),
    (*ON_MOCO, Claim("EqCo closes the gap from 65536 to 256", closes_the_gap, "3 and 1")),
    zero_init_residual=False,  # of MoCo v1 no source says otherwise
)  # fmt: skip

# "The only difference is, for SimCLR, we adopt SGD with momentum rather than LARS": rate and decay stay SimCLR's. The
# head is that of the released codes, with a norm after each layer; a batch's other view holds 255 negatives.
SIMCLR = {
    "optimizer": "sgd",
    "base_lr": 0.3,
    "weight_decay": 1e-6,
    "batch_size": BATCH,
    "head": "mlp-bn-bn",
    "both_views": False,
}
MIMICKED = point(BATCH, 4096, ALL)
FIGURE_3B = figure(
    "3b", "simclr",
    (
        *grid((16, 64, BATCH), BATCH, of_batch, (EACH,), {(BATCH, BATCH): 62.0}),
        Cell(MIMICKED, 65.3, {"negatives": BATCH, "alpha": 4096}),
    ),
    (
        steady(BATCH, EACH, 16),
        loses("without EqCo 16 negatives lose more than a point", point(16, PLAIN, EACH), point(BATCH, BATCH, ALL)),
        above("alpha 4096 is better still", MIMICKED, point(BATCH, BATCH, ALL)),
    ),
    **SIMCLR,
)  # fmt: skip
FIGURE_4 = figure(
    "4", "simo", grid((4, 16, 64, BATCH), BATCH, of_batch, (ONCE, EACH), {(BATCH, 16): 68.1, (BATCH, BATCH): 68.0}),
    tuple(
        claim
        for drawn in (ONCE, EACH)  # the released code draws once; the paper does not say
        for claim in (
            steady(BATCH, drawn, 4),
            loses("without EqCo 4 negatives lose more than a point", point(4, PLAIN, drawn), point(BATCH, BATCH, ALL)),
        )
    ),
)  # fmt: skip

# Figures 1 and 2 are of runs that Figure 3a has already.
ENDED = 200
EPOCHS = (*LOOKED_AT, ENDED)


def of_run(k: int, alpha: int | str, epoch: int) -> dict[str, object]:
    return {"k": k, "alpha": alpha, "epoch": epoch}


def at_the_end(alpha: int | str, ks: Sequence[int]) -> list[Settings]:
    return [of_run(k, 65536 if k == 65536 else alpha, ENDED) for k in ks]


SHOWN = (64, 256, 4096, 65536)


def bound_rises(table: Table) -> tuple[float, str]:
    values = [value for at in at_the_end(PLAIN, SHOWN) for value in table.row(**at)]
    return min(b - a for a, b in pairwise(values)), "at the end " + ", ".join(f"{value:.2f}" for value in values)


def bound_stays(table: Table) -> tuple[float, str]:
    values = [value for at in at_the_end(65536, SHOWN) for value in table.row(**at)]
    return 0.5 - (max(values) - min(values)), "at the end " + ", ".join(f"{value:.2f}" for value in values)


def of_figure_3a(k: int, alpha: int | str) -> Settings:
    """The fields of its run, with a draw for each query where it draws."""
    drawn = ALL if k >= BATCH else EACH
    (fields,) = (cell.given for cell in FIGURE_3A.cells if cell.at == point(k, alpha, drawn))
    return fields


def over_epochs(at: Settings) -> list[str]:
    own = f"K {at['k']}, "
    return [own + "plain"] if at["alpha"] == PLAIN else [own + "EqCo"] if at["k"] != at["alpha"] else [own + "either"]


FIGURE_1 = Study(
    id="eqco/figure-1",
    title="the bound of mutual information while MoCo v2 trains, with and without EqCo (alpha 65536)",
    paper=PAPER,
    needs=needs(7),
    quantity="log(1 + alpha) - L, the mean over an epoch's steps, nats",
    columns="epoch",
    runner=replace(judged("moco-v2"), protocol={"protocol": "training"}, read="mutual_information_bound"),
    cells=tuple(
        Cell(of_run(k, alpha, epoch), None, {**of_figure_3a(k, alpha), "evaluate.epoch": epoch})
        for k in SHOWN
        for alpha in ((65536,) if k == 65536 else (PLAIN, 65536))
        for epoch in (1, 10, *EPOCHS)
    ),
    claims=(
        Claim("without EqCo the bound keeps increasing with K", bound_rises),
        Claim("with EqCo it converges to almost the same value: within 0.5 nats", bound_stays, "0.5"),
    ),
    over="epoch",
    lines=over_epochs,
    words=WORDS,
)


def of_gradient(k: int, loss: str, epoch: int) -> dict[str, object]:
    return {"epoch": epoch, "loss": loss, "k": k}


def steadier(table: Table) -> tuple[float, str]:
    """How much narrower, as a factor, the norms lie over K with EqCo, at the end of training."""
    plain, eqco = (
        [value for k in KS for value in table.row(**of_gradient(k, loss, ENDED))] for loss in ("plain", "EqCo")
    )
    far = [ratio(max(values), min(values)) for values in (plain, eqco)]
    return far[0] - far[1], f"the largest over the smallest is {far[0]:.2f} without EqCo and {far[1]:.2f} with it"


FIGURE_2 = Study(
    id="eqco/figure-2",
    title="the norm of the gradient of a query over K, on checkpoints of one plain MoCo v2",
    paper=PAPER,
    needs=needs(1),
    quantity="|dL/dq|, the mean over queries (of whose deviation the kept result tells)",
    columns="k",
    runner=replace(judged("moco-v2"), protocol={"protocol": "gradient", "alpha": 65536.0}, read="plain"),
    cells=tuple(
        Cell(
            of_gradient(k, loss, epoch), None,
            {
                "evaluate.epoch": epoch, "evaluate.negatives": list(KS),
                "evaluate.read": f"{loss.lower()}.{place}.gradient_norm",
            },
        )
        for epoch in EPOCHS
        for loss in ("plain", "EqCo")
        for place, k in enumerate(KS)
    ),
    claims=(Claim("with EqCo the gradient's norm is much steadier over K", steadier),),
    over="k",
    panels=("loss",),
    words=WORDS,
)  # fmt: skip

STUDIES = (FIGURE_1, FIGURE_2, FIGURE_3A, FIGURE_3A_V1, FIGURE_3B, FIGURE_4)
