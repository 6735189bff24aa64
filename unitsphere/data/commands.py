"""What `unitsphere pack` and `unitsphere data preview` do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from unitsphere.common.errors import UsageError, check_word
from unitsphere.common.randomness import generator
from unitsphere.common.terminal import bars
from unitsphere.data.loader import Loader
from unitsphere.data.pack import Packed, pack
from unitsphere.data.source import Data, open_images, open_splits
from unitsphere.images.canvas import Canvas
from unitsphere.images.contact_sheet import contact_sheet
from unitsphere.images.decode import MAX_PIXELS
from unitsphere.views.apply import apply
from unitsphere.views.draw import draw
from unitsphere.views.policies import POLICIES, VIEWS


def pack_data(
    data: Data,
    out: str | Path,
    *,
    size: int | None = None,
    quality: int = 90,
    max_broken: float = 0.01,
    max_pixels: int = MAX_PIXELS,
    verbose: bool = True,
) -> Packed:
    """Write every split of the data into one file, with a progress bar unless not `verbose`."""
    if size is not None and size < 8:
        raise UsageError(f"size: given {size}; it must be at least 8.")
    if not 1 <= quality <= 100:
        raise UsageError(f"quality: given {quality}; it must be from 1 to 100.")
    splits = {split: replace(open(), max_pixels=max_pixels) for split, open in open_splits(data).items()}
    total = sum(len(images) for images in splits.values())
    with bars(verbose) as start:
        advance = start("packing", total)
        return pack(
            splits,
            out,
            size=size,
            quality=quality,
            max_broken=max_broken,
            progress=lambda done, _: advance(done),
        )


def preview(
    data: Data,
    out: str | Path,
    *,
    views: str = "moco-v2",
    image_size: int | None = None,
    images: int = 8,
    count: int = 8,
    seed: int = 0,
) -> dict[str, str]:
    """A contact sheet: each row an image and `count` of its views. Returned are the images that could not be read, in
    whose place others are shown: name -> why."""
    check_word("views", views, [*VIEWS, *POLICIES])
    for field, number in (("images", images), ("count", count)):
        if number < 1:
            raise UsageError(f"{field}: given {number}; it must be at least 1.")
    source = open_images(data, "train", holdout=0.0)
    chosen = torch.randperm(len(source), generator=generator(seed, "preview"))[:images]
    loader = Loader(source, resident=False)
    _, canvas = next(loader.batches([chosen]))
    size = image_size or min(224, int(torch.minimum(canvas.heights, canvas.widths).median()))
    made = [make_view(canvas, views, size, seed, number) for number in range(count)]
    rows = [[canvas.image(n), *(view[n] for view in made)] for n in range(len(canvas))]
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        contact_sheet(rows).save(out)
    except (OSError, ValueError) as error:
        raise UsageError(f"out: {out} cannot be written: {error}") from error
    return loader.broken


def make_view(canvas: Canvas, views: str, size: int, seed: int, number: int) -> np.ndarray:
    """One view of each image, as (N, H, W, C) uint8 for looking at."""
    names = VIEWS.get(views, (views,))  # views that are not made alike take turns
    table = draw(POLICIES[names[number % len(names)]], len(canvas), generator(seed, "views", 0, number))
    view = apply(canvas, table, size=size, mean=[0.0] * canvas.channels, std=[1.0] * canvas.channels)
    return (view.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
