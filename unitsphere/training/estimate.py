"""Estimate the memory and the hours of a run before it starts.

Memory is counted: the forward pass of a whole batch is traced, on tensors without content, to find what its graph holds
for the backward pass. Time is measured: a few real steps on a few of the images.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from unitsphere.common.errors import UnitsphereError
from unitsphere.common.machine import worker_count
from unitsphere.common.randomness import generator
from unitsphere.config.config import Config
from unitsphere.data.images import evenly
from unitsphere.data.loader import fits
from unitsphere.images.canvas import Canvas
from unitsphere.images.decode import BrokenImage, decode
from unitsphere.methods.learners.contrastive import ContrastiveLearner
from unitsphere.methods.learners.learner import Inputs, Learner, Moment
from unitsphere.optimisation.optimisers import build_optimizer
from unitsphere.training.make_views import make_views_of
from unitsphere.training.prepare import Prepared
from unitsphere.training.speed import choose_speed
from unitsphere.training.step import AUTOCAST, PlainStep, RecordedStep, TakeStep

SAMPLE = 32  # images that are decoded to know all
FEW = 2  # images of the first step that is timed on a CPU
LONG_ENOUGH = 0.5  # seconds that a timed step should take at least, so that what does not grow with it is small
SLOTS = {"sgd": 1, "lars": 1, "adamw": 2}  # tensors that an optimiser with momentum keeps for each parameter


@dataclass(frozen=True)
class Sample:
    """Some of the images, decoded. nbytes: of one image. seconds: to decode one, on one core."""

    canvas: Canvas
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class Duration:
    """How long a run takes.

    images: in the timed step, which took `seconds`. step: seconds of a whole step, scaled. decoding: seconds that all
    workers need for the images of a step. hours: of the run. reserved: bytes that the timed steps took on a GPU.
    """

    images: int
    seconds: float
    step: float
    decoding: float
    hours: float
    reserved: int | None


def take_sample(prepared: Prepared) -> Sample:
    """Decode some of the images, and time it."""
    config, images = prepared.config, prepared.images
    found, started = [], time.perf_counter()
    for index in evenly(len(images), SAMPLE).tolist():
        try:
            item = images.read(index)
            found.append(decode(item, channels=config.channels, depth=config.depth, reduce_to=2 * config.image_size))
        except (BrokenImage, OSError):
            continue
    seconds = time.perf_counter() - started
    if not found:
        raise UnitsphereError(f"none of the images of {images.name} that were tried can be read.")
    canvas = Canvas.of(found)
    return Sample(canvas, canvas.nbytes / len(found), seconds / len(found))


def stays_resident(prepared: Prepared, sample: Sample) -> bool:
    """Return whether the loader will keep all images decoded."""
    if prepared.config.resident is not None:
        return prepared.config.resident
    return fits(sample.nbytes * len(prepared.images), prepared.device)


def estimate_memory(prepared: Prepared, sample: Sample, ranks: int = 1) -> dict[str, int]:
    """Return the bytes on one rank's device at the peak of a step, by what they hold. The kernels' own work space comes
    on top."""
    config = share_of(prepared.config, ranks)
    method = prepared.build(config)
    image = config.channels * config.image_size**2 * 4
    trained = nbytes(parameter for parameter in method.parameters() if parameter.requires_grad)
    queue = getattr(method, "queue", None)
    found = {
        "activations": traced_bytes(config, method, prepared.precision),
        "weights": trained,
        "gradients": trained,
        "optimiser": trained * SLOTS[config.optimizer] * (config.momentum > 0 or config.optimizer == "adamw"),
        "slow copy": nbytes(parameter for parameter in method.parameters() if not parameter.requires_grad),
        "queue": 0 if queue is None else nbytes(queue.buffers()),
        "views": method.views * config.batch_size * image,
        "copies of key views": key_copies(prepared.config, method, ranks) * image,
        "images": round(sample.nbytes * len(prepared.images)) if stays_resident(prepared, sample) else 0,
    }
    return {name: size for name, size in found.items() if size}


def estimate_time(prepared: Prepared, sample: Sample, ranks: int = 1) -> Duration:
    """Estimate the time of the run on so many ranks, each like this machine, without their communication. On a CPU a
    step of few images is timed, and scaled."""
    config, device = prepared.config, prepared.device
    share = config.batch_size // ranks
    if device.type == "cuda":
        images, seconds = share, time_step(prepared, share_of(config, ranks), sample)
    else:
        images = min(FEW, share)
        seconds = time_step(prepared, scaled(config, images), sample)
        while seconds < LONG_ENOUGH and images < share:
            images = min(share, math.ceil(images * LONG_ENOUGH / seconds))
            seconds = time_step(prepared, scaled(config, images), sample)
    step = seconds * share / images
    workers = config.workers or worker_count()
    decoding = share * sample.seconds / workers
    if stays_resident(prepared, sample):
        whole = len(prepared.images) * sample.seconds / workers + prepared.steps_left * step
    else:  # a GPU trains while the cores decode
        whole = prepared.steps_left * (max(step, decoding) if device.type == "cuda" else step + decoding)
    reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    return Duration(images, seconds, step, decoding, whole / 3600, reserved)


def share_of(config: Config, ranks: int) -> Config:
    """Return the configuration for the share of one of so many ranks."""
    return scaled(config, config.batch_size // ranks, config.accumulate, getattr(config, "key_chunks", None))


def scaled(config: Config, images: int, accumulate: int = 1, key_chunks: int | None = None) -> Config:
    """Return the configuration for steps of so many images. The groups of norms keep their size; mean and deviation are
    filled in, since they change no time and no memory."""
    changed = {
        "batch_size": images,
        "bn_groups": max(1, config.bn_groups * images // config.batch_size),
        "accumulate": accumulate,
        "key_chunks": key_chunks,
        "mean": config.mean or [0.5] * config.channels,
        "std": config.std or [0.25] * config.channels,
    }
    known = type(config).model_fields
    return config.model_copy(update={name: value for name, value in changed.items() if name in known})


def key_copies(config: Config, method: Learner, ranks: int) -> int:
    """Return how many images are copied to encode keys: those of a pass, or all that a rank encodes if the shuffle is
    over several ranks. config: of the run. method: of one rank."""
    if not isinstance(method, ContrastiveLearner) or method.key_encoder is None:
        return 0
    shuffled = config.bn_groups > 1
    if not shuffled and method.keys == 1:
        return 0
    passes = 1 if shuffled and ranks > 1 else method.key_encoder.chunks
    copies = 4 if shuffled and method.directions == 2 else 1  # two directions, each by itself and then in one batch
    return copies * math.ceil(method.keys * config.batch_size / (ranks * passes))


def inputs_of(config: Config, method: Learner) -> dict[str, Tensor]:
    """Return what the method draws for the last step of a run, when all that begins late has begun."""
    last = Moment(config.epochs - 1, config.epochs, config.epochs - 1, config.epochs)
    inputs = method.inputs(config.batch_size, last, generator(config.seed, "estimate"))
    labels = {"labels": torch.zeros(config.batch_size, dtype=torch.int64)} if method.labels else {}
    return inputs | labels


def traced_bytes(config: Config, method: Learner, precision: str) -> int:
    """Return the bytes that the graph of a step, or of the first part of one, holds. To spend neither time nor memory,
    tensors without content are traced."""
    try:
        return _traced_bytes(config, method, precision)
    except Exception as error:  # whatever a backbone from elsewhere may do that depends on the content
        raise UnitsphereError(f"a step of these networks cannot be traced: {error}") from error


def _traced_bytes(config: Config, method: Learner, precision: str) -> int:
    contentless = FakeTensorMode()
    with FakeCopyMode(contentless):
        method = copy.deepcopy(method)
    with contentless:
        size = (config.batch_size, config.channels, config.image_size, config.image_size)
        views = [torch.empty(size) for _ in range(method.views)]
        inputs: Inputs = {name: contentless.from_tensor(tensor) for name, tensor in inputs_of(config, method).items()}
        if method.parts > 1:
            views, inputs = method.in_parts(views, inputs)[0]
        return saved_bytes(method, views, inputs, precision)


def saved_bytes(method: Learner, views: list[Tensor], inputs: Inputs, precision: str = "fp32") -> int:
    """Return the bytes that a forward pass keeps for the backward pass, without the weights and the views. Each storage
    counts once."""
    known = {StorageWeakRef(tensor.untyped_storage()) for tensor in (*method.parameters(), *method.buffers(), *views)}
    held: dict[StorageWeakRef, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[StorageWeakRef(storage)] = storage.nbytes()
        return tensor.detach()  # the tensor itself could hold the graph that holds it

    dtype = AUTOCAST.get(precision)
    kept = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with kept, torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False):
        step = method(views, inputs)
        assert step.loss.requires_grad  # the graph lives until here
        return sum(size for storage, size in held.items() if storage not in known and not storage.expired())


def time_step(prepared: Prepared, config: Config, sample: Sample) -> float:
    """Return the seconds of a step on the device, with the making of its views."""
    device = prepared.device
    method = prepared.build(config).to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    plain = PlainStep(method, build_optimizer(config, method), precision=prepared.precision, clip_norm=config.clip_norm)
    make_views = make_views_of(config, method.views, None)
    canvas = sample.canvas.to(device).select(torch.arange(config.batch_size) % len(sample.canvas))
    inputs = {name: tensor.to(device) for name, tensor in inputs_of(config, method).items()}
    method.train()
    take: TakeStep = plain
    if choose_speed(prepared, prepared.steps_left, custom=False).record:
        take = RecordedStep(plain, make_views(canvas, "views", 0), inputs)

    def seconds(steps: int) -> float:
        started = time.perf_counter()
        for number in range(steps):
            step = take(make_views(canvas, "views", number), inputs, config.learning_rate)
        float(step.loss.detach())  # waits for the device
        return (time.perf_counter() - started) / steps

    first = seconds(1)  # takes memory and chooses kernels
    return first if first > 4 * LONG_ENOUGH else seconds(max(1, min(10, round(LONG_ENOUGH / first))))


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
