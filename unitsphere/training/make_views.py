"""The views of a step, by the configured policy or by the user's own function."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor

from unitsphere.common.devices import send
from unitsphere.common.errors import UsageError
from unitsphere.common.randomness import generator, stream
from unitsphere.config.config import Config
from unitsphere.config.images import policies
from unitsphere.data.loader import Loader
from unitsphere.images.canvas import Canvas
from unitsphere.views.apply import apply, render
from unitsphere.views.draw import draw

CustomView = Callable[[Tensor], Tensor]  # one image (C, H, W) uint8 -> one view (C, S, S) float


class MakeViews(Protocol):
    """Some views (N, C, S, S) of each image. purpose and number decide the randomness; it is drawn for `ranks` batches
    of this size, of which this is number `rank`, so that ranks together see what one would."""

    def __call__(self, canvas: Canvas, purpose: str, number: int, rank: int = 0, ranks: int = 1) -> list[Tensor]: ...


def make_views_of(config: Config, count: int, custom: CustomView | None, compiled: bool = False) -> MakeViews:
    """A function that makes `count` views of each image; purpose and number decide the randomness."""
    return custom_views(config, count, custom) if custom else standard_views(config, count, compiled)


def standard_views(config: Config, count: int, compiled: bool) -> MakeViews:
    rules = policies(config)
    plain = torch.compile(render, dynamic=False) if compiled else render
    assert config.mean is not None and config.std is not None
    size, mean, std = config.image_size, config.mean, config.std

    def make(canvas: Canvas, purpose: str, number: int, rank: int = 0, ranks: int = 1) -> list[Tensor]:
        n = len(canvas)
        chances = (generator(config.seed, purpose, number, view) for view in range(count))
        drawn = (draw(rule, ranks * n, chance) for rule, chance in zip(cycle(rules), chances, strict=False))
        tables = (table.slice(rank * n, (rank + 1) * n) for table in drawn)
        return [apply(canvas, table, size=size, mean=mean, std=std, plain=plain) for table in tables]

    return make


def custom_views(config: Config, count: int, view: CustomView) -> MakeViews:
    """The user's function draws from torch's global generator, which is seeded for it and put back after."""

    def make(canvas: Canvas, purpose: str, number: int, rank: int = 0, ranks: int = 1) -> list[Tensor]:
        here = canvas if canvas.pixels.is_cpu else canvas.compact().to("cpu")  # one copy, not one for each image
        images = [torch.from_numpy(here.image(n)).permute(2, 0, 1) for n in range(len(here))]
        first = rank * len(canvas)

        def seen(which: int, place: int, image: Tensor) -> Tensor:
            torch.manual_seed(stream(config.seed, purpose, number, which, first + place))
            return checked(view(image.clone()), config)  # what it does to it must not reach the data

        with torch.random.fork_rng(devices=[]):
            views = [[seen(which, n, image) for n, image in enumerate(images)] for which in range(count)]
        return [send(torch.stack(each), canvas.device) for each in views]

    return make


def checked(view: Tensor, config: Config) -> Tensor:
    """What the user's function gave, if it is a view."""
    wanted = (config.channels, config.image_size, config.image_size)
    if not isinstance(view, Tensor) or not view.is_floating_point() or tuple(view.shape) != wanted:
        what = f"{tuple(view.shape)} {view.dtype}" if isinstance(view, Tensor) else type(view).__name__
        raise UsageError(
            f"views: the function must turn an image (C, H, W) uint8 into a floating-point tensor {wanted}, of size "
            f"image_size; it gave {what}."
        )
    return view


def try_view(view: CustomView, loader: Loader, config: Config) -> None:
    """Refuse a function that gives no views before anything is written."""
    for _, canvas in loader.batches([torch.arange(1)]):
        custom_views(config, 1, view)(canvas, "trial", 0)
