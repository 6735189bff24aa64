"""MoCo's step against the algorithm written out by hand."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from unitsphere.methods.learners.contrastive import ContrastiveLearner, LossSettings
from unitsphere.methods.learners.health import signs_of_health
from unitsphere.methods.learners.key_encoder import KeyEncoder
from unitsphere.methods.learners.learner import Moment
from unitsphere.methods.learners.negatives import Comparison, NegativeSource
from unitsphere.modules.encoder import Encoder
from unitsphere.modules.norms import part_batch_norms
from unitsphere.modules.queue import KeyQueue


def encoder(seed=0):
    torch.manual_seed(seed)
    backbone = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Encoder(backbone, nn.Linear(6, 8))


def moco(queue_size=20, bn_groups=1, symmetric=False, at_once=False):
    network = encoder()
    part_batch_norms(network, bn_groups, batches=1 + at_once)
    queue = KeyQueue(queue_size, 8, generator=torch.Generator().manual_seed(1))
    loss = LossSettings(0.2, symmetric=symmetric)
    keys = KeyEncoder(0.9, shuffles=bn_groups > 1, at_once=at_once)
    return ContrastiveLearner(network, loss, keys, NegativeSource(), queue)


def keys_of(method, images, order):
    """By a slow copy that follows itself, so that it stays."""
    return method.key_encoder(method.slow, method.slow, [[images]], {"order": order[None]})[0]


def batches(count, n=8):
    generator = torch.Generator().manual_seed(2)
    return [[torch.randn(n, 3, 6, 6, generator=generator) for _ in range(2)] for _ in range(count)]


def by_hand(queue, symmetric, data, steps_lr=0.1):
    """Algorithm 1 of MoCo: plain tensors, a list as queue, cross-entropy over explicit logits."""
    online = encoder()
    slow = copy.deepcopy(online)
    optimizer = torch.optim.SGD(online.parameters(), lr=steps_lr, momentum=0.9, weight_decay=1e-4)
    queue = [key.clone() for key in queue]
    place, losses = 0, []
    for first, second in data:
        directions = [(first, second), (second, first)] if symmetric else [(first, second)]
        queries = [online(q) for q, _ in directions]
        with torch.no_grad():
            for s, o in zip(slow.parameters(), online.parameters(), strict=True):
                s.copy_(0.9 * s + 0.1 * o)
            keys = [slow(k) for _, k in directions]
        negatives = torch.stack(queue)
        total = 0
        for q, k in zip(queries, keys, strict=True):
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ negatives.T], 1) / 0.2
            total = total + F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        for key in torch.cat(keys):
            queue[place % len(queue)] = key
            place += 1
        losses.append(total.item())
    return losses, online, slow, torch.stack(queue)


@pytest.mark.parametrize("symmetric", [False, True])
def test_several_steps_equal_the_algorithm_written_out(symmetric):
    method = moco(symmetric=symmetric)
    data = batches(6)
    expected, online, slow, queue = by_hand(method.queue.keys, symmetric, data)
    optimizer = torch.optim.SGD(method.online.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    losses = []
    for views in data:
        step = method(views)
        optimizer.zero_grad()
        step.loss.backward()
        optimizer.step()
        method.finish(step)
        losses.append(step.loss.item())
    # float32: the two sum in other orders
    assert losses == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(method.queue.keys, queue, rtol=1e-4, atol=1e-5)
    for ours, theirs in ((method.online, online), (method.slow, slow)):
        for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_both_directions_in_one_pass_are_the_two_one_by_one():
    views, given = batches(1)[0], inputs(moco(bn_groups=4, symmetric=True))
    found = []
    for at_once in (False, True):
        method = moco(bn_groups=4, symmetric=True, at_once=at_once)
        step = method(views, given)
        step.loss.backward()
        found.append([step.loss.detach(), step.keep["keys"], *[p.grad for p in method.online.parameters()]])
    for apart, at_once in zip(*found, strict=True):
        torch.testing.assert_close(apart, at_once, rtol=1e-4, atol=1e-6)


def test_the_positive_is_never_among_the_negatives():
    """A queue of zeros gives every negative the score 0: the loss then has a closed form, and only if the
    keys of this batch have not entered the queue before the scores are taken."""
    method = moco()
    method.queue.keys.zero_()
    first, second = batches(1)[0]
    step = method([first, second])
    positive = (step.embedding * step.keep["keys"]).sum(1) / 0.2
    expected = torch.log(positive.exp() + 20).sub(positive).mean()
    torch.testing.assert_close(step.loss.detach(), expected, rtol=1e-5, atol=1e-6)
    method.finish(step)
    assert torch.equal(method.queue.keys[:8], step.keep["keys"])


def test_only_the_query_takes_a_gradient():
    method = moco()
    method(batches(1)[0]).loss.backward()
    assert all(p.grad is not None for p in method.online.parameters())
    assert all(p.grad is None and not p.requires_grad for p in method.slow.parameters())


def test_keys_come_back_in_their_own_order_after_the_shuffle():
    method = moco(bn_groups=4)
    method.eval()  # running statistics: the order cannot matter, so a wrong un-shuffle would show
    images = batches(1)[0][0]
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(keys_of(method, images, order)[:, 0], method.slow(images))


def test_with_groups_the_order_decides_which_keys_share_statistics():
    method = moco(bn_groups=4)
    images = batches(1)[0][0]
    orders = [inputs(method, seed)["order"][0] for seed in (3, 3, 4)]
    one, same, other = (keys_of(method, images, order) for order in orders)
    assert torch.equal(one, same) and not torch.allclose(one, other)
    assert "order" not in inputs(moco(bn_groups=1))
    assert inputs(moco(bn_groups=4, symmetric=True))["order"].shape == (2, 8)


def inputs(method, seed=0):
    return method.inputs(8, Moment(0, 10, 0, 1), torch.Generator().manual_seed(seed))


def test_health_is_what_it_says():
    method = moco(queue_size=4)
    queries = F.normalize(torch.randn(8, 8), dim=1)
    method.queue.keys.copy_(-queries[:4])
    compared = Comparison(queries, queries[:, None], method.queue.keys, None, torch.arange(8))
    health = signs_of_health(compared, temperature=0.2)
    assert health["positive_similarity"] == pytest.approx(1.0, abs=1e-6)
    assert health["contrastive_accuracy"] == 1.0
    assert health["negative_similarity"] == pytest.approx((queries @ -queries[:4].T).mean().item(), abs=1e-6)
    assert health["log_k"] == pytest.approx(math.log(5))
