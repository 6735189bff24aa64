"""Regression onto centroids of views, and forces that spread embeddings.

MSBReg (Moon et al., "An Embedding-Dynamic Approach to Self-supervised Learning") is at hand as its supplement only:
the centroid, Brownian and singular value losses below are reconstructions, not the authors' formulas. What is fixed
by the supplement is that two views without the other terms are BYOL.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["brownian_loss", "centroid_loss", "correlation_loss", "gram_loss", "nuclear_loss"]


def centroid_loss(predictions: Tensor, targets: Tensor, form: str = "others") -> Tensor:
    """Twice the mean squared distance between centroids of the views of an image. A reconstruction.

    predictions, targets: (n, K, D), unit vectors q_ik and t_ik.
    others: q_k and mean_{j != k} t_j, for each view k; split: of halves A, B of the views (the larger first) mean_A q
    and mean_B t, mean_B q and mean_A t; all: mean_k q and mean_k t.
    For K = 2 the first two are BYOL's loss, |q_1 - t_2|^2 + |q_2 - t_1|^2. All three pull a view as hard.
    """
    views = predictions.shape[1]
    if form == "others":
        q, t = predictions, (targets.sum(dim=1, keepdim=True) - targets) / (views - 1)
    elif form == "split":
        half = (views + 1) // 2
        q, t = (torch.stack([x[:, :half].mean(1), x[:, half:].mean(1)], dim=1) for x in (predictions, targets))
        t = t.flip(1)
    elif form == "all":
        return 2 * centroid_distance(predictions, targets)
    else:
        raise ValueError(f"centroid {form!r}: known are others, split, all")
    return 2 * (q - t).square().sum(dim=2).mean()


def brownian_loss(embeddings: Tensor, directions: Tensor) -> Tensor:
    """mean_ik z_ik . n_i: a random force on each particle, which asks for no other's place. A reconstruction.

    embeddings: (n, K, D); directions: unit vectors (n, 1, D), a fresh one for each image, or (n, K, D) for each view.
    """
    return (embeddings * directions).sum(dim=2).mean()


def gram_loss(z: Tensor) -> Tensor:
    """|(d/M) Z'Z - I|^2 / d for unit rows Z (M, d): least where all singular values are equal. A reconstruction.

    The squares of the singular values add up to M, so over M/d they are 1 on average, and the loss is the mean of their
    squared deviations from it: no decomposition is needed. Summed over the d of them, MSBReg's weight of 0.004 would
    make it many times as strong as the regression that it goes with.
    """
    dim = z.shape[1]
    gram = z.T @ z * (dim / len(z))
    return (gram - torch.eye(dim, dtype=z.dtype, device=z.device)).square().sum() / dim


def nuclear_loss(z: Tensor, smooth: float = 1e-4) -> Tensor:
    """-sum of the singular values s of unit rows Z (M, d), or rather of sqrt(s^2 + smooth M/d): least where they are
    equal, as their squares add up to M. A reconstruction.

    With A = (d/M) Z'Z + smooth I it is -sqrt(M/d) tr A^(1/2), and no decomposition is needed: tr A^(1/2) is the least
    of (tr AP + tr P^-1) / 2 over P, found at P = A^(-1/2), so the gradient there is that with P kept fixed. Singular
    values below a hundredth of the even one, sqrt(M/d), are pushed less than others: else the gradient would jump at 0,
    and follow what rounding makes of them. In float64, since the eigenvalues of A reach from `smooth` to d.
    Beside a mean over images, such as the regression, it weighs more in a larger batch, as the root of its size.
    """
    dim, exact = z.shape[1], z.double()
    a = exact.T @ exact * (dim / len(z)) + smooth * torch.eye(dim, dtype=exact.dtype, device=z.device)
    root, inverse = square_roots(a.detach(), smooth, 1.02 * dim + smooth)  # rows may be a little too long
    loss = -0.5 * (len(z) / dim) ** 0.5 * ((a * inverse).sum() + root.trace())
    return loss.to(z.dtype)


def square_roots(a: Tensor, least: float, most: float) -> tuple[Tensor, Tensor]:
    """a^(1/2) and a^(-1/2) of a symmetric matrix whose eigenvalues lie between least and most, by products alone.

    Newton's and Schulz's iteration: from a/most and I on, root and inverse are multiplied by t = (3 - x) / 2, which
    takes their product x = inverse root to x t^2 and so to 1. They commute, but only root t and t inverse keep rounding
    from growing. As the eigenvalues of sqrt(x) lie in [low, 1], x is first scaled so that they come to lie in as small
    an interval: about half as many steps, their number known beforehand. Small matrices take a GPU as long as their
    products are many, so root t and t inverse are one: of neighbours in (root, t, inverse).
    """
    if not 0 < least <= most:
        raise ValueError(f"eigenvalues between {least} and {most}: the least must be above 0")
    eye = torch.eye(len(a), dtype=a.dtype, device=a.device)
    now, after = a.new_empty(2, 3, *a.shape)
    now[0], now[2], low = a / most, eye, (least / most) ** 0.5
    while low < 1 - 4 * torch.finfo(a.dtype).eps:
        scale = 3 / (1 + low + low * low)  # after which both ends are as far from 1
        torch.addmm(eye, now[2], now[0], beta=1.5 * scale**0.5, alpha=-0.5 * scale**1.5, out=now[1])
        torch.bmm(now[:2], now[1:], out=after[::2])
        now, after = after, now
        low *= scale**0.5 * (3 - scale * low * low) / 2
    return now[0] * most**0.5, now[2] / most**0.5


def correlation_loss(z: Tensor, eps: float = 1e-6) -> Tensor:
    """The squared correlations of a dimension of Z (M, d) with all others, on average over dimensions. A
    reconstruction."""
    centred = z - z.mean(dim=0)
    standard = centred * torch.rsqrt(centred.square().mean(dim=0) + eps)
    correlations = standard.T @ standard / len(z)
    return (correlations.square().sum() - correlations.diagonal().square().sum()) / z.shape[1]


SINGULAR_LOSSES = {"nuclear": nuclear_loss, "gram": gram_loss, "correlation": correlation_loss}


def pair_distance(embeddings: Tensor) -> Tensor:
    """Mean squared distance between two different views of an image. embeddings: (n, K, D).

    Over all pairs, that is 2K/(K - 1) times the spread of the views about their centroid.
    """
    views = embeddings.shape[1]
    return image_spread(embeddings) * (2 * views / (views - 1))


def centroid_distance(predictions: Tensor, targets: Tensor) -> Tensor:
    """Mean squared distance between the centroids of all views of an image in both networks. Both: (n, K, D)."""
    return (predictions.mean(dim=1) - targets.mean(dim=1)).square().sum(dim=1).mean()


def image_spread(embeddings: Tensor) -> Tensor:
    """Mean squared distance of the views of an image from their centroid. embeddings: (n, K, D)."""
    return (embeddings - embeddings.mean(dim=1, keepdim=True)).square().sum(dim=2).mean()
