"""MoCHi's Figure 1 in numbers: a query among random points on the sphere, and what is mixed of its hardest negatives.

The points are those of `unitsphere analyse --what tsne`, which draws the picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from unitsphere.config.fields import Count, Section
from unitsphere.studies.claims import above
from unitsphere.studies.mochi import PAPER
from unitsphere.studies.own_trainer import OwnTrainer
from unitsphere.studies.study import Cell, Job, Measured, Settings, Study

KINDS = ("memory", "hardest", "pairs", "with the query")


class SphereSettings(Section):
    """One cell. Dimensions are the paper's, all else it leaves open."""

    kind: str = Field(description="whose cosine with the query is measured")
    dim: Count = 32
    points: int = Field(500, ge=2, description="negatives in the memory")
    hardest: int = Field(50, ge=2, description="N")
    pairs: Count = 50
    with_query: Count = 25
    queries: Count = Field(256, description="so many pictures are averaged over")
    seed: int = Field(0, ge=0)


class Sphere(OwnTrainer):
    """Mean cosine with the query of each kind of negative."""

    name = "sphere"
    section = SphereSettings
    scales: ClassVar = {"tiny": {"queries": 16}}

    def run(self, jobs: Sequence[Job], store: Path, device: str) -> Iterator[Measured]:
        for job in jobs:
            yield Measured(job, cosine(SphereSettings.model_validate(job.settings)))


def cosine(settings: SphereSettings) -> float:
    import torch
    from torch.nn.functional import normalize

    from unitsphere.analysis.tsne import synthetic
    from unitsphere.common.randomness import generator

    total = 0.0
    for number in range(settings.queries):
        draws = generator(settings.seed, "analysis-sphere", number)
        memory = normalize(torch.randn(settings.points, settings.dim, generator=draws), dim=1)
        query = normalize(torch.randn(settings.dim, generator=draws), dim=0)
        hardest = memory[(memory @ query).argsort(descending=True)[: settings.hardest]]
        mixed = synthetic(query, hardest, settings.pairs, settings.with_query, draws)
        kinds = dict(zip(KINDS, (memory, hardest, *mixed), strict=True))
        total += float((kinds[settings.kind] @ query).mean())
    return total / settings.queries


def at(kind: str) -> Settings:
    return {"kind": kind}


FIGURE_1 = Study(
    id="mochi/figure-1",
    title="a query among random points on the sphere: its negatives, and what MoCHi mixes of the hardest",
    paper=PAPER,
    needs="a CPU: seconds",
    quantity="cosine with the query, the mean over negatives and queries",
    columns="kind",
    runner=Sphere(),
    cells=tuple(Cell(at(kind)) for kind in KINDS),
    claims=(
        above("the memory contains many easy negatives and few hard ones", at("hardest"), at("memory")),
        above("mixtures of the hardest are harder than these", at("pairs"), at("hardest")),
        above("mixtures with the query are harder still", at("with the query"), at("pairs")),
    ),
    words={"dim": "32-dimensional random embeddings on the unit hypersphere (1)"},
)
