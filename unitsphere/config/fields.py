"""The fields that every pre-training run has: their types, bounds and meanings.

The configuration is flat: one name means one thing, in a file, on the command line and as a keyword argument.
The sections only group the fields for readers and for --help. The fields of a method stand with it, in `methods/`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from unitsphere.modules.names import Norm

__all__ = ["Section"]

Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1, le=10**12)]  # more would overflow where sizes are multiplied
Rate = Annotated[float, Field(gt=0, le=1e32)]  # float32 must hold it, also times the batch


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
    """Some fields that belong together. The docstring of each is its title in --help."""

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
    max_pixels: Count = Field(
        100_000_000, description="pixels that an image may be decoded to; one with more counts as unreadable"
    )
    resident: bool | None = Field(None, description="keep all decoded images in memory; default: when they fit")
    workers: Count | None = Field(None, description="decoding workers; default: one a core")


class ViewFields(Section):
    """Views: a named policy, and any of its parameters"""

    views: str = Field("moco-v2", description="augmentation policy")
    image_size: int = Field(224, ge=8, le=2**16, description="side of a view in pixels")
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

    backbone: str = Field(
        "resnet50", description="resnet-tiny, resnet18 ... resnet152, timm:NAME, package.module:function"
    )
    stem: Literal["imagenet", "small"] = Field("imagenet", description="small: 3x3 without max-pool, for small images")
    zero_init_residual: bool = Field(False, description="residual branches of a ResNet begin at zero")
    norm: Norm = Field("batch", description="norm of the backbone; standardised: group norm and weight standardisation")
    bn_groups: Count = Field(8, description="parts of the batch with batch statistics of their own (ShuffleBN)")


class OptimisationFields(Section):
    """Optimisation"""

    epochs: Count = Field(200, description="passes over the data")
    batch_size: int = Field(256, ge=2, le=2**24, description="images a step, over all ranks")
    accumulate: Count = Field(
        1, description="parts in which a step is computed, to hold less at once; refused where the result would differ"
    )
    lr: Rate | None = Field(None, description="learning rate, absolute")
    base_lr: Rate | None = Field(0.03, description="learning rate per 256 images a step; unused where lr is given")
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
