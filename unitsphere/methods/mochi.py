"""MoCHi: synthetic negatives, mixed from the hardest ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from unitsphere.config.fields import Count, Positive, Section
from unitsphere.config.layers import Patch
from unitsphere.config.unused import Unused
from unitsphere.methods.declaration import About
from unitsphere.methods.moco import MOCO_V2, small

if TYPE_CHECKING:
    from unitsphere.objectives.mixing import Mixing


class MixingFields(Section):
    """MoCHi: synthetic negatives, mixed from hard ones"""

    hardest: Count | None = Field(
        1024, description="N, hardest negatives of a query, of which some are mixed; none: all"
    )
    pairs: int = Field(0, ge=0, description="s, mixtures of two of them")
    with_query: int = Field(0, ge=0, description="s', mixtures of one of them and the query")
    mixing_warmup: int = Field(0, ge=0, description="epochs before the first mixture")
    mix_detach: bool = Field(True, description="a mixture with the query is a constant for the gradient")
    mix_distinct: bool = Field(True, description="the two parents of a pair differ")
    mix_rank_by: Literal["query", "key"] = Field("query", description="whose scores say which negatives are hardest")
    mix_in: Literal["query", "key"] = Field("query", description="what with_query mixes with a negative")
    mix_weigh: bool = Field(False, description="multiply the score of a mixture with the query by the query's share")
    mix_temperature: Positive | None = Field(
        None, description="draw parents by a softmax of their scores over this; default: evenly"
    )
    mix_until: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="add both kinds in turn until this share of the N highest scores is synthetic"
    )

    @property
    def mixes(self) -> bool:
        """Whether any negative is mixed."""
        return self.pairs + self.with_query > 0


def problems(c: Any) -> Iterator[str]:
    """Yield what contradicts the mixing."""
    for name in ("negatives", "hardest"):
        if c.pairs and c.mix_distinct and getattr(c, name) == 1:
            yield f"pairs: a pair is of two negatives, and {name} is 1"
    if c.mix_until is not None and c.pairs != c.with_query:
        yield f"mix_until: takes both kinds in turn: give as many pairs ({c.pairs}) as with_query"


def notes(c: Any, at_hand: int) -> Iterator[str]:
    """Yield what a person should know of the mixing. at_hand: the negatives that a query meets."""
    if c.mixes and c.mixing_warmup >= c.epochs:
        yield f"mixing_warmup: nothing is mixed before epoch {c.mixing_warmup + 1}, beyond this run."
    if c.mixes and c.hardest is not None and c.hardest > at_hand:
        yield f"hardest is {c.hardest}, but a query has {at_hand} negatives: all are taken."


def mixing(c: Any) -> Mixing | None:
    """Build the mixing of a configuration, where it has one."""
    from unitsphere.objectives.mixing import Mixing

    if not c.mixes:
        return None
    return Mixing(
        hardest=c.hardest,
        pairs=c.pairs,
        with_query=c.with_query,
        detach=c.mix_detach,
        distinct=c.mix_distinct,
        rank_by=c.mix_rank_by,
        mix_in=c.mix_in,
        weigh=c.mix_weigh,
        draw_temperature=c.mix_temperature,
        until=c.mix_until,
    )


UNUSED = (
    Unused({*MixingFields.model_fields} - {"pairs", "with_query"}, lambda c: not c.mixes, "nothing is mixed"),
    Unused(("mix_in", "mix_weigh", "mix_detach"), lambda c: c.with_query == 0, "with_query is 0"),
    Unused(("mix_distinct",), lambda c: c.pairs == 0, "pairs is 0"),
)

SHARE_OF_THE_QUEUE = {"hardest": 4, "pairs": 4, "with_query": 32}  # on data without a recipe: at most a quarter, ...


def size(queue_size: int, epochs: int, defaults: Patch) -> Patch:
    """What is mixed is a share of the queue, and begins within the run."""
    mixed = {
        name: min(defaults[name], max(2, queue_size // part))
        for name, part in SHARE_OF_THE_QUEUE.items()
        if name in defaults
    }
    return {**mixed, "mixing_warmup": min(defaults.get("mixing_warmup", 0), epochs // 10)}


# The 100-epoch results are the checkpoint half-way. (The paper's runs were on 4 GPUs, so they had 4 groups: its studies
# set that for all their rows. Here mochi has the groups of moco-v2, its baseline.)
ON_IMAGENET: Patch = {"keep_epochs": [100]}

MOCHI = About(
    title="MoCo v2 with negatives mixed from the hardest ones",
    paper="Kalantidis et al., MoCHi, NeurIPS 2020",
    needs="2 views, a queue, a slow copy; no labels",
    defaults={**MOCO_V2, "hardest": 1024, "pairs": 1024, "with_query": 128, "mixing_warmup": 10},
    recipes={
        **small("moco-v2-small"),
        "imagenet": {**ON_IMAGENET, "mixing_warmup": 15},
        "imagenet100": ON_IMAGENET,
        "shapes": {"views": "moco-v2-small", "hardest": 256, "pairs": 256, "with_query": 32, "mixing_warmup": 3},
    },
)
