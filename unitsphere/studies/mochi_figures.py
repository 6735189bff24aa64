"""MoCHi's Figures 2a, 2b, 2c and 3c on ImageNet-100: how hard negatives are, and how features use the sphere.

They come without their values, but for what the text says of 2c: about 8 % of the mixtures have a parent of the
query's class at the end, about 1 % two. Which two (N, s, s') Figure 2b shows is not said: here one without mixtures
with the query, and the best one of Table 3. Its MoCo has a temperature of 0.07, as B.1 says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unitsphere.studies.claims import above, near, ratio
from unitsphere.studies.mochi import BEST, KEPT, PAPER, SUPERVISED, WORDS, judged, trained
from unitsphere.studies.study import Cell, Claim, Study, Table

EPOCHS = (*KEPT, 200)
MOCO, MOCO_V2, PAIRS, MIXED = "MoCo", "MoCo v2", "MoCHi 1024/1024/0", "MoCHi 1024/1024/128"
ORACLE, MIXED_ORACLE = "MoCo v2 with the oracle", "MoCHi 1024/1024/128 with the oracle"
SUPERVISED_NAME = "supervised"
FIELDS: dict[str, dict[str, object]] = {
    MOCO: {"method": "moco-v1"},
    MOCO_V2: trained(None),
    PAIRS: trained((1024, 1024, 0)),
    MIXED: trained(BEST),
    ORACLE: trained(None, oracle=True),
    MIXED_ORACLE: trained(BEST, oracle=True),
    SUPERVISED_NAME: dict(SUPERVISED.given),
}
REAL, ALL = "real", "real and synthetic"
NEEDS = "ImageNet and a GPU: {} runs of 200 epochs on 100 classes, ResNet-50 (those of mochi/table-3)"
HARDNESS = replace(judged("imagenet100"), protocol={"protocol": "hardness", "images": 4096}, read="proxy")

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def ranked(epoch: int, rank: int) -> dict[str, object]:
    return {"epoch": epoch, "rank": rank}


def fewer_matter(table: Table) -> tuple[float, str]:
    """The hardest negative's probability over that of the 1024th, before the first step and after the last."""
    steep = [
        ratio(*(table.row(**ranked(epoch, rank))[0] for rank in (RANKS[0], RANKS[-1])))
        for epoch in (EPOCHS[0], EPOCHS[-1])
    ]
    return steep[1] - steep[0], f"the hardest has {steep[0]:.3g} times the 1024th's at first, {steep[1]:.3g} at last"


FIGURE_2A = Study(
    id="mochi/figure-2a",
    title="the 1024 highest matching probabilities of MoCo v2's negatives, over epochs",
    paper=PAPER,
    needs=NEEDS.format(1),
    quantity="matching probability, the mean over queries",
    columns="rank",
    runner=HARDNESS,
    cells=tuple(
        Cell(
            ranked(epoch, rank),
            None,
            {**FIELDS[MOCO_V2], "evaluate.epoch": epoch, "evaluate.read": f"matching.{rank - 1}"},
        )
        for epoch in EPOCHS
        for rank in RANKS
    ),
    claims=(Claim("as training progresses fewer negatives offer significant contributions", fewer_matter),),
    over="rank",
    words=WORDS,
)


def proxy(method: str, negatives: str = REAL, epoch: int = 200) -> dict[str, object]:
    return {"method": method, "negatives": negatives, "epoch": epoch}


SHOWN = ((MOCO, REAL), (MOCO_V2, REAL), *((method, kind) for method in (PAIRS, MIXED) for kind in (REAL, ALL)))
LOGGED = {REAL: "contrastive_accuracy", ALL: "accuracy_among_synthetic"}

FIGURE_2B = Study(
    id="mochi/figure-2b",
    title="the proxy task while MoCo, MoCo v2 and MoCHi train, with and without synthetic negatives",
    paper=PAPER,
    needs=NEEDS.format(4),
    quantity="share of queries whose key is above all negatives, the mean over an epoch's steps",
    columns="epoch",
    runner=replace(judged("imagenet100"), protocol={"protocol": "training"}, read=LOGGED[REAL]),
    cells=tuple(
        Cell(
            proxy(method, kind, epoch), None,
            {**FIELDS[method], "evaluate.epoch": epoch, "evaluate.read": LOGGED[kind]},
        )
        for method, kind in SHOWN
        for epoch in (20, 50, 100, 150, 200)  # the first 10 have no mixtures
    ),
    claims=(
        above("MoCo v2's proxy task is harder than MoCo's", proxy(MOCO), proxy(MOCO_V2)),
        near("with pairs alone it ends within 0.02 of the baseline", proxy(PAIRS, ALL), proxy(MOCO_V2), 0.02),
        above("mixed with the query it ends much harder", proxy(MOCO_V2), proxy(MIXED, ALL), 0.02),
        near("without synthetic negatives it ends within 0.02 of MoCo v2's", proxy(MIXED), proxy(MOCO_V2), 0.02),
    ),
    over="epoch",
    words=WORDS,
)  # fmt: skip

FALSE, ONE, BOTH = "false negatives among the top", "mixtures with a false parent", "mixtures with two"
READ = {FALSE: "false_negatives", ONE: "one_false", BOTH: "both_false"}


def false(method: str, what: str = FALSE, epoch: int = 200) -> dict[str, object]:
    return {"method": method, "what": what, "epoch": epoch}


def of_2c(method: str, kinds: Sequence[str]) -> list[Cell]:
    paper = {ONE: 8.0, BOTH: 1.0}
    return [
        Cell(
            false(method, kind, epoch), paper.get(kind) if (method, epoch) == (MIXED, 200) else None,
            {**FIELDS[method], "evaluate.epoch": epoch, "evaluate.read": READ[kind]},
        )
        for kind in kinds
        for epoch in EPOCHS[1:]
    ]  # fmt: skip


FIGURE_2C = Study(
    id="mochi/figure-2c",
    title="negatives of the query's own class among its 1024 hardest, over epochs",
    paper=PAPER,
    needs=NEEDS.format(4),
    quantity="%, the mean over queries",
    columns="epoch",
    runner=HARDNESS,
    cells=(
        *of_2c(MOCO_V2, (FALSE,)),
        *of_2c(ORACLE, (FALSE,)),
        *of_2c(MIXED, (FALSE, ONE, BOTH)),
        *of_2c(MIXED_ORACLE, (FALSE,)),
    ),
    claims=(
        above("more and more of them are of the query's class", false(MOCO_V2), false(MOCO_V2, epoch=50)),
        above("the oracle brings embeddings of a class closer", false(ORACLE), false(MOCO_V2)),
        above("at the end MoCHi has fewer than MoCo v2", false(MOCO_V2), false(MIXED)),
        above("mixtures of two false negatives increase over time", false(MIXED, BOTH), false(MIXED, BOTH, 50)),
    ),
    over="epoch",
    words=WORDS,
)


def measured(method: str, what: str) -> dict[str, object]:
    return {"method": method, "measure": what}


def lower(statement: str, what: str, low: str, high: str) -> Claim:
    return above(statement, measured(high, what), measured(low, what))


ALIGNMENT, UNIFORMITY = "alignment", "uniformity"
FIGURE_3C = Study(
    id="mochi/figure-3c",
    title="alignment (of a class) and uniformity of the backbone's features on the validation images",
    paper=PAPER,
    needs=NEEDS.format(6),
    quantity="squared distance within classes; log of the mean Gaussian potential (the lower, the more even)",
    columns="measure",
    runner=replace(
        judged("imagenet100"), protocol={"protocol": "geometry", "positives": "class"}, read=UNIFORMITY
    ),
    cells=tuple(
        Cell(measured(method, what), None, {**FIELDS[method], "evaluate.read": what})
        for method in (MOCO_V2, PAIRS, MIXED, ORACLE, MIXED_ORACLE, SUPERVISED_NAME)
        for what in (ALIGNMENT, UNIFORMITY)
    ),
    claims=(
        lower("MoCHi is more uniform than MoCo v2", UNIFORMITY, MIXED, MOCO_V2),
        lower("MoCHi is more uniform than supervised", UNIFORMITY, MIXED, SUPERVISED_NAME),
        lower("supervised is better aligned than MoCo v2", ALIGNMENT, SUPERVISED_NAME, MOCO_V2),
        lower("MoCo v2 is more uniform than supervised", UNIFORMITY, MOCO_V2, SUPERVISED_NAME),
        lower("MoCHi is less aligned than MoCo v2", ALIGNMENT, MOCO_V2, MIXED),
    ),
    words=WORDS,
)  # fmt: skip

STUDIES = (FIGURE_2A, FIGURE_2B, FIGURE_2C, FIGURE_3C)
