"""The views of a step, by the configured policy or by the user's own function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from antipode.config.resolve import Config, policy
from antipode.data.canvas import Canvas
from antipode.randomness import generator, stream
from antipode.views.apply import apply, render
from antipode.views.draw import draw

CustomView = Callable[[Tensor], Tensor]  # one image (C, H, W) uint8 -> one view (C, S, S) float
MakeViews = Callable[[Canvas, str, int], list[Tensor]]  # (canvas, purpose, number) -> views (N, C, S, S)


def make_views_of(config: Config, count: int, custom: CustomView | None, compiled: bool = False) -> MakeViews:
    """A function that makes `count` views of each image; purpose and number decide the randomness."""
    return custom_views(config, count, custom) if custom else standard_views(config, count, compiled)


def standard_views(config: Config, count: int, compiled: bool) -> MakeViews:
    rules = policy(config)
    plain = torch.compile(render, dynamic=False) if compiled else render
    assert config.mean is not None and config.std is not None
    size, mean, std = config.image_size, config.mean, config.std

    def make(canvas: Canvas, purpose: str, number: int) -> list[Tensor]:
        tables = (draw(rules, len(canvas), generator(config.seed, purpose, number, view)) for view in range(count))
        return [apply(canvas, table, size=size, mean=mean, std=std, plain=plain) for table in tables]

    return make


def custom_views(config: Config, count: int, view: CustomView) -> MakeViews:
    """The user's function draws from torch's global generator, which is seeded for it and put back after."""

    def make(canvas: Canvas, purpose: str, number: int) -> list[Tensor]:
        images = [torch.from_numpy(canvas.image(n)).permute(2, 0, 1) for n in range(len(canvas))]
        batches = []
        with torch.random.fork_rng(devices=[]):
            for which in range(count):
                torch.manual_seed(stream(config.seed, purpose, number, which))
                # Each call gets a copy of its own: what it does to it must not reach the data.
                batches.append(torch.stack([view(image.clone()) for image in images]).to(canvas.device))
        return batches

    return make
