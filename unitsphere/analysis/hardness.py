"""How hard the negatives are, over the checkpoints of a run: MoCHi's Fig. 2a, 2b and 2c."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from unitsphere.analysis.figures import colour, epoch_label, name_lines, name_runs, over_epochs, panels, shade
from unitsphere.analysis.replay import Replay, Snapshot, contrastive
from unitsphere.analysis.request import AnalysisRequest, number, numbers, three
from unitsphere.common.errors import UsageError
from unitsphere.common.randomness import generator
from unitsphere.methods.learners.contrastive import ContrastiveLearner
from unitsphere.methods.learners.health import highest_score, proxy_accuracy
from unitsphere.methods.learners.negatives import Comparison
from unitsphere.methods.mochi import mixing as mixing_of
from unitsphere.objectives.contrastive import NOTHING, scores
from unitsphere.objectives.mixing import Mixing, Synthetic, synthesise
from unitsphere.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCORES_AT_ONCE = 2**22
Result = dict[str, Any]


def matching(
    query: Tensor, key: Tensor, negatives: Tensor, met: Tensor, *, temperature: float, top: int
) -> tuple[Tensor, Tensor]:
    """(n, top): the highest matching probabilities of negatives (Eq. 2: a softmax over the key and the negatives that
    a query meets), highest first, 0 beyond those that it meets; (n,): whether the key is above all of them. query, key:
    (n, D); negatives: (K, D); met: (n, K)."""
    positive = (query * key).sum(1) / temperature
    against = scores(query, negatives, temperature).masked_fill(~met, NOTHING)
    hardest = against.topk(top, dim=1).values
    everything = torch.logaddexp(positive, torch.logsumexp(against, 1))
    return (hardest - everything[:, None]).exp(), positive > hardest[:, 0]


def false_negatives(
    query: Tensor, negatives: Tensor, same_class: Tensor, others: Tensor, *, top: int
) -> tuple[Tensor, Tensor]:
    """(n,): share of the query's class among the `top` nearest; (n,): among all. same_class, others: (n, K), which
    negatives are of the query's class, and which are not of the query's own image: those alone count."""
    where = (query @ negatives.T).masked_fill(~others, NOTHING).topk(top, dim=1).indices
    same = same_class & others
    nearest = same.gather(1, where).sum(1) / others.gather(1, where).sum(1).clamp(min=1)
    return nearest, same.sum(1) / others.sum(1).clamp(min=1)


def false_parents(synthetic: Synthetic, labels: Tensor, negative_labels: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of the synthetic negatives with at least one, and with two, parents of the query's class (MoCHi, Fig. 2c).

    labels (n,), negative_labels (K,); a label below 0 is unknown, and is of no class. The query in h' is no negative,
    so h' has one parent at most.
    """
    of_class, parents = labels[:, None], synthetic.parents
    first, second, partner = (
        (negative_labels[places] == of_class) & (of_class >= 0)
        for places in (parents.first, parents.second, parents.partner)
    )
    exist = synthetic.scores > NOTHING
    total = exist.sum().clamp(min=1)
    one = (torch.cat([first | second, partner], dim=1) & exist).sum()
    two = (first & second & (synthetic.pairs > NOTHING)).sum()
    return one / total, two / total


def measure(
    run: Run, ask: AnalysisRequest, *, images: int = 4096, top: int = 1024, mixing: Sequence[int] | None = None
) -> Result:
    """Means over queries for each checkpoint; shares in percent. What needs labels is left out where there are none.
    mixing: (N, s, s') of MoCHi, to look also at what it would add to the negatives; None: what the run itself mixes, in
    its own way, once its warm-up is over."""
    config = contrastive(run)
    if top < 1:
        raise UsageError(f"top: given {top}; at least 1 is needed.")
    rules = mixing_of(config)
    if mixing is not None:
        hardest, pairs, with_query = three(mixing)
        rules = Mixing(hardest=hardest, pairs=pairs, with_query=with_query)
    paths = ask.checkpoints(run)
    replay = Replay(run, ask, images)
    found = []
    for path in paths:
        snapshot = Snapshot.of(path, ask.device)
        mixes = mixing is not None or bool(snapshot.method.phase(snapshot.moment))
        found.append(of_checkpoint(replay, snapshot, top, rules if mixes else None))
    sizes = None if rules is None else [rules.hardest, rules.pairs, rules.with_query]
    return {"temperature": config.temperature, "mixing": sizes, "checkpoints": found}


def of_checkpoint(replay: Replay, snapshot: Snapshot, top: int, mixing: Mixing | None = None) -> Result:
    sums: dict[str, Tensor] = {}
    queries = size = 0
    owners, labels = replay.queue_images(snapshot), replay.labels
    for batch, (images, found) in enumerate(replay.comparisons(snapshot)):
        size = len(found.negatives)
        of = owners if snapshot.method.queue is not None else images.repeat(size // len(images))
        draw_seed = torch.randint(2**62, (), generator=generator(replay.ask.seed, "analysis-mixing", batch))
        for rows in torch.arange(len(images), device=images.device).split(max(1, SCORES_AT_ONCE // size)):
            asked = Asked.of(found, rows, images, of, labels, snapshot.method)
            means = of_negatives(asked, min(top, size))
            if mixing is not None:
                means |= of_synthetic(asked, mixing, draw_seed.to(rows.device), rows)
            for name, mean in means.items():
                sums[name] = sums.get(name, torch.zeros(())) + len(rows) * mean.double().cpu()
            queries += len(rows)
    means = {name: total / queries for name, total in sums.items()}
    result: Result = {"epoch": snapshot.epoch, "step": snapshot.step, "queries": queries, "negatives": size}
    result["top"] = min(top, size)
    ranks = int((means.pop("meeting") == 1).sum())  # that all queries have
    result["matching"] = numbers(means.pop("matching")[:ranks])
    return result | {name: number(mean) for name, mean in means.items()}


class Asked(NamedTuple):
    """n queries and what they meet. query, key: (n, D); mean_key: (n, D), of all keys of the image; negatives: (K, D);
    others: (n, K), which of them are not of the query's own image; met: (n, K), which of those training sets against
    it; labels: (n,) and (K,), of queries and negatives, where both are known."""

    query: Tensor
    key: Tensor
    mean_key: Tensor
    negatives: Tensor
    others: Tensor
    met: Tensor
    labels: tuple[Tensor, Tensor] | None
    temperature: float

    @classmethod
    def of(
        cls,
        found: Comparison,
        rows: Tensor,
        images: Tensor,
        owners: Tensor | None,
        labels: Tensor | None,
        method: ContrastiveLearner,
    ) -> Asked:
        """images: (N,), owners: (K,), of which images all queries and the negatives are; labels: of all images."""
        others = torch.ones(len(rows), len(found.negatives), dtype=torch.bool, device=rows.device)
        known = None
        if owners is not None:
            others = owners != images[rows, None]
            if labels is not None and bool((owners >= 0).any()):  # a queue begins with keys of no image
                known = labels[images[rows]], labels[owners.clamp(min=0)].where(owners >= 0, -1)
        met = others if found.mask is None else others & found.mask[rows]
        keys, negatives, tau = found.keys[rows], found.negatives.float(), method.loss.temperature
        return cls(found.query[rows], keys[:, 0], method.negatives.mean_key(keys), negatives, others, met, known, tau)


def of_negatives(asked: Asked, top: int) -> dict[str, Tensor]:
    """Means by name: (top,) or one number. meeting: the share of queries that meet so many."""
    query, key, negatives = asked.query, asked.key, asked.negatives
    probabilities, above = matching(query, key, negatives, asked.met, temperature=asked.temperature, top=top)
    found = {"matching": probabilities.mean(0), "proxy": 100 * above.float().mean()}
    found["meeting"] = (asked.met.sum(1)[:, None] > torch.arange(top, device=query.device)).double().mean(0)
    if asked.labels is not None:
        own, theirs = asked.labels
        same = (own[:, None] == theirs) & (own >= 0)[:, None]
        nearest, chance = false_negatives(query, negatives, same, asked.others, top=top)
        found |= {"false_negatives": 100 * nearest.mean(), "chance": 100 * chance.mean()}
    return found


def of_synthetic(asked: Asked, mixing: Mixing, draw_seed: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """The proxy task with synthetic negatives among the others, the highest scores of section 4.3, and how often
    parents are of the query's class."""
    query, key, negatives, tau = asked.query, asked.key, asked.negatives, asked.temperature
    made = synthesise(
        query, negatives, mixing, temperature=tau, draw_seed=draw_seed, rows=rows, key=asked.mean_key, mask=asked.met
    )
    real = scores(query, negatives, tau).masked_fill(~asked.met, NOTHING)
    kinds = {"negative": real, "pair": made.pairs, "with_query": made.with_query}
    found = {f"highest_{kind}": highest_score(those) for kind, those in kinds.items() if those.shape[1]}
    found["proxy_synthetic"] = 100 * proxy_accuracy((query * key).sum(1) / tau, real, made.scores)
    if asked.labels is not None:
        one, both = false_parents(made, *asked.labels)
        found |= {"one_false": 100 * one, "both_false": 100 * both}
    return found


# What is drawn over epochs: a panel's title and label, and for each name its line and what that is.
PANELS: Sequence[tuple[str, str, dict[str, tuple[str, str]]]] = (
    ("proxy task", "keys above all negatives in %",
     {"proxy": ("o-", "real negatives"), "proxy_synthetic": ("^--", "and synthetic ones")}),
    ("false negatives among the top", "of the query's class in %",
     {"false_negatives": ("o-", "among the top"), "chance": ("s:", "among all")}),
    ("parents of synthetic negatives", "of the query's class in %",
     {"one_false": ("^--", "one or both"), "both_false": ("s-", "both")}),
)  # fmt: skip


def draw(results: Sequence[Result]) -> Figure:
    """Matching probabilities, a panel a run; then what changes over epochs, for all of them."""
    measured = {name for result in results for checkpoint in result["checkpoints"] for name in checkpoint}
    shared = [panel for panel in PANELS if measured & panel[2].keys()]
    figure, axes = panels(len(results) + len(shared))
    for place, result in zip(axes, results, strict=False):
        draw_matching(place, result)
    for place, (title, label, lines) in zip(axes[len(results) :], shared, strict=True):
        draw_over_epochs(place, results, lines)
        name_lines(place, [drawn for name, drawn in lines.items() if name in measured])
        top = f" {results[0]['checkpoints'][-1]['top']:,}" if title.endswith("top") else ""
        place.set_title(title + top)
        place.set_ylabel(label)
    name_runs(figure, [result["name"] for result in results])
    return figure


def draw_matching(axes: Axes, result: Result) -> None:
    shown = result["checkpoints"]
    for place, checkpoint in enumerate(shown):
        values = checkpoint["matching"]
        label = epoch_label(checkpoint["epoch"], place, len(shown))
        axes.plot(range(1, len(values) + 1), values, color=shade(place, len(shown)), label=label)
    axes.set_yscale("log")
    axes.set_xlabel("negatives of a query, the hardest first")
    axes.set_ylabel("matching probability")
    axes.set_title(result["name"])
    axes.legend(ncols=2)


def draw_over_epochs(axes: Axes, results: Sequence[Result], lines: dict[str, tuple[str, str]]) -> None:
    for place, result in enumerate(results):
        for name, (line, _) in lines.items():
            found = [(each["epoch"], each[name]) for each in result["checkpoints"] if name in each]
            if found:
                axes.plot(*zip(*found, strict=True), line, markersize=3, color=colour(place))
    over_epochs(axes)
    axes.set_ylim(0, min(102, 1.25 * axes.dataLim.ymax) or 1)  # percent, with room for the legend
