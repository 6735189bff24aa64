"""All views of a step, by policies or by the user's own function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from unitsphere.common.devices import one_thread, send
from unitsphere.common.errors import UsageError
from unitsphere.common.randomness import generator, stream
from unitsphere.images.canvas import Canvas
from unitsphere.views.apply import parameters, render_views
from unitsphere.views.draw import draw
from unitsphere.views.policies import Policy
from unitsphere.views.render import Frame, render

CustomView = Callable[[Tensor], Tensor]  # one image (C, H, W) uint8 -> one view (C, S, S) float


class MakeViews(Protocol):
    """Makes some views (N, C, S, S) of each image. `purpose` and `number` decide the randomness. It is drawn for
    `ranks` batches of this size, of which this is number `rank`: ranks together see what one would."""

    def __call__(self, canvas: Canvas, purpose: str, number: int, rank: int = 0, ranks: int = 1) -> list[Tensor]: ...


def standard_views(
    policies: Sequence[Policy],
    count: int,
    *,
    size: int,
    mean: Sequence[float],
    std: Sequence[float],
    seed: int,
    compiled: bool = False,
) -> MakeViews:
    """Return a function that makes `count` views of each image.

    policies: of the first view, the second ...; where there are more views than policies, they take turns.
    mean, std: per channel, of pixels in [0, 1]. compiled: whether torch.compile is to make the plain form faster.
    """
    plain = torch.compile(render, dynamic=False) if compiled else render
    of_view = [policies[view % len(policies)] for view in range(count)]

    def make(canvas: Canvas, purpose: str, number: int, rank: int = 0, ranks: int = 1) -> list[Tensor]:
        n = len(canvas.offsets)
        with one_thread():
            # The rows of all ranks are drawn, and those of this one are taken.
            chances = [generator(seed, purpose, number, view) for view in range(count)]
            tables = [draw(policy, ranks * n, chance) for policy, chance in zip(of_view, chances, strict=True)]
            tables = [table.slice(rank * n, (rank + 1) * n) for table in tables]
            numbers = [parameters(canvas, table, size) for table in tables]
        frames = [Frame(policy, size, 0, 0, canvas.full_scale, tuple(mean), tuple(std)) for policy in of_view]
        return render_views(canvas, numbers, frames, plain)

    return make


def custom_views(view: CustomView, count: int, *, size: int, channels: int, seed: int) -> MakeViews:
    """Return a function that makes `count` views of each image by the user's function.

    That draws from torch's global generator, which is seeded for it and put back after.
    """
    wanted = (channels, size, size)

    def make(canvas: Canvas, purpose: str, number: int, rank: int = 0, ranks: int = 1) -> list[Tensor]:
        here = canvas if canvas.pixels.is_cpu else canvas.compact().to("cpu")  # one copy, not one for each image
        images = [torch.from_numpy(here.image(n)).permute(2, 0, 1) for n in range(len(here))]
        views = []
        with torch.random.fork_rng(devices=[]):
            for which in range(count):
                made = []
                for place, image in enumerate(images, rank * len(images)):
                    torch.manual_seed(stream(seed, purpose, number, which, place))
                    made.append(view(image.clone()))  # what it does to it must not reach the data
                    _check(made[-1], wanted)
                views.append(torch.stack(made))
        return [send(each, canvas.pixels.device) for each in views]

    return make


def _check(view: object, wanted: tuple[int, int, int]) -> None:
    """Refuse what the user's function gave, if it is not a view."""
    if not isinstance(view, Tensor) or not view.is_floating_point() or tuple(view.shape) != wanted:
        what = f"{tuple(view.shape)} {view.dtype}" if isinstance(view, Tensor) else type(view).__name__
        raise UsageError(
            f"views: the function must turn an image (C, H, W) uint8 into a floating-point tensor {wanted}, of size "
            f"image_size; it gave {what}."
        )
