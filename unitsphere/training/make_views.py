"""The views that a configuration asks for."""

from __future__ import annotations

import torch

from unitsphere.config.config import Config
from unitsphere.config.images import policies
from unitsphere.data.loader import Loader
from unitsphere.views.views import CustomView, MakeViews, custom_views, standard_views


def make_views_of(config: Config, count: int, custom: CustomView | None, compiled: bool = False) -> MakeViews:
    """Return a function that makes `count` views of each image, as the configuration says or by the user's own."""
    size, seed = config.image_size, config.seed
    if custom:
        return custom_views(custom, count, size=size, channels=config.channels, seed=seed)
    mean, std = config.mean, config.std
    assert mean is not None and std is not None
    return standard_views(policies(config), count, size=size, mean=mean, std=std, seed=seed, compiled=compiled)


def try_view(view: CustomView, loader: Loader, config: Config) -> None:
    """Refuse a function that gives no views before anything is written."""
    for _, canvas in loader.batches([torch.arange(1)]):
        make_views_of(config, 1, view)(canvas, "trial", 0)
