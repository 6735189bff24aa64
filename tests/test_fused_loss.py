"""The fused log-sum-exp of the negatives against float64 and its autograd: on a GPU, or interpreted on a CPU.

The tests marked `gpu` run the kernels on the device; `test_the_kernels_are_right_when_interpreted` runs the same tests
in a process of its own where Triton interprets them with numpy.
"""

import os
import sys

import pytest
import torch
from conftest import interpret_kernels
from torch.nn import functional as F

from unitsphere.common.errors import UsageError
from unitsphere.objectives import info_nce

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TAU = 0.1
BF16, F32 = torch.bfloat16, torch.float32


def kernel(test):
    usable = INTERPRETED or torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(not usable, reason="needs CUDA or TRITON_INTERPRET=1")(test))


@pytest.fixture(autouse=True, scope="module")
def bfloat16_products_when_interpreted():
    """Triton's interpreter holds bfloat16 as integers and would multiply those."""
    if not INTERPRETED:
        yield
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    plain = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return plain(self, a, b, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield


def unit(*shape, seed=0, dtype=F32):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1).to(DEVICE, dtype)


def some_of(*shape, seed=9):
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.5).to(DEVICE)


def fused(query, negatives, mask=None, temperature=TAU):
    """lse (N,) and d lse / d q (N, D) of the kernels."""
    from unitsphere.objectives.fused import lse_of_negatives

    query = query.detach().requires_grad_()
    lse = lse_of_negatives(query, negatives, temperature, mask)
    (gradient,) = torch.autograd.grad(lse.sum(), query)
    return lse, gradient


def naive(query, negatives, mask=None, temperature=TAU):
    """The same in float64 from the matrix of scores, by autograd; and the softmax (N, K)."""
    query = query.detach().double().requires_grad_()
    scores = query @ negatives.double().T / temperature
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e30)
    lse = scores.logsumexp(dim=1)
    (gradient,) = torch.autograd.grad(lse.sum(), query)
    return lse.detach(), gradient, scores.detach().softmax(dim=1)


def assert_right(found, expected, query, negatives, temperature=TAU):
    (lse, gradient), (true_lse, true_gradient, p) = found, expected
    assert lse.dtype == F32 and gradient.dtype == query.dtype
    # Scores of unit vectors: float32, but a query in two bfloat16 lacks 2^-18 of itself (interpreted, where halves
    # are cut instead of rounded, 2^-16).
    split = query.dtype == F32 and negatives.dtype == BF16
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-6, atol=(2**-16 if split else 1e-6) / temperature)
    off = (gradient.double() - true_gradient).norm()
    allowed = 1e-5 * true_gradient.norm()
    if negatives.dtype == BF16:
        # A weight is off by at most 2^-8 of itself, each by its own share: such errors add as squares.
        allowed = allowed + 2**-8 * p.norm() / temperature
    if query.dtype == BF16:  # and so is what is handed back
        allowed = allowed + 2**-8 * true_gradient.norm()
    assert off <= allowed


# One tile and several, ragged and whole; queries in several blocks; negatives in several shares; padded dimensions.
SHAPES = [(1, 1, 16), (5, 37, 48), (130, 128, 64), (6, 1100, 20), (70, 100, 256)]
TYPES = [(F32, F32), (F32, BF16)]
ODD = [((6, 1100, 128), (BF16, BF16)), ((5, 37, 48), (BF16, BF16)), ((5, 37, 48), (BF16, F32))]


@kernel
@pytest.mark.parametrize(("shape", "types"), [(shape, types) for types in TYPES for shape in SHAPES] + ODD, ids=str)
def test_value_and_gradient_equal_float64(shape, types):
    n, k, dim = shape
    query, negatives = unit(n, dim, dtype=types[0]), unit(k, dim, seed=1, dtype=types[1])
    assert_right(fused(query, negatives), naive(query, negatives), query, negatives)


@kernel
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("k", [50, 1100])
def test_masked_negatives_do_not_count(k, dtype):
    query, negatives, mask = unit(5, 32), unit(k, 32, seed=1, dtype=dtype), some_of(5, k)
    mask[0] = False  # no negative at all
    mask[1, : k // 2] = False  # none in the first share
    mask[2] = False
    mask[2, -1] = True  # only the last
    found = fused(query, negatives, mask)
    assert_right(found, naive(query, negatives, mask), query, negatives)
    lse, gradient = found
    assert lse[0] == -1e30 and not gradient[0].any()


@kernel
@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores_do_not_overflow(sign):
    query, negatives = 100 * unit(4, 16), sign * unit(600, 16, seed=1).abs() * 10
    query = query.abs()
    lse, gradient = fused(query, negatives, temperature=1.0)
    true_lse, true_gradient, _ = naive(query, negatives, temperature=1.0)
    # Scores near 1000 are resolved to 6e-5, which is then a relative error of every weight.
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-6, atol=1e-3)
    assert (gradient - true_gradient).norm() <= 1e-3 * true_gradient.norm()


@kernel
def test_any_layout_in_memory_will_do():
    query, negatives, mask = unit(32, 5).T, unit(64, 600, seed=1)[::2].T, some_of(600, 5).T
    assert_right(fused(query, negatives, mask), naive(query, negatives, mask), query, negatives)


CASES = {
    "moco": {},
    "eqco": {"alpha": 50.0},
    "jcl": {"keys": lambda: unit(6, 5, 32, seed=3), "variance_weight": 4.0},
    "mochi": {"extra_scores": lambda: 5 * unit(6, 4, seed=4)},
    "oracle": {"mask": lambda: some_of(6, 700), "alpha": 7.0},
    "all at once": {
        "keys": lambda: unit(6, 5, 32, seed=3),
        "variance_weight": 2.0,
        "alpha": 7.0,
        "extra_scores": lambda: 5 * unit(6, 4, seed=4),
        "mask": lambda: some_of(6, 700) & (torch.arange(6, device=DEVICE) > 0)[:, None],
    },
}


@kernel
@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_the_plain_one(name):
    case = {"keys": unit(6, 32, seed=1), "negatives": unit(700, 32, seed=2)}
    case |= {key: value() if callable(value) else value for key, value in CASES[name].items()}
    results = []
    for form in (True, False):
        leaves = [unit(6, 32).requires_grad_(), case["keys"].clone().requires_grad_()]
        keys = {"keys": leaves[1], "reduction": "none", "fused": form}
        losses = info_nce(leaves[0], temperature=0.2, **case | keys)
        results.append((losses.detach(), *torch.autograd.grad(losses.sum(), leaves)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # two float32 evaluations of scores up to 5


@kernel
@pytest.mark.parametrize("kind", ["random", "clusters", "near duplicates"])
def test_bfloat16_negatives_give_the_float64_loss_and_gradient_to_a_thousandth(kind):
    n, k, dim = 64, 600, 128
    if kind == "clusters":
        centres = unit(20, dim, seed=7)
        query, keys, negatives = (
            F.normalize(centres.repeat(r, 1)[:m] + 0.5 * unit(m, dim, seed=s), dim=1)
            for s, (r, m) in enumerate([(4, n), (4, n), (30, k)])
        )
    else:
        query, negatives = unit(n, dim), unit(k, dim, seed=1)
        keys = F.normalize(query + 0.5 * unit(n, dim, seed=2), dim=1)
        if kind == "near duplicates":
            negatives[: 2 * n] = F.normalize(query.repeat(2, 1) + 0.5 * unit(2 * n, dim, seed=3), dim=1)
    query, keys, negatives = query.to(BF16).float(), keys.to(BF16), negatives.to(BF16)
    found, expected = [], []
    for dtype, form, into in ((F32, True, found), (torch.float64, False, expected)):
        leaf = query.to(dtype).requires_grad_()
        given = negatives if form else negatives.to(dtype)
        loss = info_nce(leaf, keys.to(dtype), given, temperature=0.07, fused=form)
        into += [loss.detach().double(), torch.autograd.grad(loss, leaf)[0].double()]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 1e-3 * other.norm()


@kernel
def test_a_second_derivative_is_refused():
    query = unit(3, 16).requires_grad_()
    loss = info_nce(query, unit(3, 16, seed=1), unit(20, 16, seed=2), temperature=TAU, fused=True)
    with pytest.raises(NotImplementedError, match="fused=False"):
        torch.autograd.grad(loss, query, create_graph=True)


@kernel
@pytest.mark.skipif(INTERPRETED, reason="a recording needs a GPU")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_recorded_loss_equals_the_plain_one(dtype):
    query, keys, negatives = (
        unit(100, 128).requires_grad_(),
        unit(100, 128, seed=1),
        unit(5000, 128, seed=2, dtype=dtype),
    )

    def step():
        loss = info_nce(query, keys, negatives, temperature=TAU, alpha=7.0, fused=True)
        return loss.detach(), torch.autograd.grad(loss, query)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    with torch.no_grad():
        query.copy_(unit(100, 128, seed=5))
        negatives.copy_(unit(5000, 128, seed=6))
    graph.replay()
    for found, expected in zip(recorded, step(), strict=True):
        assert torch.equal(found, expected)  # sums have a fixed order


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here: pytest -m gpu")
def test_the_kernels_are_right_when_interpreted():
    interpret_kernels(__file__)


@kernel
def test_where_it_cannot_be_fused_it_says_why():
    query, negatives = unit(2, 8), unit(5, 8)
    refused = {
        "negatives of its own": (query, unit(2, 5, 8)),
        "take a gradient": (query, unit(5, 8).requires_grad_()),
        "float64": (query.double(), negatives),
        "300 dimensions": (unit(2, 300), unit(5, 300)),
    }
    for reason, (query, negatives) in refused.items():
        with pytest.raises(UsageError, match=reason):
            info_nce(query, query, negatives, temperature=TAU, fused=True)


@pytest.mark.skipif(INTERPRETED, reason="then it works there")
def test_it_is_refused_on_a_cpu():
    pytest.importorskip("triton")
    with pytest.raises(UsageError, match="on the cpu"):
        info_nce(torch.randn(2, 8), torch.randn(2, 8), torch.randn(5, 8), temperature=TAU, fused=True)


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="about a CPU")
def test_nothing_of_it_is_loaded_on_a_cpu():
    query = torch.randn(64, 8)
    info_nce(query, query, torch.randn(2**17, 8), temperature=1.0)
    assert "unitsphere.objectives.fused" not in sys.modules
