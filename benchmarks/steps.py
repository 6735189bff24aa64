"""The training step alone, views already on the device: antipode's forms beside official-style code."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from antipode.config.resolve import Config, Layer, resolve
from antipode.devices import pick_precision
from antipode.methods.build import build_method
from antipode.methods.contrastive import Contrastive
from antipode.methods.method import Moment
from antipode.modules.queue import KeyQueue
from antipode.randomness import generator
from antipode.training.optimisers import build_optimizer
from antipode.training.step import PlainStep, RecordedStep, TakeStep
from benchmarks.measuring import Results, Row, milliseconds
from benchmarks.peers.official import OfficialMoCo, OfficialStep

BATCHES = 3  # that take turns, and whose losses are kept
NETWORKS = {
    "resnet50": {"data": "imagenet"},  # 224, batch 256, queue 65536, mlp head: the method's and the recipe's own
    "resnet18": {"data": "cifar10"},  # small stem, 32, batch 512, queue 4096, linear head
}
TINY = {"backbone": "resnet-tiny", "image_size": 16, "batch_size": 16, "queue_size": 64}

Take = Callable[[int], Any]  # number of the step -> its loss


def settings(network: str, tiny: bool, **fields: Any) -> Config:
    given = {"method": "moco-v2", **NETWORKS[network], **(TINY if tiny else {}), **fields}
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
            name = f"antipode {form}, {'no BN groups' if groups == 1 else f'{groups} BN groups'}"
            results.add(section, name, partial(time_antipode, config, device, compiled, recorded))


def sweep(results: Results, tiny: bool) -> None:
    """How images/s change with the batch and with the queue. Each batch size would be compiled anew, which takes longer
    than measuring it: there the step is recorded only. The networks do not see the queue: compiled once for all."""
    device = results.device
    form = "recorded" if device.type == "cuda" else "plain"
    queue = settings("resnet18", tiny).queue_size
    results.section("batch", f"antipode, resnet18, queue {queue}, no BN groups, {form}")
    for size in (16, 32) if tiny else (128, 256, 512, 1024, 2048):
        config = settings("resnet18", tiny, bn_groups=1, batch_size=size)
        results.add("batch", str(size), partial(time_antipode, config, device, False, device.type == "cuda"))
    form = "compiled and recorded" if device.type == "cuda" else "plain"
    config = settings("resnet18", tiny, bn_groups=1)
    results.section("queue", f"antipode, resnet18, batch {config.batch_size}, no BN groups, {form}")
    method = cache(partial(on_device, config, device, compiled=device.type == "cuda"))
    for size in (64, 256) if tiny else (4096, 16384, 65536, 262144):
        results.add("queue", str(size), partial(time_queue, config, device, method, size))


def time_official(config: Config, device: torch.device, amp: bool) -> Row:
    views = random_views(config, device)

    def build() -> Take:
        ours = build_method(config)
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


def time_antipode(config: Config, device: torch.device, compiled: bool, recorded: bool) -> Row:
    return timed(lambda: antipode_step(on_device(config, device, compiled), config, recorded), config, device)


def time_queue(config: Config, device: torch.device, shared: Callable[[], Contrastive], size: int) -> Row:
    """One method for all sizes of the queue."""

    def build() -> Take:
        method = shared()
        method.queue = KeyQueue(size, config.dim, generator=generator(0, "queue")).to(device)
        return antipode_step(method, config, recorded=device.type == "cuda")

    return timed(build, config, device)


def on_device(config: Config, device: torch.device, compiled: bool) -> Contrastive:
    method = build_method(config).to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if compiled:
        torch._dynamo.reset()
        for network in method.networks:
            network.compile(dynamic=False)
    return method


def antipode_step(method: Contrastive, config: Config, recorded: bool) -> Take:
    device = method.queue.keys.device
    views = [
        [view.contiguous(memory_format=torch.channels_last) for view in pair] for pair in random_views(config, device)
    ]
    start = Moment(0, 1, 0, 1)
    drawn = [method.inputs(config.batch_size, start, generator(0, "step", number)) for number in range(BATCHES)]
    inputs = [(pair, {k: v.to(device) for k, v in given.items()}) for pair, given in zip(views, drawn, strict=True)]
    precision = pick_precision("auto", device)
    take: TakeStep = PlainStep(method, build_optimizer(config, method), precision=precision)
    if recorded:
        take = RecordedStep(take, *inputs[0])
    return lambda number: take(*inputs[number % BATCHES], config.learning_rate).loss.detach()


def random_views(config: Config, device: torch.device) -> list[list[Tensor]]:
    """For each of a few batches two views (N, C, S, S): the same ones for all contenders."""
    shape = (config.batch_size, config.channels, config.image_size, config.image_size)
    random = torch.Generator(device).manual_seed(0)
    return [[torch.randn(shape, generator=random, device=device) for _ in range(2)] for _ in range(BATCHES)]


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
