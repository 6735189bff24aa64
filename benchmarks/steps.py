"""The training step alone, views already on the device: unitsphere's forms beside official-style code."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measuring import Results, Row, milliseconds
from benchmarks.peers.official import OfficialMoCo, OfficialStep
from unitsphere.common.devices import pick_precision
from unitsphere.common.randomness import generator
from unitsphere.config.config import Config
from unitsphere.config.layers import Layer
from unitsphere.methods.build import build_learner
from unitsphere.methods.catalogue import find_method
from unitsphere.methods.learners.learner import Learner, Moment
from unitsphere.methods.resolve import resolve
from unitsphere.modules.queue import KeyQueue
from unitsphere.optimisation.optimisers import build_optimizer
from unitsphere.training.step import PlainStep, RecordedStep, TakeStep, compile_networks

BATCHES = 3  # that take turns, and whose losses are kept
NETWORKS = {
    "resnet50": {"data": "imagenet"},  # 224, batch 256, queue 65536, mlp head: the method's and the recipe's own
    "resnet18": {"data": "cifar10"},  # small stem, 32, batch 512, queue 4096, linear head
}
TINY = {"backbone": "resnet-tiny", "image_size": 16, "batch_size": 16, "queue_size": 64}

Take = Callable[[int], Any]  # number of the step -> its loss


def settings(network: str, tiny: bool, **fields: Any) -> Config:
    given = {"method": "moco-v2", **NETWORKS[network], **(TINY if tiny else {}), **fields}
    if find_method(given["method"], None).family != "contrastive":
        given.pop("queue_size", None)
    return resolve(Layer("benchmark", given)).config


def compare_steps(results: Results, network: str, tiny: bool) -> None:
    """Every contender on one network, from equal weights, with equal views and an equal queue."""
    section, device = f"step {network}", results.device
    config = settings(network, tiny)
    results.section(
        section,
        f"MoCo v2, one direction, {config.backbone}, {config.image_size}x{config.image_size}, batch "
        f"{config.batch_size}, queue {config.queue_size}, views on the device",
    )
    cuda = device.type == "cuda"
    plain = settings(network, tiny, bn_groups=1)
    for name, amp in (("official-style float32", False), ("official-style AMP", True)):
        if cuda or not amp:
            results.add(section, name, partial(time_official, plain, device, amp))
    forms = [("plain", False, False), ("recorded", False, True), ("compiled and recorded", True, True)]
    for form, compiled, recorded in forms if cuda else forms[:1]:
        for groups in (1, 8):
            config = settings(network, tiny, bn_groups=groups)
            name = f"unitsphere {form}, {'no BN groups' if groups == 1 else f'{groups} BN groups'}"
            results.add(section, name, partial(time_unitsphere, config, device, compiled, recorded))


def sweep(results: Results, tiny: bool) -> None:
    """How images/s change with the batch and with the queue. Each batch size would be compiled anew, which takes longer
    than measuring it: there the step is recorded only. The networks do not see the queue: compiled once for all."""
    device = results.device
    form = "recorded" if device.type == "cuda" else "plain"
    queue = settings("resnet18", tiny).queue_size
    results.section("batch", f"unitsphere, resnet18, queue {queue}, no BN groups, {form}")
    for size in (16, 32) if tiny else (128, 256, 512, 1024, 2048):
        config = settings("resnet18", tiny, bn_groups=1, batch_size=size)
        results.add("batch", str(size), partial(time_unitsphere, config, device, False, device.type == "cuda"))
    form = "compiled and recorded" if device.type == "cuda" else "plain"
    config = settings("resnet18", tiny, bn_groups=1)
    results.section("queue", f"unitsphere, resnet18, batch {config.batch_size}, no BN groups, {form}")
    method = cache(partial(on_device, config, device, compiled=device.type == "cuda"))
    for size in (64, 256) if tiny else (4096, 16384, 65536, 262144):
        results.add("queue", str(size), partial(time_queue, config, device, method, size))


def sweep_views(results: Results, tiny: bool) -> None:
    """How images/s (each counted once) change with the keys of JCL and with the views of MSBReg: recorded only, since
    each number would be compiled anew."""
    device = results.device
    recorded = device.type == "cuda"
    form = "recorded" if recorded else "plain"
    for section, method, field, numbers in (
        ("keys", "jcl", "keys", (1, 2, 5, 9)),
        ("views", "msbreg", "view_count", (2, 4, 8)),
    ):
        fields: dict[str, Any] = {"method": method, "bn_groups": 1}
        results.section(section, f"unitsphere, resnet18, {method}, no BN groups, {form}")
        for number in numbers[:2] if tiny else numbers:
            config = settings("resnet18", tiny, **fields, **{field: number})
            results.add(section, str(number), partial(time_unitsphere, config, device, False, recorded))


def compare_methods(results: Results, tiny: bool) -> None:
    """What the methods' own parts cost beside the baseline that each is built on, the first row. What is compared by
    its time is measured twice, in turn: the second round tells what a difference means."""
    mixed = {"mixing_warmup": 0, **({"hardest": 32, "pairs": 32, "with_query": 4} if tiny else {})}
    byol = {"method": "msbreg", "lr_per_view": False, "optimizer": "sgd", "singular_weight": 0, "brownian_weight": 0}
    byol |= {} if tiny else {"batch_size": 256}
    contrastive = {"bn_groups": 1, **({} if tiny else {"batch_size": 256})}
    forces = {"singular_weight": 0.004, "brownian_weight": 0.5}
    groups = {"bn_groups": 8}
    parts: list[tuple[str, str, bool, int, dict[str, dict[str, Any]]]] = [  # name, network, compiled, rounds, rows
        ("mixing", "resnet50", True, 2, {
            "MoCo v2": {"bn_groups": 1},
            "MoCHi (1024, 1024, 128)": {"method": "mochi", "bn_groups": 1, **mixed},
        }),
        ("keys", "resnet50", False, 1, {
            "MoCo v2": groups,
            "JCL, 9 keys": {"method": "jcl", "keys": 9, "variance_weight": 4.0, **groups},
            "vanilla, 9 keys": {"method": "jcl-vanilla", "keys": 9, **groups},
            "vanilla as a larger batch, 9 keys": {
                "method": "jcl-vanilla", "positives": "repeated", "keys": 9, **groups,
            },
        }),
        *((f"forces on {views} views", network, compiled, 2, {
            "without": {**byol, "view_count": views},
            "L_b and L_s": {**byol, "view_count": views, **forces},
            "L_b, L_s and uniformity": {**byol, "view_count": views, **forces, "uniformity_weight": 1.0},
        }) for network, views, compiled in (("resnet50", 2, False), ("resnet18", 2, True), ("resnet18", 4, False))),
        *((f"forces on {method}", "resnet18", True, 2, {
            "without": {**contrastive, "method": method},
            "L_b and L_s": {**contrastive, "method": method, **forces},
        }) for method in ("moco-v2", "simclr")),
    ]  # fmt: skip
    device = results.device
    cuda = device.type == "cuda"
    for part, network, compiled, rounds, rows in parts:
        section = f"methods: {part}, {network}"
        config = settings(network, tiny, **next(iter(rows.values())))
        form = "" if not cuda else ", compiled and recorded" if compiled else ", recorded"
        results.section(section, f"{config.image_size}x{config.image_size}, batch {config.batch_size}{form}")
        for number in range(rounds):
            for name, fields in rows.items():
                config = settings(network, tiny, **fields)
                row = partial(time_unitsphere, config, device, cuda and compiled, cuda)
                results.add(section, name + " again" * number, row)


def time_official(config: Config, device: torch.device, amp: bool) -> Row:
    views = random_views(config, device)

    def build() -> Take:
        ours = build_learner(config)
        encoder = nn.Sequential(ours.online.backbone, ours.online.head)
        model = OfficialMoCo(encoder, ours.queue.keys, momentum=config.key_momentum, temperature=config.temperature).to(
            device
        )
        step = OfficialStep(
            model, lr=config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay, amp=amp
        )
        return lambda number: step(views[number % BATCHES])

    torch.backends.cudnn.benchmark = True  # that code sets it
    try:
        return timed(build, config, device)
    finally:
        torch.backends.cudnn.benchmark = False


def time_unitsphere(config: Config, device: torch.device, compiled: bool, recorded: bool) -> Row:
    """views_mib: what the views take that wait for their turn; a recorded step has another place for its own."""
    method = cache(partial(on_device, config, device, compiled))
    row = timed(lambda: unitsphere_step(method(), config, device, recorded), config, device)
    views = method().views * config.batch_size * config.channels * config.image_size**2 * 4
    return row | {"views_mib": round((BATCHES + recorded) * views / 2**20)}


def time_queue(config: Config, device: torch.device, shared: Callable[[], Learner], size: int) -> Row:
    """One method for all sizes of the queue."""

    def build() -> Take:
        method = shared()
        method.queue = KeyQueue(size, config.dim, generator=generator(0, "queue")).to(device)
        return unitsphere_step(method, config, device, recorded=device.type == "cuda")

    return timed(build, config, device)


def on_device(config: Config, device: torch.device, compiled: bool) -> Learner:
    method = build_learner(config).to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if compiled:
        compile_networks(method)
    return method


def unitsphere_step(method: Learner, config: Config, device: torch.device, recorded: bool) -> Take:
    views = [
        [view.contiguous(memory_format=torch.channels_last) for view in views_of_one]
        for views_of_one in random_views(config, device, method.views)
    ]
    start = Moment(0, 1, 0, 1)
    drawn = [method.inputs(config.batch_size, start, generator(0, "step", number)) for number in range(BATCHES)]
    inputs = [(pair, {k: v.to(device) for k, v in given.items()}) for pair, given in zip(views, drawn, strict=True)]
    precision = pick_precision("auto", device)
    take: TakeStep = PlainStep(method, build_optimizer(config, method), precision=precision)
    if recorded:
        take = RecordedStep(take, *inputs[0])
    return lambda number: take(*inputs[number % BATCHES], config.learning_rate).loss.detach()


def random_views(config: Config, device: torch.device, count: int = 2) -> list[list[Tensor]]:
    """For each of a few batches some views (N, C, S, S): the same ones for all contenders."""
    shape = (config.batch_size, config.channels, config.image_size, config.image_size)
    random = torch.Generator(device).manual_seed(0)
    return [[torch.randn(shape, generator=random, device=device) for _ in range(count)] for _ in range(BATCHES)]


def timed(build: Callable[[], Take], config: Config, device: torch.device) -> Row:
    """Build, take the first steps, then time the others."""
    started = time.perf_counter()
    take = build()
    losses = [round(float(take(number)), 5) for number in range(BATCHES)]
    to_start = time.perf_counter() - started
    numbers = itertools.count(BATCHES)
    ms = milliseconds(lambda: take(next(numbers)), device)
    return {
        "ms": round(ms, 3),
        "images_per_second": round(1e3 * config.batch_size / ms),
        "seconds_to_start": round(to_start, 1),
        "first_losses": losses,
    }
