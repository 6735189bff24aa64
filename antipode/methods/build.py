"""From a configuration to a method."""

from __future__ import annotations

import torch
from torch import nn

from antipode.config.resolve import Config
from antipode.methods.contrastive import Encoder, MoCo
from antipode.modules.backbones import build_backbone, feature_dim
from antipode.modules.heads import projection_head
from antipode.randomness import generator, stream


def build_method(config: Config, backbone: nn.Module | None = None) -> MoCo:
    """The method of a configuration, freshly initialised from its seed. `backbone` replaces the configured one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(config.seed, "init"))
        if backbone is None:
            backbone = build_backbone(config.backbone, channels=config.channels, stem=config.stem)
        features = feature_dim(backbone, config.channels, config.image_size)
        head = projection_head(config.head, features, config.dim, config.hidden)
    return MoCo(
        Encoder(backbone, head),
        dim=config.dim,
        temperature=config.temperature,
        queue_size=config.queue_size,
        key_momentum=config.key_momentum,
        symmetric=config.symmetric,
        bn_groups=config.bn_groups,
        generator=generator(config.seed, "queue"),
    )
