"""MoCHi's Fig. 1: a query among random points on the sphere, its hardest negatives, and what is mixed of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from unitsphere.analysis.figures import panels
from unitsphere.analysis.request import AnalysisRequest, numbers, three
from unitsphere.common.errors import UsageError
from unitsphere.common.randomness import generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = dict[str, Any]
LOOKS = {  # kind -> colour, marker, size
    "negatives": ("#b9c0c7", "o", 8),
    "hardest": ("#4a5560", "o", 14),
    "pairs": ("#1f6f8b", "^", 20),
    "with the query": ("#e0a030", "v", 24),
    "query": ("#d1495b", "s", 60),
}


def synthetic(query: Tensor, hardest: Tensor, pairs: int, with_query: int, draws: torch.Generator) -> list[Tensor]:
    """(pairs, D) of Eq. 3, a n_i + (1-a) n_j, and (with_query, D) of section 4.2, b q + (1-b) n_j, on the sphere.
    query: (D,); hardest: (N, D). The vectors are formed, for the picture: training needs their scores alone."""
    first = torch.randint(len(hardest), (pairs,), generator=draws)
    other = (first + torch.randint(1, len(hardest), (pairs,), generator=draws)) % len(hardest)  # a distinct one
    a = torch.rand(pairs, 1, generator=draws)
    b = torch.rand(with_query, 1, generator=draws) / 2
    mixed = hardest[torch.randint(len(hardest), (with_query,), generator=draws)]
    return [
        normalize(a * hardest[first] + (1 - a) * hardest[other], dim=1),
        normalize(b * query + (1 - b) * mixed, dim=1),
    ]


def measure(ask: AnalysisRequest, *, points: int = 500, dim: int = 32, mixing: Sequence[int] = (50, 50, 25)) -> Result:
    """Places in the plane of all points, by kind. mixing: (N, s, s')."""
    hardest, pairs, with_query = three(mixing)
    if not 2 <= hardest <= points:
        raise UsageError(f"hardest: given {hardest}; with {points} points 2 to {points} are allowed.")
    from sklearn.manifold import TSNE  # type: ignore[import-untyped]

    draws = generator(ask.seed, "analysis-sphere")
    memory = normalize(torch.randn(points, dim, generator=draws), dim=1)
    query = normalize(torch.randn(dim, generator=draws), dim=0)
    near = (memory @ query).argsort(descending=True)
    hard, easy = memory[near[:hardest]], memory[near[hardest:]]
    kinds = dict(zip(LOOKS, [easy, hard, *synthetic(query, hard, pairs, with_query, draws), query[None]], strict=True))
    everything = torch.cat(list(kinds.values()))
    places = TSNE(metric="cosine", init="random", perplexity=30, random_state=ask.seed).fit_transform(everything)
    parts = torch.from_numpy(places).split([len(kind) for kind in kinds.values()])
    return {
        "settings": {"points": points, "dim": dim, "hardest": hardest, "pairs": pairs, "with_query": with_query},
        "places": {kind: [numbers(place) for place in part] for kind, part in zip(kinds, parts, strict=True)},
    }


def draw(results: Sequence[Result]) -> Figure:
    figure, (axes,) = panels(1, height=4.4)
    for kind, places in results[0]["places"].items():
        tint, marker, size = LOOKS[kind]
        x, y = zip(*places, strict=True) if places else ((), ())
        axes.scatter(x, y, s=size, c=tint, marker=marker, label=kind, linewidths=0)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(f"{results[0]['settings']['dim']}-d points on the sphere, t-SNE")
    figure.legend(loc="outside lower center", ncols=3)
    return figure
