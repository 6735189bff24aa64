"""From a configuration to a method."""

from __future__ import annotations

import torch
from torch import nn

from antipode.config.resolve import Config
from antipode.methods.contrastive import Contrastive
from antipode.methods.method import Encoder, Method
from antipode.modules.backbones import build_backbone, feature_dim
from antipode.modules.heads import projection_head
from antipode.modules.norms import part_batch_norms
from antipode.modules.queue import KeyQueue
from antipode.randomness import generator, stream


def build_method(config: Config, backbone: nn.Module | None = None) -> Method:
    """The method of a configuration, freshly initialised from its seed. `backbone` replaces the configured one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(config.seed, "init"))
        if backbone is None:
            backbone = build_backbone(
                config.backbone,
                channels=config.channels,
                stem=config.stem,
                zero_init_residual=config.zero_init_residual,
            )
        features = feature_dim(backbone, config.channels, config.image_size)
        head = projection_head(config.head, features, config.dim, config.hidden)
    return build_contrastive(config, Encoder(backbone, head))


def build_contrastive(config: Config, encoder: Encoder) -> Contrastive:
    # Groups keep both directions of a symmetric loss apart, so that one pass can hold them both.
    together = config.symmetric and config.bn_groups > 1 and config.batch_size % config.bn_groups == 0
    part_batch_norms(encoder, config.bn_groups, batches=2 if together else 1)
    queue = None
    if config.negatives_from == "queue":
        queue = KeyQueue(config.queue_size, config.dim, generator=generator(config.seed, "queue"))
    return Contrastive(
        encoder,
        temperature=config.temperature,
        key_momentum=config.key_momentum if config.key_encoder == "slow" else None,
        queue=queue,
        negatives=config.negatives,
        shared_draw=config.shared_draw,
        both_views=config.both_views,
        alpha=config.alpha,
        keys=config.keys,
        variance_weight=config.variance_weight,
        ramp=config.variance_ramp,
        normalise_mean=config.normalise_mean,
        symmetric=config.symmetric,
        bn_groups=config.bn_groups,
        together=together,
    )
