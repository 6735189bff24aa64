"""Every field of a pre-training run: its type, its bounds, its meaning.

The configuration is flat: one name means one thing, in a file, on the command line and as a keyword argument.
The sections only group the fields for readers and for --help; `families.py` says which of them a method has.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from unitsphere.modules.names import Norm

Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


def split_commas(value: Any) -> Any:
    """Lists arrive from the command line as text: 60,80."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def as_number(value: Any) -> Any:
    """A number from the command line, where it must be one of a few."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def two_numbers(value: Any) -> Any:
    parts = split_commas(value)
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        raise ValueError("two numbers are needed, such as 0.2,1")
    return parts


Range = Annotated[tuple[float, float], BeforeValidator(two_numbers)]
Numbers = Annotated[tuple[float, ...], BeforeValidator(split_commas)]
Epochs = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(split_commas)]
Places = Annotated[tuple[Positive, ...], BeforeValidator(split_commas)]
Names = Annotated[tuple[str, ...], BeforeValidator(split_commas)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class RunFields(Section):
    """The run"""

    method: str = Field(description="what to train with; `unitsphere methods` lists them")
    data: str = Field(description="what to train on: a name, name=path, a folder, a list file or a pack")
    recipe: str | None = Field(None, description="named settings for a kind of data; chosen by the data's name")
    seed: int = Field(0, ge=0, description="all randomness is a function of it")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="auto is bf16 on cards that have it; fp16 scales the loss, for cards that have not"
    )
    init: str | None = Field(None, description="start from weights: torchvision:NAME, timm:NAME, a file or a run")


class DataFields(Section):
    """Data"""

    holdout: float = Field(0.1, ge=0, lt=1, description="share held out where the data has no val split")
    classes: Names | None = Field(None, description="only these classes, by name")
    fraction: float = Field(1.0, gt=0, le=1, description="a seeded share of the images, stratified by label")
    channels: Count = Field(3, description="input channels")
    depth: Annotated[Literal[8, 16], BeforeValidator(as_number)] = Field(
        8, description="bits a channel; 16 keeps the depth of 16-bit images"
    )
    normalise: str = Field("computed", description="mean and deviation: computed, imagenet, cifar10, cifar100, half")
    mean: Numbers | None = Field(None, description="mean per channel in [0, 1]; overrides normalise")
    std: Numbers | None = Field(None, description="deviation per channel; overrides normalise")
    max_broken: Probability = Field(0.01, description="share of unreadable images that is skipped, not fatal")
    resident: bool | None = Field(None, description="keep all decoded images in memory; default: when they fit")
    workers: Count | None = Field(None, description="decoding workers; default: one a core")


class ViewFields(Section):
    """Views: a named policy, and any of its parameters"""

    views: str = Field("moco-v2", description="augmentation policy")
    image_size: int = Field(224, ge=8, description="side of a view in pixels")
    crop_scale: Range | None = Field(None, description="share of the image's area that a crop covers")
    crop_ratio: Range | None = Field(None, description="aspect ratio of a crop")
    brightness: NotNegative | None = Field(None, description="strength of the jitter in brightness")
    contrast: NotNegative | None = Field(None, description="strength of the jitter in contrast")
    saturation: NotNegative | None = Field(None, description="strength of the jitter in saturation")
    hue: Annotated[float, Field(ge=0, le=0.5)] | None = Field(None, description="strength of the jitter in hue")
    jitter: Probability | None = Field(None, description="probability of the colour jitter")
    grey: Probability | None = Field(None, description="probability of turning grey")
    blur: Probability | None = Field(None, description="probability of a Gaussian blur")
    blur_sigma: Range | None = Field(None, description="the blur's deviation in pixels, from and to")
    solarise: Probability | None = Field(None, description="probability of solarising")
    flip: Probability | None = Field(None, description="probability of a horizontal flip")


class ModelFields(Section):
    """Model"""

    backbone: str = Field("resnet50", description="resnet-tiny, resnet18 ... resnet152, timm:NAME, package:function")
    stem: Literal["imagenet", "small"] = Field("imagenet", description="small: 3x3 without max-pool, for small images")
    zero_init_residual: bool = Field(False, description="residual branches of a ResNet begin at zero")
    norm: Norm = Field("batch", description="norm of the backbone; standardised: group norm and weight standardisation")
    bn_groups: Count = Field(8, description="parts of the batch with batch statistics of their own (ShuffleBN)")


class EmbeddingFields(Section):
    """The embedding that the loss sees, and its slow copy"""

    head: Literal["linear", "mlp", "mlp-bn", "mlp-bn-bn", "byol"] = Field(
        "mlp", description="projection head; with batch norm after its first layer, or after both; or BYOL's"
    )
    hidden: Count | None = Field(None, description="width of the mlp head; default: as wide as the features")
    dim: Count = Field(128, description="dimensions of the embedding")
    head_norm: Norm = Field("batch", description="norm of the heads that have one; default: the backbone's")
    key_momentum: Probability = Field(0.999, description="how slowly the slow copy follows, at first")
    momentum_schedule: Literal["constant", "cosine"] = Field(
        "constant", description="cosine: key_momentum grows to 1 over the run (BYOL)"
    )


class DispersionFields(Section):
    """Forces that spread embeddings, for any loss of embeddings (MSBReg; reconstructed from its supplement)"""

    singular_weight: NotNegative = Field(
        0.0, description="lambda_s, of the singular value loss; nuclear pushes as the root of a step's images x views"
    )
    singular_form: Literal["nuclear", "gram", "correlation"] = Field("nuclear", description="form of that loss")
    brownian_weight: NotNegative = Field(0.0, description="lambda_b, of the Brownian loss: a random force")
    brownian_per_view: bool = Field(False, description="a force for each view, not for each image")
    uniformity_weight: NotNegative = Field(0.0, description="of Wang & Isola's uniformity loss")


class ContrastiveFields(Section):
    """Contrastive learning"""

    temperature: Positive = Field(0.2, description="scores are divided by it")
    key_encoder: Literal["slow", "online"] = Field("slow", description="online: keys take a gradient too (SimCLR)")
    negatives_from: Literal["queue", "batch"] = Field("queue", description="batch: keys of the batch's other images")
    queue_size: Count = Field(65536, description="keys kept as negatives")
    negatives: Count | None = Field(
        None, description="K, negatives that a query meets, drawn from those at hand; default: all of them"
    )
    shared_draw: bool = Field(False, description="draw the K negatives once a step for all queries, not for each")
    both_views: bool = Field(False, description="negatives of the batch are of both views, not of the key's alone")
    alpha: Annotated[float, Field(gt=0, le=1e30)] | None = Field(
        None, description="EqCo: weigh the negatives as if there were so many; default: K"
    )
    alpha_on: Literal["all", "real"] = Field("all", description="real: mixed negatives are not weighed by alpha")
    symmetric: bool = Field(False, description="each view is query once and key once; the two losses add")
    oracle: bool = Field(False, description="negatives of the image's own class do not count (needs labels)")


class JointFields(Section):
    """JCL: several keys of an image, and the limit of infinitely many"""

    keys: Count = Field(1, description="M', keys of an image")
    variance_weight: NotNegative = Field(0.0, description="lambda, weight of the variance of the positive scores")
    variance_ramp: bool = Field(True, description="lambda grows linearly to its full value over the run")
    normalise_mean: bool = Field(False, description="the mean key enters the queue with length 1")
    positives: Literal["joint", "each", "repeated"] = Field(
        "joint", description="each: a term for each key; repeated: the same as a batch as many times larger"
    )
    key_chunks: Count | None = Field(
        None,
        description="passes in which keys are encoded (with bn_groups 1 each has statistics of its own); "
        "default: as many as leave the groups of the norms whole",
    )


class MixingFields(Section):
    """MoCHi: synthetic negatives, mixed from hard ones"""

    hardest: Count | None = Field(
        1024, description="N, hardest negatives of a query, of which some are mixed; none: all"
    )
    pairs: int = Field(0, ge=0, description="s, mixtures of two of them")
    with_query: int = Field(0, ge=0, description="s', mixtures of one of them and the query")
    mixing_warmup: int = Field(0, ge=0, description="epochs before the first mixture")
    mix_detach: bool = Field(True, description="a mixture with the query is a constant for the gradient")
    mix_distinct: bool = Field(True, description="the two parents of a pair differ")
    mix_rank_by: Literal["query", "key"] = Field("query", description="whose scores say which negatives are hardest")
    mix_in: Literal["query", "key"] = Field("query", description="what with_query mixes with a negative")
    mix_weigh: bool = Field(False, description="multiply the score of a mixture with the query by the query's share")
    mix_temperature: Positive | None = Field(
        None, description="draw parents by a softmax of their scores over this; default: evenly"
    )
    mix_until: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="add both kinds in turn until this share of the N highest scores is synthetic"
    )


class RegressionFields(Section):
    """Regression: predict the slow copy's embedding of other views (BYOL, MSBReg)"""

    view_count: Annotated[int, Field(ge=2)] = Field(2, description="K, views of an image")
    centroid: Literal["others", "split", "all"] = Field(
        "others", description="which centroids of views meet: one view and all others, of two halves, all and all"
    )
    joint_statistics: bool = Field(False, description="all views in one batch, so in one set of batch statistics")
    lr_per_view: bool = Field(False, description="base_lr is multiplied by K (MSBReg)")


class SupervisedFields(Section):
    """Supervised learning"""

    class_count: Count | None = Field(None, description="classes to tell apart; default: those of the data")


class OptimisationFields(Section):
    """Optimisation"""

    epochs: Count = Field(200, description="passes over the data")
    batch_size: int = Field(256, ge=2, description="images a step, over all ranks")
    accumulate: Count = Field(
        1, description="parts in which a step is computed, to hold less at once; refused where the result would differ"
    )
    lr: Positive | None = Field(None, description="learning rate, absolute")
    base_lr: Positive | None = Field(0.03, description="learning rate per 256 images a step; unused where lr is given")
    optimizer: Literal["sgd", "adamw", "lars"] = Field("sgd", description="optimiser")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="of sgd and lars; the first beta of adamw")
    nesterov: bool = Field(False, description="Nesterov momentum for sgd")
    weight_decay: NotNegative = Field(1e-4, description="weight decay")
    decay_norms: bool | None = Field(
        None, description="decay biases and norms too, and with lars adapt their rate; default: unless it is lars"
    )
    lr_schedule: Literal["cosine", "step", "constant"] = Field("cosine", description="shape of the learning rate")
    lr_drops: Places = Field(
        (0.6, 0.8), description="where step multiplies by 0.1: epochs, or shares of the run below 1"
    )
    lr_update: Literal["epoch", "step"] = Field("epoch", description="how often the learning rate changes")
    warmup_epochs: NotNegative = Field(0, description="epochs of linear warm-up")
    warmup_kind: Literal["before", "times"] = Field(
        "before", description="times: the warm-up multiplies a schedule that begins with the run (SiMo)"
    )
    clip_norm: Positive | None = Field(None, description="clip the gradient's norm at this")


class RunningFields(Section):
    """Running"""

    compile: bool | None = Field(None, description="compile networks and views; default: on CUDA, for long runs")
    record: bool | None = Field(
        None, description="replay the step as a CUDA graph; default: on CUDA, built-in backbones"
    )
    log_every: Count = Field(50, description="steps between lines of metrics.jsonl")
    knn_every: int = Field(0, ge=0, description="epochs between online k-NN evaluations (needs labels); 0: never")
    tensorboard: bool = Field(True, description="write TensorBoard events")
    save_every: Count | None = Field(None, description="epochs between checkpoints; default: as many as fill a minute")
    save_minutes: Positive | None = Field(None, description="also a checkpoint each so many minutes")
    keep_last: Count = Field(2, description="how many of the latest checkpoints stay")
    keep_epochs: Epochs = Field((), description="epochs whose checkpoints always stay; 0: before the first step")
