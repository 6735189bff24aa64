"""The one contrastive formula against naive float64 forms and their autograd."""

import math

import pytest
import torch
from torch.nn import functional as F

from unitsphere.common.errors import UsageError
from unitsphere.objectives import info_nce


def unit(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=dtype), dim=-1)


def naive(query, keys, negatives, temperature, alpha=None, alpha_on="all", variance_weight=0.0, extra=None, mask=None):
    """The formula as the papers print it: explicit exponentials, one query at a time, covariance formed."""
    losses = []
    for n in range(len(query)):
        own = negatives if negatives.dim() == 2 else negatives[n]
        scores = [torch.dot(query[n], k) / temperature for j, k in enumerate(own) if mask is None or mask[n, j]]
        others = [] if extra is None else list(extra[n])
        weighed = scores if alpha_on == "real" else scores + others
        factor = 1.0 if alpha is None else alpha / len(weighed)
        total = factor * sum(torch.exp(s) for s in weighed)
        total = total + (sum(torch.exp(s) for s in others) if alpha_on == "real" else 0)
        positives = keys[n] if keys.dim() == 3 else keys[n][None]
        centre = positives.mean(0)
        covariance = (positives - centre).T @ (positives - centre) / len(positives)
        mean = torch.dot(query[n], centre) / temperature
        spread = query[n] @ covariance @ query[n] / temperature**2
        losses.append(torch.log(torch.exp(mean + variance_weight / 2 * spread) + total) - mean)
    return torch.stack(losses).mean()


EXTRA = torch.randn(6, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
CASES = {
    "moco": {},
    "eqco": {"alpha": 50.0},
    "jcl": {"keys": unit(6, 5, 8, seed=3), "variance_weight": 4.0},
    "mochi": {"extra": EXTRA},
    "mochi with eqco": {"extra": EXTRA, "alpha": 50.0},
    "mochi with eqco on the real negatives": {"extra": EXTRA, "alpha": 50.0, "alpha_on": "real"},
    "own negatives": {"negatives": unit(6, 10, 8, seed=5)},
    "oracle": {"mask": torch.rand(6, 10, generator=torch.Generator().manual_seed(6)) < 0.6},
    "all at once": {
        "keys": unit(6, 5, 8, seed=3),
        "variance_weight": 2.0,
        "alpha": 7.0,
        "extra": EXTRA,
        "mask": torch.rand(6, 10, generator=torch.Generator().manual_seed(6)) < 0.6,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_the_naive_form_in_float64(name):
    case = {"keys": unit(6, 8, seed=1), "negatives": unit(10, 8, seed=2)} | CASES[name]
    query = unit(6, 8).requires_grad_()
    reference = naive(query, temperature=0.2, **case)
    (expected,) = torch.autograd.grad(reference, query)
    extra = case.pop("extra", None)
    loss = info_nce(query, case.pop("keys"), case.pop("negatives"), temperature=0.2, extra_scores=extra, **case)
    (gradient,) = torch.autograd.grad(loss, query)
    # Two float64 evaluations of one expression: a few units in the last place.
    torch.testing.assert_close(loss, reference, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_the_losses_of_queries_are_averaged_added_or_left_alone():
    given = unit(6, 8), unit(6, 8, seed=1), unit(10, 8, seed=2)
    alone = info_nce(*given, temperature=0.2, reduction="none")
    assert alone.shape == (6,)
    torch.testing.assert_close(info_nce(*given, temperature=0.2, reduction="sum"), alone.sum())
    torch.testing.assert_close(info_nce(*given, temperature=0.2), alone.mean())
    with pytest.raises(UsageError, match=r"reduction: 'nonsense' given; allowed are mean, sum, none"):
        info_nce(*given, temperature=0.2, reduction="nonsense")


def test_plain_form_is_cross_entropy_against_the_key():
    query, keys, negatives = unit(9, 16), unit(9, 16, seed=1), unit(30, 16, seed=2)
    logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ negatives.T], 1) / 0.07
    expected = F.cross_entropy(logits, torch.zeros(9, dtype=torch.long))
    torch.testing.assert_close(info_nce(query, keys, negatives, temperature=0.07), expected, rtol=1e-12, atol=0)


def test_alpha_equal_to_the_number_of_negatives_is_plain_info_nce():
    query, keys, negatives = unit(9, 16), unit(9, 16, seed=1), unit(30, 16, seed=2)
    plain = info_nce(query, keys, negatives, temperature=0.2)
    torch.testing.assert_close(info_nce(query, keys, negatives, temperature=0.2, alpha=30), plain, rtol=1e-12, atol=0)


def test_the_gradient_is_that_of_the_papers_equation():
    """MoCHi Eq. 2: dL/dq = -(1/tau) ((1 - p_k) k - sum_n p_n n)."""
    query, keys, negatives = unit(5, 16).requires_grad_(), unit(5, 16, seed=1), unit(30, 16, seed=2)
    loss = info_nce(query, keys, negatives, temperature=0.2, reduction="none").sum()
    (gradient,) = torch.autograd.grad(loss, query)
    with torch.no_grad():
        logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ negatives.T], 1) / 0.2
        p = logits.softmax(1)
        expected = -((1 - p[:, :1]) * keys - p[:, 1:] @ negatives) / 0.2
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_a_query_without_negatives_has_no_loss_and_no_gradient():
    query = unit(2, 8).requires_grad_()
    mask = torch.tensor([[False] * 4, [True] * 4])
    for alpha in (None, 16.0):
        losses = info_nce(
            query,
            unit(2, 8, seed=1),
            unit(4, 8, seed=2),
            temperature=0.2,
            mask=mask,
            alpha=alpha,
            reduction="none",
        )
        (gradient,) = torch.autograd.grad(losses.sum(), query)
        assert losses[0] == 0 and losses[1] > 0
        assert torch.equal(gradient[0], torch.zeros(8, dtype=torch.float64)) and gradient[1].isfinite().all()


def test_scores_are_float32_under_autocast():
    query, keys, negatives = (
        unit(*s, seed=i, dtype=torch.float32) for i, s in enumerate([(4, 64), (4, 64), (512, 64)])
    )
    exact = info_nce(query.double(), keys.double(), negatives.double(), temperature=0.07)
    with torch.autocast("cpu", torch.bfloat16):
        loss = info_nce(query, keys, negatives, temperature=0.07)
    # bf16 scores would be off by about 1e-2; float32 ones by 1e-6.
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)


def test_large_scores_do_not_overflow():
    query = torch.full((1, 1), 1000.0)
    loss = info_nce(query, torch.ones(1, 1), torch.ones(3, 1), temperature=1.0)
    # float32 near 1000 resolves 6e-5
    assert loss.item() == pytest.approx(math.log(4), abs=1e-4)


def test_nothing_is_normalised():
    query, keys, negatives = unit(3, 8), unit(3, 8, seed=1), unit(5, 8, seed=2)
    assert info_nce(2 * query, keys, negatives, temperature=1.0) == pytest.approx(
        info_nce(query, keys, negatives, temperature=0.5).item(), rel=1e-12
    )
