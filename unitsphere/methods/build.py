"""From a configuration to what trains."""

from __future__ import annotations

import torch
from torch import nn

from unitsphere.common.randomness import stream
from unitsphere.config.config import Config
from unitsphere.methods.catalogue import find_method
from unitsphere.methods.declaration import Method
from unitsphere.methods.learners.learner import Learner
from unitsphere.modules.backbones import build_backbone, feature_dim
from unitsphere.modules.image_norms import use_norm

__all__ = ["build_learner"]


def build_learner(
    config: Config, backbone: nn.Module | None = None, *, method: Method | None = None, named_now: str | None = None
) -> Learner:
    """Build what trains, freshly initialised from the configuration's seed.

    backbone: replaces the configured one. method: of the configuration; by default the named one. named_now: the
    backbone that the user names in this call; only this code may be imported (`build_backbone`).
    """
    method = method or find_method(config.method, None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(config.seed, "init"))
        if backbone is None:
            backbone = build_backbone(
                config.backbone,
                channels=config.channels,
                stem=config.stem,
                zero_init_residual=config.zero_init_residual,
                named_now=named_now,
            )
        use_norm(backbone, config.norm)
        return method.build(config, backbone, feature_dim(backbone, config.channels, config.image_size))
