"""From a method's configuration to what trains: the builders of the named families, and the one that calls them."""

from __future__ import annotations

import torch
from torch import nn

from unitsphere.common.distributed import world
from unitsphere.common.errors import UsageError
from unitsphere.common.randomness import generator, stream
from unitsphere.config.config import Config
from unitsphere.methods.catalogue import find_method
from unitsphere.methods.contrastive import ContrastiveConfig
from unitsphere.methods.declaration import Method
from unitsphere.methods.embedding import DispersionFields, EmbeddingConfig
from unitsphere.methods.learners.contrastive import ContrastiveLearner, LossSettings
from unitsphere.methods.learners.dispersion import Dispersion
from unitsphere.methods.learners.key_encoder import KeyEncoder
from unitsphere.methods.learners.learner import Learner
from unitsphere.methods.learners.negatives import NegativeSource
from unitsphere.methods.learners.regression import RegressionLearner
from unitsphere.methods.learners.supervised import SupervisedLearner
from unitsphere.methods.regression import RegressionConfig
from unitsphere.methods.supervised import SupervisedConfig
from unitsphere.modules.backbones import build_backbone, feature_dim
from unitsphere.modules.encoder import Encoder, Projection
from unitsphere.modules.heads import projection_head
from unitsphere.modules.image_norms import use_norm
from unitsphere.modules.norms import part_batch_norms
from unitsphere.modules.queue import KeyQueue
from unitsphere.objectives.mixing import Mixing


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


def build_contrastive(config: ContrastiveConfig, backbone: nn.Module, features: int) -> ContrastiveLearner:
    encoder = Encoder(backbone, build_head(config, features))
    # Groups keep both directions of a symmetric loss apart, so that one pass can hold them both.
    at_once = config.symmetric and config.bn_groups > 1
    part_batch_norms(encoder, config.bn_groups, batches=2 if at_once else 1)
    loss = LossSettings(
        config.temperature,
        alpha=config.alpha,
        alpha_on=config.alpha_on,
        variance_weight=config.variance_weight,
        variance_ramp=config.variance_ramp,
        positives=config.positives,
        symmetric=config.symmetric,
    )
    key_encoder = None
    if config.key_encoder == "slow":
        key_encoder = KeyEncoder(
            config.key_momentum,
            config.momentum_schedule,
            keys=config.keys,
            shuffles=config.bn_groups > 1,
            chunks=key_chunks(config),
            at_once=at_once,
        )
    negatives = NegativeSource(
        config.negatives,
        shared_draw=config.shared_draw,
        both_views=config.both_views,
        oracle=config.oracle,
        normalise_mean=config.normalise_mean,
    )
    queue = None
    if config.negatives_from == "queue":
        random = generator(config.seed, "queue")
        queue = KeyQueue(config.queue_size, config.dim, labelled=config.oracle, generator=random)
    return ContrastiveLearner(
        encoder,
        loss,
        key_encoder,
        negatives,
        queue,
        mixing=mixing(config),
        mixing_warmup=config.mixing_warmup,
        dispersion=dispersion(config),
    )


def key_chunks(config: ContrastiveConfig) -> int:
    """Several keys of an image are encoded in passes of whole groups of the norms, which changes nothing: in at least
    as many as there are keys, so that a pass is no larger than the batch of one key, or in as many as there are groups.
    With one group (bn_groups 1) there is one pass: in more, the statistics would be other ones."""
    if config.key_chunks is not None:
        keys = config.batch_size * config.keys // world()
        if keys % config.key_chunks or keys == config.key_chunks:
            raise UsageError(
                f"key_chunks: given {config.key_chunks}; it must divide the {keys} keys of a step, with at least 2 a "
                "pass."
            )
        return config.key_chunks
    groups = max(1, config.bn_groups // world())
    return next((passes for passes in range(config.keys, groups) if groups % passes == 0), groups)


def mixing(config: ContrastiveConfig) -> Mixing | None:
    if not config.mixes:
        return None
    return Mixing(
        hardest=config.hardest,
        pairs=config.pairs,
        with_query=config.with_query,
        detach=config.mix_detach,
        distinct=config.mix_distinct,
        rank_by=config.mix_rank_by,
        mix_in=config.mix_in,
        weigh=config.mix_weigh,
        draw_temperature=config.mix_temperature,
        until=config.mix_until,
    )


def build_regression(config: RegressionConfig, backbone: nn.Module, features: int) -> RegressionLearner:
    """The predictor is a projection head once more, from embedding to embedding."""
    encoder = Projection(backbone, build_head(config, features))
    predictor = build_head(config, config.dim)
    part_batch_norms(nn.ModuleList([encoder, predictor]), config.bn_groups)
    return RegressionLearner(
        encoder,
        predictor,
        views=config.view_count,
        key_momentum=config.key_momentum,
        momentum_schedule=config.momentum_schedule,
        centroid=config.centroid,
        dispersion=dispersion(config),
        joint_statistics=config.joint_statistics,
    )


def build_supervised(config: SupervisedConfig, backbone: nn.Module, features: int) -> SupervisedLearner:
    if config.class_count is None:
        raise UsageError("class_count: it must be given where there are no data to count the classes of.")
    encoder = Projection(backbone, nn.Identity())
    part_batch_norms(encoder, config.bn_groups)
    return SupervisedLearner(encoder, nn.Linear(features, config.class_count))


def build_head(config: EmbeddingConfig, features: int) -> nn.Module:
    return projection_head(config.head, features, config.dim, config.hidden, config.head_norm)


def dispersion(config: EmbeddingConfig) -> Dispersion:
    return Dispersion(**{name: getattr(config, name) for name in DispersionFields.model_fields})
