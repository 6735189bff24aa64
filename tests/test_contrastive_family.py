"""SimCLR, SiMo, EqCo and JCL as points of the contrastive family: each against the method written out by hand."""

import copy
import math
from dataclasses import fields

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unitsphere.common.errors import UsageError
from unitsphere.common.randomness import lots
from unitsphere.config.layers import Layer
from unitsphere.methods.build import build_learner
from unitsphere.methods.learners import contrastive
from unitsphere.methods.learners.contrastive import ContrastiveLearner, LossSettings
from unitsphere.methods.learners.dispersion import Dispersion
from unitsphere.methods.learners.health import signs_of_health
from unitsphere.methods.learners.key_encoder import KeyEncoder
from unitsphere.methods.learners.learner import Moment
from unitsphere.methods.learners.negatives import Comparison, NegativeSource
from unitsphere.methods.resolve import resolve
from unitsphere.modules.encoder import Encoder
from unitsphere.modules.norms import groups_of, part_batch_norms
from unitsphere.modules.queue import KeyQueue
from unitsphere.objectives import info_nce
from unitsphere.objectives.mixing import Mixing, synthesise

N, D = 8, 6


def encoder(seed=0):
    torch.manual_seed(seed)
    backbone = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Encoder(backbone, nn.Linear(5, D))


def method(queue_size=None, groups=1, momentum=0.9, **options):
    """Each option goes to the part that has a setting of its name, the others to the learner."""
    network = encoder()
    part_batch_norms(network, groups)

    def part(kind, *first, **given):
        return kind(*first, **given, **{f.name: options.pop(f.name) for f in fields(kind) if f.name in options})

    loss, negatives = part(LossSettings, 0.2), part(NegativeSource)
    queue = None
    if queue_size is not None:
        queue = KeyQueue(queue_size, D, labelled=negatives.oracle, generator=torch.Generator().manual_seed(1))
    key_encoder = None if momentum is None else part(KeyEncoder, momentum, shuffles=groups > 1)
    return ContrastiveLearner(network, loss, key_encoder, negatives, queue, **options)


def keys_of(method, views, inputs):
    """By a slow copy that follows itself, so that it stays."""
    return method.key_encoder(method.slow, method.slow, [views], inputs)[0]


def mask_of(method, given, keys=None):
    """Which negatives count for the queries of a batch with such keys."""
    seed = given["draw_seed"][0] if given else None
    batch = torch.randn(N, D) if keys is None else keys
    return method.negatives(torch.arange(N), method.queue, [batch], draw_seed=seed)[1]


def images(count, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(N, 3, 6, 6, generator=generator) for _ in range(count)]


def inputs(of, epoch=0, epochs=10, seed=0):
    return of.inputs(N, Moment(epoch, epochs, epoch, epochs), torch.Generator().manual_seed(seed))


def gradients(of, loss):
    return torch.autograd.grad(loss, list(of.online.parameters()))


def assert_all_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)  # float32


def test_simclr_is_cross_entropy_among_all_other_views():
    simclr = method(momentum=None, both_views=True)
    views = images(2)
    by_hand = encoder()
    z = by_hand(torch.cat(views))
    scores = (z @ z.T / 0.2).masked_fill(torch.eye(2 * N, dtype=torch.bool), -math.inf)
    partner = torch.arange(2 * N).roll(N)
    expected = F.cross_entropy(scores, partner)
    step = simclr(views)
    torch.testing.assert_close(step.loss / 2, expected)  # the two directions add
    assert_all_close(gradients(simclr, step.loss / 2), torch.autograd.grad(expected, list(by_hand.parameters())))


def test_simclr_with_the_other_view_alone_has_n_minus_one_negatives():
    simclr = method(momentum=None)
    first, second = encoder()(torch.cat(views := images(2))).chunk(2)
    scores = first @ second.T / 0.2
    expected = F.cross_entropy(scores, torch.arange(N)) + F.cross_entropy(scores.T, torch.arange(N))
    torch.testing.assert_close(simclr(views).loss, expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_simo_takes_its_negatives_from_the_slow_keys_of_the_batch(momentum):
    simo, views = method(momentum=momentum, alpha=50.0), images(2)
    with torch.no_grad():
        for parameter in simo.online.parameters():
            parameter.mul_(1.1)  # the slow copy is now behind
    online, slow = copy.deepcopy(simo.online), copy.deepcopy(simo.slow)
    with torch.no_grad():
        for old, new in zip(slow.parameters(), online.parameters(), strict=True):
            old.copy_(momentum * old + (1 - momentum) * new)
    scores = online(views[0]) @ slow(views[1]).detach().T / 0.2
    positive, others = scores.diag(), scores.masked_fill(torch.eye(N, dtype=torch.bool), -math.inf)
    expected = (torch.logaddexp(positive, others.logsumexp(1) + math.log(50 / (N - 1))) - positive).mean()
    step = simo(views)
    torch.testing.assert_close(step.loss, expected)
    assert_all_close(gradients(simo, step.loss), torch.autograd.grad(expected, list(online.parameters())))


@pytest.mark.parametrize("source", ["queue", "batch"])
def test_each_query_meets_as_many_drawn_negatives_as_asked_for(source):
    of = method(40 if source == "queue" else None, count=5)
    mask = mask_of(of, inputs(of))
    assert mask.shape == (N, 40 if source == "queue" else N) and mask.sum(1).tolist() == [5] * N
    assert len({tuple(row.tolist()) for row in mask}) > 1  # of its own
    if source == "batch":
        assert not mask.diagonal().any()
    assert not torch.equal(mask, mask_of(of, inputs(of, seed=1)))
    assert torch.equal(mask, mask_of(of, inputs(of)))


def test_a_shared_draw_is_one_for_all_queries_and_never_the_own_key():
    of = method(count=5, shared_draw=True)
    mask = mask_of(of, inputs(of))
    assert not mask.diagonal().any()
    assert mask.sum(1).tolist() == [5] * N  # as in SiMo's released code
    drawn = (mask.sum(0) == N - 1).nonzero().flatten()  # by all but those whose own key it is
    assert len(drawn) == 5 and mask.any(0).sum() == 6  # and these take the same other one
    for n in range(N):
        assert mask[n, drawn].sum() == (4 if n in drawn else 5)


def test_more_negatives_than_there_are_means_all():
    assert mask_of(method(40, count=64), {}) is None
    of = method(count=N)
    assert mask_of(of, inputs(of)).sum() == N * (N - 1)


def test_the_factor_is_alpha_over_the_negatives_that_a_query_really_meets():
    of, views = method(alpha=30.0, count=3, momentum=0.0), images(2)
    given = inputs(of)
    step = of(views, given)
    query, keys = encoder()(views[0]), encoder()(views[1])
    mask = mask_of(of, given, keys)
    losses = []
    for n in range(N):
        negatives = keys[mask[n]]
        losses.append(info_nce(query[n : n + 1], keys[n : n + 1], negatives, temperature=0.2, alpha=30.0))
        assert len(negatives) == 3
    torch.testing.assert_close(step.loss, torch.stack(losses).mean())


def test_lots_are_uniform_and_the_same_for_rows_apart():
    """A draw by the lowest lots is fair only if they are; ranks must agree on the rows they have."""
    lot = torch.tensor(12345)
    whole = lots(lot, torch.arange(200), 500)
    assert torch.equal(lots(lot, torch.arange(100, 200), 500), whole[100:])
    assert whole.min() >= 0 and whole.max() < 2**62 and whole.unique().numel() == whole.numel()
    share = whole.double() / 2**62
    # 100,000 uniform numbers: the mean is within 5 deviations of 1/2, and so are the correlations with neighbours of 0
    assert abs(share.mean() - 0.5) < 5 / math.sqrt(12 * share.numel())
    for shifted in (share.roll(1, 0), share.roll(1, 1)):
        assert abs(((share - 0.5) * (shifted - 0.5)).mean() * 12) < 5 / math.sqrt(share.numel())


def test_jcl_with_one_key_is_moco():
    moco, jcl = method(20), method(20, keys=1, variance_weight=4.0)
    views = images(2)
    one, other = moco(views), jcl(views, inputs(jcl, epoch=9))
    assert torch.equal(one.loss, other.loss) and torch.equal(one.keep["keys"], other.keep["keys"])


@pytest.mark.parametrize("normalise", [False, True])
def test_jcl_is_the_closed_form_with_explicit_covariances_and_enqueues_the_mean(normalise):
    jcl = method(20, keys=3, variance_weight=4.0, normalise_mean=normalise, momentum=0.0)
    views = images(4)
    online = encoder()
    query = online(views[0]).double()
    # all keys are encoded in one batch, image by image
    keys = encoder()(torch.stack(views[1:], 1).flatten(0, 1)).detach().double().unflatten(0, (N, 3))
    mean = keys.mean(1)
    centred = keys - mean[:, None]
    covariance = torch.einsum("nmd,nme->nde", centred, centred) / 3
    positive = (query * mean).sum(1) / 0.2
    variance = torch.einsum("nd,nde,ne->n", query, covariance, query) / 0.2**2
    against = (query @ jcl.queue.keys.double().T / 0.2).logsumexp(1)
    expected = (torch.logaddexp(positive + 2.0 * variance, against) - positive).mean()
    step = jcl(views, inputs(jcl))
    assert step.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    found, wanted = gradients(jcl, step.loss), torch.autograd.grad(expected, list(online.parameters()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    entering = F.normalize(mean, dim=1) if normalise else mean
    torch.testing.assert_close(step.keep["keys"], entering.float(), rtol=1e-5, atol=1e-6)


def test_lambda_grows_to_its_full_value_over_the_run():
    jcl = method(20, keys=2, variance_weight=4.0, variance_ramp=True)
    assert [inputs(jcl, epoch=e)["variance_weight"].item() for e in (0, 4, 9)] == pytest.approx([0.4, 2.0, 4.0])
    assert inputs(method(20, keys=2, variance_weight=4.0))["variance_weight"] == 4.0


def test_vanilla_is_the_mean_of_moco_over_the_keys_in_both_its_forms():
    views = images(4)
    vanilla = method(20, keys=3, positives="each", momentum=0.0)
    step = vanilla(views)
    query, keys = vanilla.online(views[0]), keys_of(vanilla, views[1:], {})
    terms = [info_nce(query, keys[:, m], vanilla.queue.keys, temperature=0.2) for m in range(3)]
    torch.testing.assert_close(step.loss, torch.stack(terms).mean())
    repeated = method(20, keys=3, positives="repeated", momentum=0.0)
    torch.testing.assert_close(repeated(views).loss, step.loss)  # the batch norm of repeated images is the same


def test_keys_in_chunks_of_whole_groups_are_keys_at_once():
    views = images(5)
    at_once, in_chunks = method(20, groups=4, keys=4), method(20, groups=4, keys=4, chunks=2)
    given = inputs(at_once)
    torch.testing.assert_close(at_once(views, given).keep["keys"], in_chunks(views, given).keep["keys"])
    with pytest.raises(UsageError, match="key_chunks"):
        method(20, groups=4, keys=4, chunks=3)
    fields = {"method": "jcl", "data": "shapes", "batch_size": 16, "image_size": 16, "keys": 4, "bn_groups": 1}
    for chunks in (3, 64, 100):  # does not divide the 64 keys; one key a pass; none in some
        with pytest.raises(UsageError, match="must divide the 64 keys of a step, with at least 2 a pass"):
            build_learner(resolve(Layer("test", fields | {"key_chunks": chunks})).config)
    frozen, chunked = method(20, keys=4).eval(), method(20, keys=4, chunks=3).eval()
    torch.testing.assert_close(frozen(views).loss, chunked(views).loss)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_several_keys_come_back_in_their_own_order_after_the_shuffle(chunks):
    jcl, views = method(20, groups=4, keys=3, chunks=chunks).eval(), images(4)  # in eval the order cannot matter
    order = inputs(jcl)["order"]
    assert order.shape == (1, 3 * N) and order.unique().tolist() == list(range(3 * N))
    assert not torch.equal(order[0], torch.arange(3 * N)) and not torch.equal(order[0], torch.argsort(order[0]))
    keys = torch.stack([jcl.slow(view) for view in views[1:]], 1)
    torch.testing.assert_close(keys_of(jcl, views[1:], {"order": order}), keys)
    torch.testing.assert_close(keys_of(jcl, views[1:], {}), keys)


def test_statistics_are_of_the_keys_that_the_order_brings_together():
    jcl, views = method(20, groups=4, keys=3, chunks=2), images(4)
    order, plain = inputs(jcl)["order"], encoder()
    permuted = torch.stack(views[1:], 1).flatten(0, 1)[order[0]]
    expected = torch.empty(3 * N, D)
    expected[order[0]] = torch.cat([plain(group) for group in permuted.chunk(4)]).detach()
    torch.testing.assert_close(keys_of(jcl, views[1:], {"order": order}).flatten(0, 1), expected)


class Live(TorchDispatchMode):
    """The most bytes that were alive at once of what operations have made, beside the given tensors."""

    def __init__(self, given):
        super().__init__()
        self.given = {StorageWeakRef(tensor.untyped_storage()) for tensor in given}
        self.made, self.peak = {}, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[StorageWeakRef(storage)] = storage.nbytes()
        alive = (size for ref, size in self.made.items() if ref not in self.given and not ref.expired())
        self.peak = max(self.peak, sum(alive))
        return result


@pytest.mark.parametrize("shuffled", [True, False])
def test_keys_in_passes_are_encoded_without_a_copy_of_all_their_images(shuffled):
    jcl, views = method(20, groups=8 if shuffled else 1, keys=9, chunks=8), images(10)
    given = inputs(jcl)
    assert ("order" in given) == shuffled
    jcl.slow = nn.Sequential(nn.Flatten(), nn.Linear(108, D))  # its activations are small beside the images
    all_images = 9 * N * 108 * 4
    with torch.no_grad(), Live(views) as live:
        keys_of(jcl, views[1:], given)
    assert all_images / 8 <= live.peak < all_images / 3


@pytest.mark.parametrize(("keys", "passes"), [(1, 1), (2, 2), (3, 4), (5, 8), (7, 8), (9, 8)])
def test_a_pass_of_keys_is_whole_groups_and_where_they_allow_it_no_more_than_one_key(keys, passes):
    fields = {"method": "jcl", "data": "shapes", "batch_size": 16, "image_size": 16, "queue_size": 32, "keys": keys}
    built = build_learner(resolve(Layer("test", fields | {"bn_groups": 8})).config)
    assert built.key_encoder.chunks == passes and set(groups_of(built.slow)) == {8 // passes}
    assert set(groups_of(built.online)) == {8}
    assert build_learner(resolve(Layer("test", fields | {"bn_groups": 1})).config).key_encoder.chunks == 1


def test_telemetry_is_the_papers():
    """EqCo Fig. 1 and 2, for unit vectors given by hand: bound, gradient and Theorem 2's bound."""
    of = method(20, alpha=70.0)
    query, key = F.normalize(torch.randn(N, D), dim=1), F.normalize(torch.randn(N, D), dim=1)
    negatives = of.queue.keys
    compared = Comparison(query, key[:, None], negatives, None, torch.arange(N))
    health = signs_of_health(compared, temperature=0.2, alpha=70.0)
    q = query.double().requires_grad_()
    loss = info_nce(q, key.double(), negatives.double(), temperature=0.2, alpha=70.0, reduction="none")
    (gradient,) = torch.autograd.grad(loss.sum(), q)
    norms = gradient.norm(dim=1)
    assert health["mutual_information_bound"] == pytest.approx(math.log(71) - loss.mean().item(), rel=1e-5)
    assert health["gradient_norm"] == pytest.approx(norms.mean().item(), rel=1e-5)
    assert health["gradient_norm_deviation"] == pytest.approx(norms.std(correction=0).item(), rel=1e-4)
    s0, s = ((query * key).sum(1) / 0.2).double().exp(), (query @ negatives.T / 0.2).double().exp().mean(1)
    assert health["gradient_norm_bound"] == pytest.approx((10 * (1 - s0 / (s0 + 70 * s))).mean().item(), rel=1e-5)
    assert health["log_k"] == pytest.approx(math.log(71))
    plain = method(20, mixing=Mixing(hardest=8, pairs=6, with_query=3))
    mixes = plain(images(2), inputs(plain)).health
    assert mixes["log_k"] == pytest.approx(math.log(1 + 20 + 6 + 3))  # all that the loss is over
    assert health["gradient_norm"] < health["gradient_norm_bound"]


def test_mochi_that_mixes_nothing_is_moco():
    views, moco, mochi = images(2), method(20), method(20, mixing=Mixing(hardest=8, pairs=0, with_query=0))
    assert torch.equal(moco(views).loss, mochi(views, inputs(mochi)).loss)


@pytest.mark.parametrize("source", ["queue", "batch"])
def test_mochi_is_moco_with_explicit_synthetic_negatives(source, monkeypatch):
    """The vectors of Eq. 4 and 5 of the paper, built, normalised and appended to each query's negatives."""
    queue_size = 20 if source == "queue" else None
    mochi, views = method(queue_size, mixing=Mixing(hardest=6, pairs=4, with_query=3), alpha=50.0), images(2)
    given = inputs(mochi)
    (comparison,), _ = mochi.compare(mochi.queries(views), mochi.slow_keys(views, given), given)
    made = []
    monkeypatch.setattr(contrastive, "synthesise", lambda *of, **how: made.append(synthesise(*of, **how)) or made[-1])
    found = mochi(views, given).loss
    ((_, _, parents),) = made
    query, key, n = comparison.query, comparison.keys[:, 0], comparison.negatives
    pairs = F.normalize(parents.a[..., None] * n[parents.first] + (1 - parents.a[..., None]) * n[parents.second], dim=2)
    b = parents.b[..., None]
    with_query = F.normalize(b * query.detach()[:, None] + (1 - b) * n[parents.partner], dim=2)
    losses = []
    for i in range(N):
        real = n if comparison.mask is None else n[comparison.mask[i]]
        own = torch.cat([real, pairs[i], with_query[i]])
        losses.append(info_nce(query[i : i + 1], key[i : i + 1], own, temperature=0.2, alpha=50.0))
    torch.testing.assert_close(found, torch.stack(losses).mean(), rtol=1e-4, atol=1e-5)


def test_nothing_is_mixed_before_the_warm_up_is_over():
    mochi = method(20, mixing=Mixing(hardest=6, pairs=4, with_query=3), mixing_warmup=3)
    assert ["mixing_seed" in inputs(mochi, epoch=epoch) for epoch in range(5)] == [False] * 3 + [True] * 2
    assert mochi.phase(Moment(0, 10, 2, 10)) != mochi.phase(Moment(0, 10, 3, 10))
    views = images(2)
    assert torch.equal(mochi(views, inputs(mochi)).loss, method(20)(views).loss)


def test_mochi_says_how_hard_its_negatives_are():
    mochi = method(20, mixing=Mixing(hardest=6, pairs=4, with_query=3))
    health = mochi(images(2), inputs(mochi)).health
    assert health["highest_negative"] > 0 and health["accuracy_among_synthetic"] <= health["contrastive_accuracy"]
    assert "highest_pair" in health and "highest_with_query" in health


@pytest.mark.parametrize("source", ["queue", "batch"])
def test_the_oracle_lets_no_negative_of_the_same_class_count(source):
    classes = torch.tensor([0, 0, 1, 1, 2, 2, 0, 1])
    of = method(20 if source == "queue" else None, momentum=0.0, oracle=True)
    views = images(2)
    step = of(views, {"labels": classes})
    of.finish(step)
    (comparison,), _ = of.compare(of.queries(views), of.slow_keys(views, {"labels": classes}), {"labels": classes})
    held = of.queue.labels if source == "queue" else classes
    assert torch.equal(comparison.mask, held != classes[:, None])
    if source == "queue":
        assert held[:N].tolist() == classes.tolist() and (held[N:] == -1).all()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"method": "simo", "both_views": True}, "both_views: it is for key_encoder online"),
        ({"method": "moco-v2", "both_views": True}, "both_views: it is for key_encoder online"),
        ({"method": "mochi", "negatives": 1}, "pairs: a pair is of two negatives, and negatives is 1"),
        ({"method": "mochi", "hardest": 1}, "pairs: a pair is of two negatives, and hardest is 1"),
        ({"method": "moco-v2", "batch_size": 100, "bn_groups": 8}, "use batch_size 96, or bn_groups 4"),
        ({"method": "byol", "joint_statistics": True, "bn_groups": 2}, "joint_statistics: the views share one group"),
    ],
)
def test_what_would_not_be_what_it_says_is_refused(fields, reason):
    with pytest.raises(UsageError, match=reason):
        resolve(Layer("test", {"data": "cifar10", **fields}))


def test_forces_are_in_the_loss_that_is_checked_and_trained():
    of, views = method(40, dispersion=Dispersion(singular_weight=1.0)), images(2)
    step = of(views, inputs(of))
    torch.testing.assert_close(step.health["total_loss"], step.health["loss"] + step.health["singular_loss"])
    assert torch.equal(step.health["total_loss"], step.loss.detach())
    assert "total_loss" not in method(40)(views, inputs(method(40))).health
