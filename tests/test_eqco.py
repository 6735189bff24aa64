"""What EqCo and JCL prove of their losses, checked in float64 and by drawing."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from unitsphere.objectives import info_nce

TAU, D = 0.2, 16


def unit(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(*shape, dtype=torch.float64, generator=generator), dim=-1)


def some(n=32, k=40):
    return unit(n, D), unit(n, D, seed=1), unit(k, D, seed=2)


@pytest.mark.parametrize("alpha", [1.0, 40.0, 65536.0])
def test_the_three_forms_of_the_margin_are_one(alpha):
    """EqCo Eq. 1 and 5: a margin m = tau log(alpha / K) taken from the positive score, the factor e^{m/tau} on the sum
    of the negatives, and log(alpha / K) on every negative score."""
    query, key, negatives = some()
    p, scores = (query * key).sum(1) / TAU, query @ negatives.T / TAU
    m = TAU * math.log(alpha / 40)
    taken = -torch.log_softmax(torch.cat([(p - m / TAU)[:, None], scores], 1), 1)[:, 0]
    factor = torch.log(p.exp() + math.exp(m / TAU) * scores.exp().sum(1)) - p
    added = torch.logsumexp(torch.cat([p[:, None], scores + math.log(alpha / 40)], 1), 1) - p
    ours = info_nce(query, key, negatives, temperature=TAU, alpha=alpha, reduction="none")
    for form in (taken, factor, added):
        torch.testing.assert_close(ours, form, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("k", [4, 64, 1024])
def test_the_mean_gradient_stays_under_the_bound_of_theorem_2(k):
    """E |dL/dq| over draws of the negatives, against (2/tau)(1 - e^{s0} / (e^{s0} + alpha E e^{s}))."""
    alpha, draws = 4096.0, 400
    for seed in range(5):
        query, key = unit(1, D, seed=seed), unit(1, D, seed=100 + seed)
        negatives = unit(draws, k, D, seed=200 + seed)
        q = query.expand(draws, D).clone().requires_grad_()
        loss = info_nce(q, key.expand(draws, D), negatives, temperature=TAU, alpha=alpha, reduction="none").sum()
        (gradient,) = torch.autograd.grad(loss, q)
        s0, mean = ((query * key).sum() / TAU).exp(), (unit(200_000, D, seed=300) @ query[0] / TAU).exp().mean()
        bound = 2 / TAU * (1 - s0 / (s0 + alpha * mean))
        assert gradient.norm(dim=1).mean() <= bound * (1 + 1e-6)


def test_with_eqco_the_gradient_hardly_depends_on_k_and_without_it_does():
    """Fig. 2 on random unit vectors: far fewer negatives leave the size of the gradient as it is."""
    query, key, many = unit(256, D), unit(256, D, seed=1), unit(4096, D, seed=2)
    key = normalize(query + 0.7 * key, dim=1)

    def size(negatives, alpha):
        q = query.clone().requires_grad_()
        loss = info_nce(q, key, negatives, temperature=TAU, alpha=alpha, reduction="none").sum()
        return torch.autograd.grad(loss, q)[0].norm(dim=1).mean().item()

    whole, few = size(many, None), unit(64, D, seed=3)
    assert size(few, 4096.0) == pytest.approx(whole, rel=0.1)
    assert size(few, None) < 0.8 * whole


def test_jcls_closed_form_is_the_limit_of_the_bound_for_gaussian_keys_and_vanilla_stays_below():
    """Eq. S.3 with lambda 1: log((1/M) sum e^p + sum e^l) - mean p tends to it as the keys grow in number, and the mean
    of a term for each key is below that bound, for every M. The keys lie near the query, so that they weigh as much as
    the negatives and lambda matters."""
    generator = torch.Generator().manual_seed(0)
    query, negatives, draws = unit(1, D)[0], unit(40, D, seed=2), 20
    centre = normalize(query + 0.1 * unit(1, D, seed=1)[0], dim=0)
    spread = 0.05 * torch.randn(D, D, dtype=torch.float64, generator=generator)
    covariance = spread @ spread.T
    against = (negatives @ query / TAU).logsumexp(0)
    mean, variance = query @ centre / TAU, query @ covariance @ query / TAU**2
    limit, without = (torch.logaddexp(mean + weight * variance / 2, against) - mean for weight in (1, 0))
    # 20 x 80,000 draws: the mean of e^p has a relative error of sqrt((e^variance - 1) / 1,600,000), about 0.001 here
    tolerance = 0.005
    assert abs(mean - against) < 1 and limit - without > 10 * tolerance

    found = {}
    for count in (50, 2000, 80_000):
        for _ in range(draws):
            keys = centre + torch.randn(count, D, dtype=torch.float64, generator=generator) @ spread.T
            p = keys @ query / TAU
            bound = torch.logaddexp(p.logsumexp(0) - math.log(count), against) - p.mean()
            ours = info_nce(query[None], keys[None], negatives, temperature=TAU, variance_weight=1.0)
            vanilla = info_nce(query[None], keys[None], negatives, temperature=TAU, each=True)
            assert vanilla < bound
            found.setdefault(count, []).append(torch.stack([bound, ours, vanilla]))
    few, some_keys, many = (torch.stack(each) for each in found.values())
    for which in (0, 1):  # the bound and the closed form
        errors = [(each[:, which] - limit).abs().mean() for each in (few, some_keys, many)]
        assert errors[0] > 3 * errors[1] > 9 * errors[2]  # 40 times as many keys: about a sixth of the error
        assert many[:, which].mean() == pytest.approx(limit.item(), abs=tolerance)
    assert many[:, 2].max() < limit - 10 * tolerance
