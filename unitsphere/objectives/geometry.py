"""How representations lie on the sphere: alignment, uniformity, and two measures of collapse.

Each function takes raw features (N, D) (`uniformity` several such sets at once), works in at least float32 whatever the
autocast type, and returns a scalar tensor (for each set) on the features' device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

__all__ = ["alignment", "effective_rank", "evenness", "feature_deviation", "uniformity"]


def alignment(x: Tensor, y: Tensor) -> Tensor:
    """E |x - y|^2 over positive pairs (x[n], y[n]), both (N, D), l2-normalised here. From 0 to 4."""
    return (_on_sphere(x) - _on_sphere(y)).square().sum(1).mean()


def uniformity(x: Tensor, t: float = 2.0, *, chunk: int = 4096) -> Tensor:
    """log E exp(-t |x - y|^2) over the distinct pairs of the l2-normalised rows of x (..., N, D), N >= 2.

    0 when all rows coincide, lower the more evenly they spread. Self-pairs, which the expectation over
    two independent draws does not have, are left out. Only one chunk x chunk block of scores (of each set) is held.
    """
    x = _on_sphere(x)
    count, terms = x.shape[-2], []
    for start in range(0, count, chunk):
        rows = x[..., start : start + chunk, :]
        for other in range(start, count, chunk):
            with torch.autocast(x.device.type, enabled=False):
                scores = rows @ x[..., other : other + chunk, :].mT
            term = 2 * t * (scores - 1)  # on the sphere |x - y|^2 = 2 - 2 x.y
            if other != start:
                terms.append(torch.logsumexp(term, (-2, -1)))
            elif rows.shape[-2] > 1:  # here each pair stands twice, beside each row with itself
                itself = torch.eye(rows.shape[-2], dtype=torch.bool, device=x.device)
                terms.append(torch.logsumexp(term.masked_fill(itself, -math.inf), (-2, -1)) - math.log(2))
    return torch.logsumexp(torch.stack(terms), 0) - math.log(count * (count - 1) / 2)


def effective_rank(x: Tensor) -> Tensor:
    """exp of the entropy of the singular values of the centred x (N, D), scaled to sum 1.

    Roy & Vetterli, "The effective rank" (2007): r equal singular values give r. It sees the shape of the
    cloud, not its size: `feature_deviation` sees the size. Identical rows have rank 0, and features that are
    not finite have rank NaN (a log line must be able to say so).

    The singular values are square roots of the eigenvalues of the smaller of the two Gram matrices, in
    float64; below 1e-8 of the features' norm they are rounding, and count as zero.
    """
    x = x.double()
    squares, finite = _squared_singular_values(x - x.mean(0))
    singular = squares.where(squares > 1e-16 * x.square().sum(), 0).sqrt()
    share = singular / singular.sum().clamp_min(torch.finfo(x.dtype).tiny)
    rank = torch.special.entr(share).sum().exp() * (singular.sum() > 0)
    return rank.where(finite, torch.nan)


def evenness(x: Tensor) -> Tensor:
    """Smallest over largest singular value of the unit vectors along the rows of x (N, D): the inverse of the condition
    number, 1 where MSBReg's singular value loss is least. NaN for features that are not finite."""
    squares, finite = _squared_singular_values(normalize(x.double(), dim=1))
    squares = squares.clamp(min=0)
    return (squares[0] / squares[-1].clamp(min=torch.finfo(x.dtype).tiny)).sqrt().where(finite, torch.nan)


def _squared_singular_values(x: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending, as the eigenvalues of the smaller of the two Gram matrices; and whether x is finite (else zeros)."""
    gram = x.T @ x if len(x) >= x.shape[1] else x @ x.T
    finite = gram.isfinite().all()
    return torch.linalg.eigvalsh(gram.where(finite, 0)), finite  # which raises on a NaN


def feature_deviation(x: Tensor) -> Tensor:
    """sqrt(D) times the mean over dimensions of the deviation of the l2-normalised rows of x (N, D).

    Between 0 (collapse: every row points the same way) and 1 (the mean direction is zero and every
    dimension carries the same variance, as for points spread evenly over the sphere): the variances
    add up to 1 - |mean|^2, and by Jensen's inequality the mean deviation is at most sqrt((1 - |mean|^2) / D).
    """
    return _on_sphere(x).std(0, correction=0).mean() * math.sqrt(x.shape[1])


def _on_sphere(x: Tensor) -> Tensor:
    return normalize(x if x.dtype == torch.float64 else x.float(), dim=-1)
