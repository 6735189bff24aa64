"""`antipode pretrain` and `antipode.pretrain`: from what was asked to a finished run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from antipode.config.fields import FIELDS_FREE_ON_RESUME
from antipode.config.resolve import Config, Layer, Resolved, policy, read_file, resolve
from antipode.config.sizing import Facts
from antipode.data.canvas import Canvas
from antipode.data.decode import BrokenImage, decode
from antipode.data.images import Images
from antipode.data.loader import Loader, channel_statistics
from antipode.data.source import open_images
from antipode.devices import pick_device, pick_precision
from antipode.errors import AntipodeError, UsageError
from antipode.evaluation.features import extract
from antipode.loading import initialise, normalisation, preprocess_of
from antipode.methods.build import build_method
from antipode.methods.contrastive import MoCo
from antipode.randomness import generator, stream
from antipode.training.loop import Plan, Training
from antipode.training.run import Run
from antipode.training.summary import online_knn, summarise
from antipode.training.terminal import Terminal
from antipode.views.apply import apply
from antipode.views.draw import draw

CustomView = Callable[[Tensor], Tensor]  # (C, H, W) uint8 -> (C, S, S) float
MakeViews = Callable[..., list[Tensor]]  # (canvas, step, purpose) -> views


def pretrain(
    method: str | None = None,
    *,
    data: Any = None,
    out: str | os.PathLike[str],
    config: str | os.PathLike[str] | None = None,
    resume: bool = False,
    backbone: str | nn.Module | None = None,
    views: str | CustomView | None = None,
    **fields: Any,
) -> Run:
    """Pre-train without labels and return the run.

    data: a name, name=path, a path, an array of images or a torch Dataset. config: a TOML or JSON file of fields.
    Every other field of the configuration is a keyword by its own name (`antipode pretrain --help` lists them).
    backbone may be a module, views a callable that turns one (C, H, W) uint8 image into a (C, S, S) float view.
    """
    given = {"method": method, "data": data, "backbone": backbone, "views": views}
    given = {name: value for name, value in given.items() if value is not None} | fields
    objects = {name: given[name] for name in ("data", "backbone", "views") if is_object(given.get(name))}
    given |= dict.fromkeys(objects, "custom")
    if "data" in given:
        given["data"] = os.fspath(given["data"])
    file = Layer(f"file {config}", read_file(config)) if config is not None else None
    run = Run(Path(out))
    prepared = prepare(run, Layer("given", given), file, resume, objects.get("data"))
    with friendly_memory_errors(prepared.resolved.config):
        return prepared.train(run, objects.get("backbone"), objects.get("views"))


def is_object(value: Any) -> bool:
    return value is not None and not isinstance(value, str | os.PathLike)


class Prepared:
    """A run that can start: resolved, its data opened, its sizes known."""

    def __init__(self, resolved: Resolved, images: Images, source: Any, resume: bool) -> None:
        self.resolved = resolved
        self.images = images
        self.source = source
        self.resume = resume
        config = resolved.config
        self.device = pick_device(config.device)
        self.precision = pick_precision(config.precision, self.device)
        self.plan = Plan(len(images), config.batch_size, config.epochs, config.seed)

    def train(self, run: Run, backbone: nn.Module | None = None, views: CustomView | None = None) -> Run:
        config = self.resolved.config
        terminal = Terminal(self.plan.steps, config.epochs)
        loader = self.loader(self.images)
        if config.mean is None:
            self.resolved = with_statistics(self.resolved, loader)
            config = self.resolved.config
        if not self.resume:
            run.create(self.resolved)
        method = build_method(config, backbone)
        if config.init and not run.checkpoints():
            initialise(method.backbone, config.init)
            method.slow.load_state_dict(method.online.state_dict())
        method.to(self.device)
        if self.device.type == "cuda":
            method.to(memory_format=torch.channels_last)
        training = Training(run, config, method, self.plan, self.device, self.precision)
        if run.checkpoints():
            training.resume()
            terminal.say(f"resuming after step {training.step} of {self.plan.steps}")
        count = method.views
        self.make_views = standard_views(config, count) if views is None else custom_views(config, count, views)
        online = online_knn(self, loader, method) if config.knn_every else None
        with terminal, stop_on_signals() as should_stop:
            training.train(loader, self.make_views, terminal, should_stop, online)
        for line in summarise(run, self, method):
            terminal.say(line)
        return run

    def loader(self, images: Images) -> Loader:
        """Photos much larger than a view are decoded at a reduced scale: twice the view's side is kept."""
        config = self.resolved.config
        return Loader(
            images,
            channels=config.channels,
            depth=config.depth,
            reduce_to=2 * config.image_size,
            device=self.device,
            resident=config.resident,
            workers=config.workers,
            max_broken=config.max_broken,
        )

    def features(self, method: MoCo, loader: Loader, indices: Tensor) -> Tensor:
        """The backbone's features of some images, as evaluation would take them."""
        preprocess = preprocess_of(self.resolved.config)
        return extract(
            method.backbone, loader, preprocess, indices=indices, device=self.device, precision=self.precision
        )

    def held_out(self) -> Images | None:
        """The images that training never saw, if there are any."""
        config = self.resolved.config
        try:
            return open_split(config, self.source, "val")
        except UsageError:
            return None


def prepare(run: Run, given: Layer, file: Layer | None, resume: bool, source: Any = None) -> Prepared:
    """Refuse what cannot work before anything starts; open the data; settle every field."""
    exists = run.path.exists() and (not run.path.is_dir() or any(run.path.iterdir()))
    if exists and not resume:
        raise UsageError(f"out: {run.path} exists already. Use --resume to continue it, or another --out.")
    if exists:
        resolved = continued(Run.open(run.path), given, file)
    else:
        resolved = resolve(given, file=file)  # wrong fields are told before any data is read
    source = source if source is not None else resolved.config.data
    if isinstance(source, str) and source == "custom":
        raise UsageError("data: this run was trained on data given from Python: give the same data again.")
    images = open_split(resolved.config, source, "train")
    if not exists and resolved.config.recipe is None:
        facts = Facts(len(images), median_side(images), pick_device(resolved.config.device).type == "cuda")
        resolved = resolve(given, file=file, facts=facts)
    return Prepared(resolved, images, source, resume=exists)


def continued(run: Run, given: Layer, file: Layer | None) -> Resolved:
    """The configuration of an existing run, with more epochs if asked; nothing else may change."""
    saved = run.config.model_dump(mode="json")
    asked = {**(file.values if file else {}), **given.values}
    asked = resolve(Layer("given", {**saved, **asked} | drop_other_rate(asked))).config.model_dump(mode="json")
    changed = [name for name in saved if asked[name] != saved[name] and name not in FIELDS_FREE_ON_RESUME]
    if changed:
        lines = [f"{name}: the run has {saved[name]!r}, given is {asked[name]!r}." for name in changed]
        raise UsageError("\n".join([*lines, "A resumed run keeps its settings; only epochs may change."]))
    if asked["epochs"] < saved["epochs"]:
        raise UsageError(f"epochs: the run has {saved['epochs']}; a resumed run can only go on for longer.")
    resolved = resolve(Layer(str(run.config_file), asked))
    if asked != saved:
        run.write_config(resolved.config)
    return resolved


def drop_other_rate(asked: dict[str, Any]) -> dict[str, Any]:
    """Where lr is given, the saved base_lr says nothing any more, and the other way round."""
    return {"base_lr": None} if asked.get("lr") else {"lr": None} if asked.get("base_lr") else {}


def open_split(config: Config, source: Any, split: str) -> Images:
    """The images of a split. Which these are does not follow the run's seed: runs with other seeds compare."""
    return open_images(source, split, holdout=config.holdout, classes=config.classes, fraction=config.fraction)


def median_side(images: Images, sample: int = 64) -> int:
    """Median of the shorter side over a few images, for choosing sizes."""
    sides = []
    for index in np.unique(np.linspace(0, len(images) - 1, sample).astype(int)):
        try:
            sides.append(min(decode(images.read(int(index)), channels=3).shape[:2]))
        except (BrokenImage, OSError):
            continue
    if not sides:
        raise AntipodeError(f"none of {sample} sampled images of {images.name} can be read.")
    return int(np.median(sides))


def with_statistics(resolved: Resolved, loader: Loader) -> Resolved:
    """Fill in mean and deviation, by name or computed from the images."""
    config = resolved.config
    if config.normalise == "computed":
        mean, std = channel_statistics(loader)
    else:
        mean, std = normalisation(config.normalise, config.channels)
    rounded = {
        "mean": [round(float(m), 4) for m in mean],
        "std": [round(max(float(s), 1e-4), 4) for s in std],
    }
    values = config.model_dump(mode="json") | rounded
    origins = resolved.origins | dict.fromkeys(rounded, f"normalise {config.normalise}")
    return Resolved(resolve(Layer("settled", values)).config, origins)


def standard_views(config: Config, count: int) -> MakeViews:
    """`count` views of each image by the configured policy."""
    rules = policy(config)
    assert config.mean is not None and config.std is not None
    mean, std = config.mean, config.std

    def make(canvas: Canvas, step: int, purpose: str = "views") -> list[Tensor]:
        tables = (draw(rules, len(canvas), generator(config.seed, purpose, step, view)) for view in range(count))
        return [apply(canvas, table, size=config.image_size, mean=mean, std=std) for table in tables]

    return make


def custom_views(config: Config, count: int, view: CustomView) -> MakeViews:
    """`count` views of each image by the user's own function, its randomness seeded by the step."""

    def make(canvas: Canvas, step: int, purpose: str = "views") -> list[Tensor]:
        images = [torch.from_numpy(canvas.image(n)).permute(2, 0, 1) for n in range(len(canvas))]
        batches = []
        with torch.random.fork_rng(devices=[]):
            for number in range(count):
                torch.manual_seed(stream(config.seed, purpose, step, number))
                batches.append(torch.stack([view(image) for image in images]).to(canvas.device))
        return batches

    return make


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """SIGTERM and Ctrl-C ask the loop to save and stop; a second Ctrl-C interrupts at once."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True

    try:
        previous = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not in the main thread: signals are somebody else's business
        previous = {}
    try:
        yield lambda: asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def friendly_memory_errors(config: Config) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error)
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            if "can't allocate memory" not in text and "out of memory" not in text:
                raise
        raise AntipodeError(
            f"out of memory. Lower --batch-size (now {config.batch_size}), --image-size (now {config.image_size}) or "
            f"--queue-size (now {config.queue_size}), or use a smaller --backbone (now {config.backbone}); "
            f"with --resident false the images stay on the disk. ({text.splitlines()[0] if text else 'no details'})"
        ) from error
