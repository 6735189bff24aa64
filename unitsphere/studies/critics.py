"""Many small critics trained at once: their weights are stacked, so a step of all of them is a handful of batched
products and one fused Adam.

A cell's numbers do not depend on its company. Cells of one seed begin with the same weights and cells of one seed and K
see the same draws of (x, eps), so that what differs between their results is what differs between their settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor, nn

from unitsphere.common.devices import send
from unitsphere.common.errors import UnitsphereError
from unitsphere.common.randomness import generator
from unitsphere.objectives.contrastive import NOTHING, Negatives, contrastive_loss
from unitsphere.studies.pair_settings import PairSettings

TICK = 20  # batches between two looks at the progress


class Encoders(nn.Module):
    """C MLPs with one hidden layer of ReLU units: (C, N, in) -> (C, N, out). All begin with the same weights, drawn as
    nn.Linear draws its own."""

    def __init__(self, count: int, sizes: tuple[int, int, int], draw: Generator) -> None:
        super().__init__()

        def layer(inputs: int, outputs: int) -> tuple[nn.Parameter, nn.Parameter]:
            drawn = torch.empty(outputs, inputs + 1).uniform_(-1, 1, generator=draw) / math.sqrt(inputs)
            stacked = drawn.expand(count, -1, -1)
            return nn.Parameter(stacked[..., :-1].clone()), nn.Parameter(stacked[..., -1].clone())

        inputs, hidden, outputs = sizes
        self.weight_1, self.bias_1 = layer(inputs, hidden)  # (C, hidden, in), (C, hidden)
        self.weight_2, self.bias_2 = layer(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.baddbmm(self.bias_1[:, None], x, self.weight_1.mT).relu()
        return torch.baddbmm(self.bias_2[:, None], hidden, self.weight_2.mT)


def correlation(mutual_information: float, dimensions: int) -> float:
    """The rho of Eq. 9 that gives this mutual information (Eq. 10)."""
    return math.sqrt(-math.expm1(-2 * mutual_information / dimensions))


def batch_losses(query: Tensor, keys: Tensor, alpha: float | None) -> Tensor:
    """The contrastive loss (C,) of C batches of K pairs, query and keys (C, K, D): raw dot products, temperature 1, and
    the K - 1 other keys of the batch as negatives."""
    k = query.shape[1]
    not_itself = query.new_full((k,), NOTHING).diag()
    scores = torch.baddbmm(not_itself, query, keys.mT)  # (C, K, K)
    positive = (query * keys).sum(dim=2)
    negatives = Negatives(scores.logsumexp(dim=2), k - 1)
    return contrastive_loss(positive, torch.zeros_like(positive), negatives.weighed(alpha), 0.0).mean(1)


def bound(loss: float, k: int, alpha: float | None) -> float:
    """I_NCE = log K - L and I_EqCo = log(1 + alpha) - L: the first is the second at alpha = K - 1."""
    return math.log1p(k - 1 if alpha is None else alpha) - loss


def estimate(cells: Sequence[PairSettings], device: torch.device, tick: Callable[[int], None]) -> list[float]:
    """The bound of each cell, with critics trained for it. The cells differ in their mutual information only. `tick`
    hears how many batches are done."""
    first = cells[0]
    sizes = (first.dimensions, first.hidden, first.embedding)
    draw = generator(first.seed, "critics")
    of_x, of_y = (Encoders(len(cells), sizes, draw).to(device) for _ in "xy")
    rho = torch.tensor([correlation(c.mutual_information, c.dimensions) for c in cells], device=device)[:, None, None]

    def losses(purpose: str, step: int) -> Tensor:
        """(C,) on a fresh batch."""
        normal = torch.randn(2, first.k, first.dimensions, generator=generator(first.seed, purpose, first.k, step))
        x, noise = send(normal, device).unsqueeze(1).expand(-1, len(cells), -1, -1)
        return batch_losses(of_x(x), of_y(rho * x + (1 - rho**2).sqrt() * noise), first.alpha)

    optimizer = torch.optim.Adam([*of_x.parameters(), *of_y.parameters()], lr=first.lr, fused=True)
    for step in range(first.steps):
        optimizer.zero_grad()
        losses("pairs to train on", step).sum().backward()
        optimizer.step()
        if step % TICK == 0:
            tick(step)
    total = torch.zeros(len(cells), dtype=torch.float64, device=device)
    with torch.no_grad():
        for step in range(first.evaluations):
            total += losses("pairs to judge on", step)
            if step % TICK == 0:
                tick(first.steps + step)
    tick(first.steps + first.evaluations)
    if not total.isfinite().all():
        raise UnitsphereError(
            f"the critics at K {first.k} diverged: the loss is not a number. Lower lr ({first.lr:g})."
        )
    return [bound(loss, first.k, first.alpha) for loss in (total / first.evaluations).tolist()]
