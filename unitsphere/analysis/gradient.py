"""How the number of negatives moves a query, with EqCo and without: EqCo's Fig. 2, and Fig. 1's bound.

On the checkpoints of one plain run K is varied afterwards: of the negatives in the queue each query meets K, drawn for
it, the smaller sets within the larger. Plain InfoNCE is alpha = K; EqCo keeps alpha.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from unitsphere.analysis.figures import colour, counted, epoch_label, panels, shade
from unitsphere.analysis.replay import Replay, Snapshot, contrastive
from unitsphere.analysis.request import AnalysisRequest, number
from unitsphere.common.errors import UsageError
from unitsphere.common.randomness import generator, lots
from unitsphere.methods.learners.health import gradient_bound
from unitsphere.objectives import info_nce
from unitsphere.objectives.contrastive import negatives_of_scores, scores
from unitsphere.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCORES_AT_ONCE = 2**22
Result = dict[str, Any]


def loss_and_gradient(
    query: Tensor, key: Tensor, negatives: Tensor, temperature: float, alpha: float | None, met: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(n,) the loss and (n,) |dL/dq| of each query. query, key: (n, D); negatives: (Q, D); met: (n, Q), true where a
    query meets a negative; alpha: None for plain InfoNCE."""
    with torch.enable_grad():
        asked = query.detach().requires_grad_()
        loss = info_nce(asked, key, negatives, temperature=temperature, alpha=alpha, mask=met, reduction="none")
        (gradient,) = torch.autograd.grad(loss.sum(), asked)
    return loss.detach(), gradient.norm(dim=1)


def bound_of(
    query: Tensor, key: Tensor, negatives: Tensor, temperature: float, alpha: Tensor, allowed: Tensor | None = None
) -> Tensor:
    """(n,) Theorem 2's. alpha: (n,) or one for all; the expectation is over the negatives (Q, D), or those of them that
    are allowed (n, Q)."""
    against = negatives_of_scores(scores(query, negatives, temperature), allowed).weighed(alpha)
    return gradient_bound((query * key).sum(1) / temperature, against, temperature)


def measure(
    run: Run,
    ask: AnalysisRequest,
    *,
    images: int = 4096,
    negatives: Sequence[int] | None = None,
    alpha: float | None = None,
) -> Result:
    """For each checkpoint and K: mean and deviation over queries of |dL/dq|, Theorem 2's bound, the loss and the
    mutual-information bound log(1 + alpha) - L, plain and with EqCo. alpha: by default the queue's size."""
    config = contrastive(run)
    size = config.queue_size
    if config.negatives_from != "queue":
        raise UsageError(f"{run.path} has no queue: `gradient` varies K over the queue of a MoCo run.")
    counts = powers_to(size) if negatives is None else sorted(set(negatives))
    if not counts or counts[0] < 1 or counts[-1] > size:
        raise UsageError(f"negatives: given {list(negatives or ())}; with a queue of {size}, 1 to {size} are allowed.")
    alpha = float(size) if alpha is None else alpha
    if alpha <= 0:
        raise UsageError(f"alpha: given {alpha:g}; it must be greater than 0.")
    paths = ask.checkpoints(run)
    replay = Replay(run, ask, images)
    checkpoints = [of_checkpoint(replay, Snapshot.of(path, ask.device), counts, alpha) for path in paths]
    return {"temperature": config.temperature, "queue_size": size, "alpha": alpha, "checkpoints": checkpoints}


def powers_to(size: int) -> list[int]:
    """16, 64, 256, ... and the size itself."""
    return [*(k for k in (4**power for power in range(2, 16)) if k < size), size]


def of_checkpoint(replay: Replay, snapshot: Snapshot, counts: Sequence[int], alpha: float) -> Result:
    tau = snapshot.method.loss.temperature
    found: dict[tuple[str, int], list[Tensor]] = {(kind, k): [] for kind in ("plain", "eqco") for k in counts}
    for asked in few_queries(replay, snapshot):
        for kind, k in found:
            met = (asked.order < k) & asked.allowed
            number_met = met.sum(1).to(asked.query.dtype)
            given, weight = (None, number_met) if kind == "plain" else (alpha, torch.full_like(number_met, alpha))
            loss, norm = loss_and_gradient(asked.query, asked.key, asked.queue, tau, given, met)
            bound = bound_of(asked.query, asked.key, asked.queue, tau, weight, asked.allowed)
            found[kind, k].append(torch.stack([norm, bound, loss, weight.log1p() - loss]).cpu())
    result: Result = {"epoch": snapshot.epoch, "step": snapshot.step}
    for (kind, k), parts in found.items():
        values = torch.cat(parts, 1).double()
        result["queries"] = values.shape[1]
        result.setdefault(kind, []).append(row(k, float(k) if kind == "plain" else alpha, values))
    return result


class Asked(NamedTuple):
    """query, key: (n, D); queue: (Q, D); order: (n, Q), when a query draws which key of the queue; allowed: (n, Q),
    which of them are not of its own image."""

    query: Tensor
    key: Tensor
    queue: Tensor
    order: Tensor
    allowed: Tensor


def few_queries(replay: Replay, snapshot: Snapshot) -> Iterator[Asked]:
    """A few queries at a time, so that their scores stay small."""
    queue, owners = snapshot.method.queue, replay.queue_images(snapshot)
    assert queue is not None
    for batch, (images, found) in enumerate(replay.comparisons(snapshot)):
        lot = torch.randint(2**62, (), generator=generator(replay.ask.seed, "analysis-negatives", batch))
        for rows in torch.arange(len(images), device=images.device).split(max(1, SCORES_AT_ONCE // len(queue))):
            own = images[rows, None] == (images.new_full((len(queue),), -1) if owners is None else owners)
            tickets = lots(lot.to(rows.device), rows, len(queue)).masked_fill(own, 2**62)
            order = tickets.argsort(1).argsort(1)
            yield Asked(found.query[rows], found.keys[rows, 0], queue.keys, order, ~own)


def row(k: int, alpha: float, values: Tensor) -> Result:
    """values: (4, n), of each query the gradient's norm, its bound, the loss, and the mutual-information bound."""
    norm, bound, loss, information = values.mean(1)
    return {
        "negatives": k,
        "alpha": alpha,
        "gradient_norm": number(norm),
        "gradient_norm_deviation": number(values[0].std(correction=0)),
        "gradient_norm_bound": number(bound),
        "loss": number(loss),
        "mutual_information_bound": number(information),
    }


def draw(results: Sequence[Result]) -> Figure:
    """A row a run: the gradient's norm over K, plain and with EqCo, its bound, and the mutual-information bound."""
    figure, axes = panels(4 * len(results), columns=4)
    for place, result in enumerate(results):
        plain, eqco, bound, information = axes[4 * place : 4 * place + 4]
        draw_norms(plain, result, "plain")
        draw_norms(eqco, result, "eqco")
        plain.set_title(f"{result['name']}: without EqCo")
        eqco.set_title(f"with EqCo, alpha {result['alpha']:,g}")
        highest = max(plain.get_ylim()[1], eqco.get_ylim()[1])
        plain.set_ylim(0, highest)
        eqco.set_ylim(0, highest)
        draw_both(bound, result, "gradient_norm_bound", "bound of the mean |dL/dq|")
        bound.set_title("Theorem 2")
        draw_both(information, result, "mutual_information_bound", "nats")
        information.set_title("bound of mutual information: log(1 + alpha) - L")
    return figure


def draw_norms(axes: Axes, result: Result, kind: str) -> None:
    shown = result["checkpoints"]
    for place, checkpoint in enumerate(shown):
        k, mean, deviation = columns(checkpoint[kind], "negatives", "gradient_norm", "gradient_norm_deviation")
        tint = shade(place, len(shown))
        label = epoch_label(checkpoint["epoch"], place, len(shown))
        axes.plot(k, mean, "o-", markersize=3, color=tint, label=label)
        low, high = ([m + sign * d for m, d in zip(mean, deviation, strict=True)] for sign in (-2, 2))
        axes.fill_between(k, low, high, color=tint, alpha=0.5 / (len(shown) + 2), linewidth=0)
    counted(axes, k)
    axes.set_xlabel("negatives K")
    axes.set_ylabel("|dL/dq|, mean and 2 deviations")
    axes.set_ylim(0, 1.35 * axes.get_ylim()[1])  # room for the legend
    axes.legend(ncols=3, loc="upper left", columnspacing=1, handlelength=1.2)


def draw_both(axes: Axes, result: Result, name: str, label: str) -> None:
    """Of the latest checkpoint."""
    last = result["checkpoints"][-1]
    for place, (kind, told) in enumerate((("plain", "without EqCo (alpha = K)"), ("eqco", "with EqCo"))):
        k, values = columns(last[kind], "negatives", name)
        axes.plot(k, values, "o-", markersize=3, color=colour(place), label=told)
    counted(axes, k)
    axes.set_xlabel("negatives K")
    axes.set_ylabel(f"{label}, epoch {last['epoch']}")
    axes.legend()


def columns(rows: Sequence[Result], *names: str) -> list[list[Any]]:
    return [[each[name] for each in rows] for name in names]
