"""MoCHi on ImageNet-100: its Figures 3a and 3b, and the variants of its Appendix B.2.

The figures come without their values; where Table 3 prints one of their runs, that is its number. Of 3b the text says
that N is 1024 and that no mixture at all is MoCo v2; the sizes are those that Table 3 has. Appendix B.2 has no table:
its text says what each variant cost, and neither for which (N, s, s') nor the values of tau' and X: those are ours.
"""

from __future__ import annotations

from unitsphere.studies.claims import above, no_worse
from unitsphere.studies.mochi import BEST, OF_TABLE_3, PAPER, QUANTITY, WORDS, Mix, judged, trained
from unitsphere.studies.study import Cell, Claim, Study, Table


def most_gain(table: Table) -> tuple[float, str]:
    (moco,) = table.row(pairs=0, with_query=0)
    gains = [value - moco for cell, value in table if cell.at["pairs"] or cell.at["with_query"]]
    better = sum(gain > 0 for gain in gains)
    told = f"{better} of {len(gains)} are; the gains lie in {min(gains):+.2f}..{max(gains):+.2f}"
    return better - len(gains) / 2, told


FIGURE_3A = Study(
    id="mochi/figure-3a",
    title="MoCHi (N, s, 0) over N, the negatives that may be mixed, and s",
    paper=PAPER,
    needs="ImageNet and GPUs: 22 runs of 200 epochs on 100 classes, ResNet-50",
    quantity=QUANTITY,
    columns="hardest",
    runner=judged("imagenet100"),
    cells=(
        Cell({"method": "MoCo v2", "hardest": "none"}, OF_TABLE_3[0, 0, 0], trained(None)),
        *(
            Cell(
                {"method": "MoCHi", "pairs": pairs, "hardest": hardest},
                OF_TABLE_3.get((hardest, pairs, 0)),
                trained((hardest, pairs, 0)),
            )
            for pairs in (128, 512, 1024)
            for hardest in (64, 128, 256, 512, 1024, 2048, 16384)
        ),
    ),
    claims=(
        *(
            above(f"N = 1024 is above MoCo v2 at s = {s}", {"pairs": s, "hardest": 1024}, {"method": "MoCo v2"})
            for s in (128, 512, 1024)
        ),
        *(
            above(f"N = 64 is below N = 1024 at s = {s}", {"pairs": s, "hardest": 1024}, {"pairs": s, "hardest": 64})
            for s in (128, 512, 1024)
        ),
    ),
    over="hardest",
    words=WORDS,
)


def of(pairs: int, with_query: int) -> Mix:
    return (1024, pairs, with_query) if pairs or with_query else (0, 0, 0)


FIGURE_3B = Study(
    id="mochi/figure-3b",
    title="MoCHi (1024, s, s') over both kinds of mixtures",
    paper=PAPER,
    needs="ImageNet and GPUs: 20 runs of 200 epochs on 100 classes, ResNet-50",
    quantity=QUANTITY,
    columns="with_query",
    runner=judged("imagenet100"),
    cells=tuple(
        Cell({"pairs": s, "with_query": q}, OF_TABLE_3.get(of(s, q)), trained(of(s, q) if s or q else None))
        for s in (0, 128, 256, 512, 1024)
        for q in (0, 128, 256, 512)
    ),
    claims=(Claim("most of them are above MoCo v2", most_gain),),
    over="with_query",
    words=WORDS,
)

VARIANTS: dict[str, dict[str, object]] = {
    "as proposed": {},
    "ranked by the key": {"mix_rank_by": "key"},
    "mixed with the key": {"mix_in": "key"},
    "scores weighed by the query's share": {"mix_weigh": True},
    "drawn by a softmax (tau' 0.05)": {"mix_temperature": 0.05},
    "drawn by a softmax (tau' 0.2)": {"mix_temperature": 0.2},
    # both kinds in turn, so as many of the one as of the other at most
    "until half of the top N is synthetic": {"pairs": 1024, "with_query": 1024, "mix_until": 0.5},
}


def no_better(variant: str) -> Claim:
    return no_worse(f"{variant}: no better than as proposed", {"variant": "as proposed"}, {"variant": variant})


def much_lower(variant: str) -> Claim:
    statement = f"{variant}: at least 10 points below as proposed"
    return above(statement, {"variant": "as proposed"}, {"variant": variant}, by=10.0, papers=True)


APPENDIX_B2 = Study(
    id="mochi/appendix-b2",
    title=f"MoCHi {BEST} mixed in other ways",
    paper=PAPER,
    needs="ImageNet and GPUs: 7 runs of 200 epochs on 100 classes, ResNet-50",
    quantity=QUANTITY,
    columns="epochs",
    runner=judged("imagenet100"),
    cells=tuple(
        Cell({"variant": variant, "epochs": 200}, None, {**trained(BEST), **changes})
        for variant, changes in VARIANTS.items()
    ),
    claims=(  # of the last variant the text says that results were inconclusive
        no_better("ranked by the key"),  # "on average about 0.2 % lower"
        no_better("mixed with the key"),  # "at best as good", "on average about 0.1-0.2 % lower"
        no_better("scores weighed by the query's share"),  # "slightly inferior"
        much_lower("drawn by a softmax (tau' 0.05)"),  # "decreases by a lot (10-30 %)"
        much_lower("drawn by a softmax (tau' 0.2)"),
    ),
    words=WORDS,
)

STUDIES = (FIGURE_3A, FIGURE_3B, APPENDIX_B2)
