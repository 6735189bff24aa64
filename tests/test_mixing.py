"""MoCHi's synthetic negatives against vectors that are built, normalised and detached one by one, in float64."""

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from unitsphere.analysis.hardness import false_parents
from unitsphere.common.errors import UsageError
from unitsphere.common.randomness import uniform
from unitsphere.methods.learners.health import highest_score, proxy_accuracy
from unitsphere.objectives import info_nce
from unitsphere.objectives.contrastive import NOTHING
from unitsphere.objectives.mixing import Mixing, draw_parents, hardest, synthesise

TAU = 0.2


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unit(*shape, seed=0, dtype=torch.float64):
    return F.normalize(normal(*shape, seed=seed, dtype=dtype), dim=-1)


def mean_keys(count, dim, seed=1):
    """Means of four unit vectors that point about the same way, as JCL's queue holds: of many lengths below 1."""
    return F.normalize(normal(count, 1, dim, seed=seed) + 0.7 * normal(count, 4, dim, seed=seed + 1), dim=2).mean(1)


def draw_seed(number=7):
    return torch.tensor(number * 0x2545F4914F6CDD1D % 2**62)


def synthetic(query, negatives, mixing, number=7, rows=None, **options):
    rows = torch.arange(len(query)) if rows is None else rows
    return synthesise(query, negatives, mixing, temperature=TAU, draw_seed=draw_seed(number), rows=rows, **options)


def explicit(query, negatives, parents, other, detach=True, weigh=False):
    """Each synthetic vector of Eq. 3 and section 4.2, normalised, as a constant where it is one; then q.h / tau."""
    if detach:
        other = other.detach()
    rows = []
    for n, q in enumerate(query):
        row = []
        for i, j, a in zip(parents.first[n], parents.second[n], parents.a[n], strict=True):
            mixed = a * negatives[i] + (1 - a) * negatives[j]
            row.append(torch.dot(q, mixed / mixed.norm()) / TAU)
        for j, b in zip(parents.partner[n], parents.b[n], strict=True):
            mixed = b * other[n] + (1 - b) * negatives[j]
            row.append(torch.dot(q, mixed / mixed.norm()) / TAU * (b if weigh else 1))
        rows.append(torch.stack(row))
    return torch.stack(rows)


VARIANTS = {
    "the paper's": {},
    "not detached": {"detach": False},
    "parents may be the same": {"distinct": False, "hardest": 3},
    "ranked by the key": {"rank_by": "key"},
    "mixed with the key": {"mix_in": "key"},
    "all by the key": {"rank_by": "key", "mix_in": "key"},
    "weighed": {"weigh": True},
    "weighed, not detached": {"weigh": True, "detach": False},
    "drawn by a softmax": {"draw_temperature": 0.1},
    "all the queue": {"hardest": None},
    "pairs alone": {"with_query": 0},
    "queries alone": {"pairs": 0},
}


@pytest.mark.parametrize("queue", ["unit", "mean keys"])
@pytest.mark.parametrize("name", VARIANTS)
def test_scores_and_gradient_are_those_of_explicit_vectors(name, queue):
    mixing = replace(Mixing(hardest=8, pairs=11, with_query=6), **VARIANTS[name])
    query, key = unit(5, 16).requires_grad_(), unit(5, 16, seed=9)
    negatives = unit(40, 16, seed=1) if queue == "unit" else mean_keys(40, 16)
    result = synthetic(query, negatives, mixing, key=key)
    other = key if mixing.mix_in == "key" else query
    expected = explicit(query, negatives, result.parents, other, mixing.detach, mixing.weigh)
    weights = normal(*expected.shape, seed=3)  # each score has a gradient of its own
    (gradient,) = torch.autograd.grad((result.scores * weights).sum(), query)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), query)
    assert result.scores.shape == (5, mixing.pairs + mixing.with_query)
    # The ambient gradient, its radial part included: nothing here relies on a normalisation that follows.
    torch.testing.assert_close(result.scores, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-10)


def test_along_the_sphere_the_gradient_that_is_not_detached_is_a_known_multiple_of_the_other():
    """By 1 - b (q.h') / |b q + (1 - b) n|, for each h'."""
    query, negatives = unit(1, 16).requires_grad_(), unit(40, 16, seed=1)
    constant, moving = (
        synthetic(query, negatives, Mixing(hardest=8, pairs=0, with_query=6, detach=detach)) for detach in (True, False)
    )
    for k in range(6):
        b, n = constant.parents.b[0, k], negatives[constant.parents.partner[0, k]]
        tangents = []
        for result in (constant, moving):
            (gradient,) = torch.autograd.grad(result.scores[0, k], query, retain_graph=True)
            tangents.append(gradient - (gradient * query).sum() * query)
        mixed = (b * query[0] + (1 - b) * n).detach()
        factor = 1 - b * torch.dot(query[0].detach(), mixed) / mixed.norm() ** 2
        torch.testing.assert_close(tangents[1], factor * tangents[0], rtol=0, atol=1e-12)


def test_negatives_that_take_a_gradient_take_none_through_their_mixtures():
    query, negatives = unit(4, 8).requires_grad_(), unit(20, 8, seed=1).requires_grad_()
    result = synthetic(query, negatives, Mixing(hardest=5, pairs=4, with_query=4))
    of_query, of_negatives = torch.autograd.grad(result.scores.sum(), (query, negatives), allow_unused=True)
    assert of_negatives is None and of_query.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_float32_whatever_autocast_says(dtype):
    query, negatives = unit(6, 32, dtype=torch.float32), unit(100, 32, seed=1, dtype=torch.float32).to(dtype)
    mixing = Mixing(hardest=16, pairs=20, with_query=10)
    plain = synthetic(query, negatives, mixing)
    with torch.autocast("cpu", torch.bfloat16):
        within = synthetic(query, negatives, mixing)
    assert within.scores.dtype == torch.float32 and torch.equal(within.scores, plain.scores)
    exact = synthetic(query.double(), negatives.double(), mixing)
    assert all(torch.equal(x, y.to(x.dtype)) for x, y in zip(plain.parents, exact.parents, strict=True))
    # A dot of 32 terms below 1 in float32, over tau = 0.2.
    torch.testing.assert_close(plain.scores.double(), exact.scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize("detach", [True, False])
def test_opposite_parents_give_scores_of_unit_vectors(detach):
    """The length of such a mixture is rounding, yet no cosine is above 1. The third query is opposite to a negative."""
    direction = unit(1, 16, dtype=torch.float32)
    negatives = torch.cat([direction, -direction])
    query = torch.cat([unit(2, 16, seed=1, dtype=torch.float32), direction]).requires_grad_()
    result = synthetic(query, negatives, Mixing(hardest=2, pairs=4096, with_query=4096, detach=detach))
    result.scores.sum().backward()
    assert query.grad.isfinite().all()
    assert (TAU * result.scores.abs() <= query.detach().norm(dim=1, keepdim=True) * (1 + 1e-6)).all()  # float32


def test_the_mixing_weights_are_uniform_in_their_open_intervals():
    mixing = Mixing(hardest=16, pairs=2000, with_query=2000)
    parents = draw_parents(normal(20, 50), mixing, draw_seed=draw_seed(), rows=torch.arange(20))
    for dtype in (torch.float32, torch.float64):
        lowest, highest = uniform(torch.tensor([0, 2**62 - 1]), dtype)
        assert lowest > 0 and highest < 1
    assert parents.a.min() > 0 and parents.a.max() < 1
    assert parents.b.min() > 0 and parents.b.max() < 0.5
    # One fixed draw each: a uniform one falls below 0.001 once in a thousand lots.
    assert stats.kstest(parents.a.flatten().numpy(), stats.uniform(0, 1).cdf).pvalue > 0.001
    assert stats.kstest(parents.b.flatten().numpy(), stats.uniform(0, 0.5).cdf).pvalue > 0.001
    draws = torch.stack([x.flatten().double() for x in parents[:3]])
    # 40,000 independent draws correlate by 1 / 200 or so; first and second, being distinct, by -1/15.
    assert torch.corrcoef(draws)[2, :2].abs().max() < 0.02


def test_parents_are_the_hardest_each_as_often_and_distinct():
    mixing = Mixing(hardest=6, pairs=3000, with_query=3000)
    ranking = normal(4, 30)
    parents = draw_parents(ranking, mixing, draw_seed=draw_seed(), rows=torch.arange(4))
    assert (parents.first != parents.second).all()
    for n, order in enumerate(ranking.argsort(dim=1, descending=True)):
        best = sorted(order[:6].tolist())
        for places in (parents.first[n], parents.second[n], parents.partner[n]):
            found, counts = places.unique(return_counts=True)
            assert found.tolist() == best
            assert stats.chisquare(counts.numpy()).pvalue > 0.001
        ordered_pairs, counts = (parents.first[n] * 30 + parents.second[n]).unique(return_counts=True)
        assert len(ordered_pairs) == 6 * 5 and stats.chisquare(counts.numpy()).pvalue > 0.001


def test_parents_that_may_be_the_same_are_so_once_in_n():
    mixing = Mixing(hardest=4, pairs=8000, with_query=0, distinct=False)
    parents = draw_parents(normal(1, 30), mixing, draw_seed=draw_seed(), rows=torch.arange(1))
    same = int((parents.first == parents.second).sum())
    assert stats.binomtest(same, 8000, 1 / 4).pvalue > 0.001


@pytest.mark.parametrize("rank_by", ["query", "key"])
def test_the_ranking_is_by_whom_it_is_said_to_be(rank_by):
    query, key, negatives = unit(6, 8), unit(6, 8, seed=4), unit(50, 8, seed=1)
    result = synthetic(query, negatives, Mixing(5, 400, 400, rank_by=rank_by), key=key)
    for n, one in enumerate(query if rank_by == "query" else key):
        best = sorted(range(50), key=lambda j: -torch.dot(one, negatives[j]).item())[:5]
        assert set(result.parents.first[n].tolist()) == set(result.parents.partner[n].tolist()) == set(best)


@pytest.mark.parametrize("count", [None, 60, 1000])
def test_all_of_the_queue_is_mixed_where_n_is_none_or_larger(count):
    parents = draw_parents(normal(2, 60), Mixing(count, 4000, 4000), draw_seed=draw_seed(), rows=torch.arange(2))
    for places in (parents.first, parents.second, parents.partner):
        assert all(row.unique().tolist() == list(range(60)) for row in places)


def test_a_softmax_draw_has_the_chances_of_a_softmax_and_of_what_is_left_without_the_first():
    ranking, tau = torch.tensor([[0.9, -0.4, 0.5, 0.1, 0.3, -0.2]]).double(), 0.3
    parents = draw_parents(
        ranking, Mixing(4, 40_000, 40_000, draw_temperature=tau), draw_seed=draw_seed(), rows=torch.arange(1)
    )
    weight = {j: math.exp(ranking[0, j].item() / tau) for j in (0, 2, 3, 4)}  # the four hardest
    total = sum(weight.values())
    for places in (parents.first[0], parents.partner[0]):
        counts = [int((places == j).sum()) for j in weight]
        assert stats.chisquare(counts, [40_000 * w / total for w in weight.values()]).pvalue > 0.001
    pairs = [(i, j) for i in weight for j in weight if i != j]
    counts = [int(((parents.first[0] == i) & (parents.second[0] == j)).sum()) for i, j in pairs]
    chances = [weight[i] / total * weight[j] / (total - weight[i]) for i, j in pairs]
    assert sum(counts) == 40_000
    assert stats.chisquare(counts, [40_000 * chance for chance in chances]).pvalue > 0.001


@pytest.mark.parametrize("best", [0, 3, 5])
def test_a_softmax_so_sharp_that_one_negative_takes_all_still_has_distinct_parents(best):
    ranking = torch.linspace(-1, 0, 6).repeat(3, 1)
    ranking[:, best] = 1.0
    mask = torch.tensor([[True] * 6, [True] * 6, [j in (best, 1) for j in range(6)]])
    parents = draw_parents(
        ranking, Mixing(6, 500, 500, draw_temperature=1e-3), draw_seed=draw_seed(), rows=torch.arange(3), mask=mask
    )
    assert (parents.first == best).all() and (parents.second != best).all()
    assert mask.gather(1, parents.second).all() and mask.gather(1, parents.partner).all()


@pytest.mark.parametrize("draw_temperature", [None, 0.1])
@pytest.mark.parametrize("count", [None, 8])
def test_a_negative_that_is_not_allowed_is_never_mixed(count, draw_temperature):
    """The class oracle. A query with fewer than N draws among these; with one it has no pair, with none nothing."""
    query, negatives = unit(7, 16).requires_grad_(), unit(40, 16, seed=1)
    labels, queue_labels = torch.arange(7) % 4, (torch.arange(40) + 2) % 4
    mask = labels[:, None] != queue_labels
    ranks = (query @ negatives.T).masked_fill(~mask, -9).argsort(dim=1, descending=True).argsort(dim=1)
    for row, left in ((3, 5), (4, 2), (5, 1), (6, 0)):
        mask[row] &= ranks[row] < left
    mixing = Mixing(count, 300, 300, draw_temperature=draw_temperature)
    result = synthetic(query, negatives, mixing, mask=mask)
    exist = torch.cat([mask.sum(1) > 1, mask.sum(1) > 0]).view(2, 7, 1).expand(2, 7, 300)
    for part, exists in zip((result.pairs, result.with_query), exist, strict=True):
        assert torch.equal(part > NOTHING, exists)
    for places, exists in zip(result.parents[:2], (exist[0], exist[0]), strict=True):
        assert mask.gather(1, places)[exists].all()
    assert mask.gather(1, result.parents.partner)[exist[1]].all()
    expected = torch.minimum(mask.sum(1), torch.tensor(count or 40))
    assert result.parents.at_hand[:, 0].tolist() == expected.tolist()
    if draw_temperature is None:
        used = [len(set(row.tolist())) for row in result.parents.partner[:6]]
        assert used == expected[:6].tolist()
    one, two = false_parents(result, labels, queue_labels)
    assert one == two == 0
    (gradient,) = torch.autograd.grad(result.scores.exp().sum(), query)
    assert gradient.isfinite().all() and (gradient[6] == 0).all() and (gradient[:6] != 0).any(dim=1).all()


def until_share(pairs, with_query, real, count, share):
    """Appendix B.2 as it reads: one after the other, until the share of the top N is reached. How many are taken."""
    taken = []
    for one, other in zip(pairs, with_query, strict=True):
        for score in (one, other):
            ranked = sorted([(s, 0) for s in real] + [(s, 1) for s in taken], reverse=True)[:count]
            if sum(kind for _, kind in ranked) >= share * count - 1e-9:
                return len(taken)
            taken.append(score)
    return len(taken)


@pytest.mark.parametrize("share", [0.07, 0.28, 1.0])  # 0.28 x 25 is a little above 7 in floating point
@pytest.mark.parametrize("masked", [False, True])
def test_kinds_alternate_until_a_share_of_the_top_is_synthetic(share, masked):
    query, negatives = unit(8, 16), unit(60, 16, seed=1)
    mask = torch.rand(8, 60, generator=torch.Generator().manual_seed(5)) < 0.2 if masked else torch.ones(8, 60) > 0
    mixing = Mixing(hardest=25, pairs=30, with_query=30)
    everything = synthetic(query, negatives, mixing, mask=mask)
    result = synthetic(query, negatives, replace(mixing, until=share), mask=mask)
    taken = set()
    for n in range(8):
        real = [score.item() / TAU for score in (query[n] @ negatives.T)[mask[n]]]
        pairs, with_query = everything.pairs[n].tolist(), everything.with_query[n].tolist()
        count = until_share(pairs, with_query, real, 25, share)
        taken.add(count)
        assert result.pairs[n].tolist() == pairs[: (count + 1) // 2] + [NOTHING] * (30 - (count + 1) // 2)
        assert result.with_query[n].tolist() == with_query[: count // 2] + [NOTHING] * (30 - count // 2)
    assert share == 1.0 or max(taken) < 60  # the end is reached before the mixtures are used up


def test_nothing_to_mix_is_an_empty_tensor_and_leaves_the_loss_as_it_was():
    query, negatives = unit(4, 8), unit(20, 8, seed=1)
    result = synthetic(query, negatives, Mixing(5, 0, 0))
    assert result.scores.shape == (4, 0)
    plain = info_nce(query, unit(4, 8, seed=2), negatives, temperature=TAU)
    mixed = info_nce(query, unit(4, 8, seed=2), negatives, temperature=TAU, extra_scores=result.scores)
    assert torch.equal(plain, mixed)


@pytest.mark.parametrize("mixing", [Mixing(8, 12, 6), Mixing(8, 12, 6, draw_temperature=0.1), Mixing(None, 12, 6)])
def test_draws_are_a_function_of_lot_and_row(mixing):
    query, negatives = unit(12, 16), unit(40, 16, seed=1)
    mask = torch.rand(12, 40, generator=torch.Generator().manual_seed(5)) < 0.7
    whole = synthetic(query, negatives, mixing, mask=mask)
    for part in (slice(0, 6), slice(6, 12)):  # what each of two ranks does
        own = synthetic(query[part], negatives, mixing, rows=torch.arange(12)[part], mask=mask[part])
        assert all(torch.equal(x, y[part]) for x, y in zip(own.parents, whole.parents, strict=True))
        torch.testing.assert_close(own.scores, whole.scores[part], rtol=0, atol=1e-12)
    other = synthetic(query, negatives, mixing, number=8, mask=mask)
    assert (other.parents.first != whole.parents.first).float().mean() > 0.5
    assert (other.parents.a != whole.parents.a).all()


def test_the_hardest_come_in_the_order_of_the_queue():
    """So that draws do not hang on the order in which a device's selection happens to give them."""
    places, at_hand = hardest(normal(6, 500), 20)
    assert torch.equal(places, places.sort(dim=1).values) and (at_hand == 20).all()


@pytest.mark.parametrize("name", [*VARIANTS, "until"])
def test_shapes_do_not_depend_on_values_and_nothing_is_read_back(name):
    """Fake tensors have shapes and no values: what asks for one, as a recorded step may not, fails."""
    options = {"until": 0.5, "pairs": 6} if name == "until" else VARIANTS[name]
    mixing = replace(Mixing(8, 11, 6), **options)
    with FakeTensorMode():
        query = torch.empty(5, 16, requires_grad=True)
        result = synthetic(query, torch.empty(40, 16), mixing, key=torch.empty(5, 16), mask=torch.ones(5, 40) > 0)
        result.scores.sum().backward()
        labels, queue_labels = torch.zeros(5, dtype=torch.int64), torch.zeros(40, dtype=torch.int64)
        assert false_parents(result, labels, queue_labels)[0].shape == ()
        assert proxy_accuracy(torch.empty(5), torch.empty(5, 40), result.scores).shape == ()
        assert highest_score(result.scores).shape == () and query.grad.shape == (5, 16)


@pytest.mark.parametrize("masked", [False, True])
def test_extra_memory_stays_within_256_mib_at_the_papers_size(masked):
    """Batch 256, queue 65536, (1024, 1024, 128), value and gradient: from the profiler's record of every allocation."""
    query = unit(256, 128, dtype=torch.float32).requires_grad_()
    negatives = unit(65536, 128, seed=1, dtype=torch.float32)
    mask = torch.arange(65536) % 10 != torch.arange(256)[:, None] % 10 if masked else None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = synthetic(query, negatives, Mixing(1024, 1024, 128), mask=mask)
        torch.logsumexp(result.scores, dim=1).sum().backward()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    scores = 256 * 65536 * 4  # the least that can be: the scores themselves, or their gradient
    assert scores < peak < 256 * 2**20


def test_false_parents_are_counted_as_figure_2c_counts_them():
    query, negatives = unit(9, 8), unit(50, 8, seed=1)
    labels, queue_labels = torch.arange(9) % 3 - 1, torch.arange(50) % 3 - 1  # -1: unknown
    result = synthetic(query, negatives, Mixing(20, 30, 10))
    one = two = 0
    for n in range(9):
        own = labels[n].item()
        bad = {j for j in range(50) if queue_labels[j] == own and own >= 0}
        for i, j in zip(result.parents.first[n].tolist(), result.parents.second[n].tolist(), strict=True):
            one += i in bad or j in bad
            two += i in bad and j in bad
        one += sum(j in bad for j in result.parents.partner[n].tolist())
    shares = false_parents(result, labels, queue_labels)
    assert [share.item() for share in shares] == pytest.approx([one / 360, two / 360])
    assert 0 < two < one


def test_proxy_accuracy_and_the_highest_scores():
    real = torch.tensor([[0.1, 0.5], [0.2, 0.3], [0.9, 0.1], [0.0, NOTHING]])
    made = torch.tensor([[0.3], [0.7], [0.2], [NOTHING]])
    positive = torch.tensor([0.6, 0.6, 0.8, 0.1])
    assert proxy_accuracy(positive, real) == 3 / 4
    assert proxy_accuracy(positive, real, made) == 2 / 4
    assert proxy_accuracy(positive, real, made[:, :0]) == 3 / 4
    assert highest_score(real).item() == pytest.approx((0.5 + 0.3 + 0.9 + 0.0) / 4)
    assert highest_score(made).item() == pytest.approx((0.3 + 0.7 + 0.2) / 3)
    assert highest_score(made[:, :0]).isnan() and highest_score(made[3:]).isnan()


def test_a_mixture_with_the_query_is_harder_than_its_parent():
    """Section 4.2, for negatives of length 1; so max l(h') is above max l(n) as soon as the hardest is drawn."""
    query, negatives = unit(64, 32), unit(2000, 32, seed=1)
    result = synthetic(query, negatives, Mixing(4, 0, 64))
    real = query @ negatives.T / TAU
    assert (result.with_query > real.gather(1, result.parents.partner)).all()
    assert highest_score(result.with_query) > highest_score(real)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hardest": 0}, "hardest"),
        ({"pairs": -1}, "pairs"),
        ({"with_query": -1}, "with_query"),
        ({"hardest": 1}, "pairs"),
        ({"draw_temperature": 0.0}, "draw_temperature"),
        ({"until": 0.0}, "until"),
        ({"until": 1.5}, "until"),
        ({"until": 0.5, "pairs": 4, "with_query": 5}, "until"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(fields, said):
    with pytest.raises(UsageError, match=f"^{said}: "):
        Mixing(**fields)


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_a_recorded_step_on_the_device_equals_the_plain_one_here(masked):
    query, negatives = unit(64, 128, dtype=torch.float32), unit(8192, 128, seed=1, dtype=torch.float32)
    mask = torch.rand(64, 8192, generator=torch.Generator().manual_seed(5)) < 0.5 if masked else None
    mixing = Mixing(256, 256, 64)
    expected = synthetic(query, negatives, mixing, number=9, mask=mask)
    q, n, ticket, rows = query.cuda(), negatives.cuda(), draw_seed(7).cuda(), torch.arange(64).cuda()
    mask = None if mask is None else mask.cuda()

    def step():
        return synthesise(q, n, mixing, temperature=TAU, draw_seed=ticket, rows=rows, mask=mask)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    ticket.copy_(draw_seed(9))
    graph.replay()
    # Scores round otherwise there, so the last of the N hardest may be another: then draws after it are shifted by one.
    same = (result.parents.first.cpu() == expected.parents.first).all(dim=1)
    assert same.float().mean() > 0.8
    torch.testing.assert_close(result.scores.cpu()[same], expected.scores[same], rtol=0, atol=1e-4)
