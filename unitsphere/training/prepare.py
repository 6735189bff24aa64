"""Before a run starts: what was asked becomes a whole configuration, and the data is opened."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unitsphere.common.devices import pick_device, pick_precision
from unitsphere.common.distributed import world
from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.common.files import refuse_unwritable
from unitsphere.config.config import FREE_ON_RESUME, Config
from unitsphere.config.images import normalisation
from unitsphere.config.layers import Layer, merge
from unitsphere.config.sizing import Facts
from unitsphere.data.images import Images, evenly, refuse_multi_label
from unitsphere.data.loader import Loader, channel_statistics
from unitsphere.data.names import joined
from unitsphere.data.sharing import loader as loader_of
from unitsphere.data.source import open_images, refuse_unnamed_source
from unitsphere.features.extract import extract
from unitsphere.images.decode import BrokenImage, decode
from unitsphere.methods.build import build_learner
from unitsphere.methods.learners.learner import Learner
from unitsphere.methods.resolve import Request, Resolved, request
from unitsphere.methods.supervised import SupervisedConfig
from unitsphere.modules.backbones import refuse_unnamed_code
from unitsphere.modules.names import CUSTOM
from unitsphere.runs.loading import preprocess_of
from unitsphere.runs.record import Record
from unitsphere.runs.run import Run
from unitsphere.training.checkpointer import refuse_edited
from unitsphere.training.loop import Plan


@dataclass
class Prepared:
    """A run that can start. The configuration lacks at most mean and deviation, which need the pixels.

    source: what the images come from: the data's name, or the user's own object. done: steps of the run that is
    continued; None for a new one. seen: the folder as it was looked at. named_backbone: as the user names it in this
    call.
    """

    resolved: Resolved
    images: Images
    source: Any
    done: int | None
    device: torch.device
    precision: str
    plan: Plan
    seen: tuple[bytes | None, tuple[str, ...]] = (None, ())
    named_backbone: str | None = None

    @property
    def config(self) -> Config:
        return self.resolved.config

    @property
    def steps_left(self) -> int:
        return self.plan.steps - (self.done or 0)

    def loader(self, images: Images, progress: Callable[[int], None] | None = None) -> Loader:
        """Photos much larger than a view are decoded at a reduced scale: twice the view's side is kept."""
        return loader_of(
            images,
            channels=self.config.channels,
            depth=self.config.depth,
            reduce_to=2 * self.config.image_size,
            device=self.device,
            resident=self.config.resident,
            workers=self.config.workers,
            max_broken=self.config.max_broken,
            progress=(lambda done, _: progress(done)) if progress else None,
        )

    def features(self, backbone: nn.Module, loader: Loader, indices: Tensor) -> Tensor:
        """A backbone's features of some images, as evaluation would take them; they stay on the device."""
        return extract(
            backbone,
            loader,
            preprocess_of(self.config),
            indices=indices,
            device=self.device,
            precision=self.precision,
            keep_on=self.device,
        )

    def held_out(self) -> Images | None:
        """The images that training never sees; None where none were held out."""
        try:
            return open_split(self.config, self.source, "val")
        except UsageError:
            if self.config.holdout == 0:
                return None
            raise

    def fingerprint(self) -> dict[str, Any]:
        """What tells these images from others: their number and a hash of their names in order."""
        names = hashlib.blake2b(digest_size=16)
        for part in joined(self.images.names):
            names.update(part)
        return {"images": len(self.images), "names": names.hexdigest()}

    def settle_statistics(self, loader: Loader) -> None:
        """Fill in mean and deviation, by name or computed from the images."""
        config = self.config
        if config.mean is not None:
            return
        mean, std = normalisation(config) or channel_statistics(loader)
        found = {"mean": tuple(float(f"{m:.6g}") for m in mean), "std": tuple(float(f"{s:.6g}") for s in std)}
        self.resolved = self.resolved.with_facts(found, f"normalise {config.normalise}")

    def build(self, config: Config | None = None, backbone: nn.Module | None = None) -> Learner:
        """What trains, freshly initialised. config: in place of the run's own. backbone: in place of the configured."""
        config = config or self.config
        learner = build_learner(config, backbone, method=self.resolved.method, named_now=self.named_backbone)
        if config.accumulate > 1:
            learner.split(config.accumulate)
        return learner

    @property
    def record(self) -> Record:
        """What the run leaves for those who use its backbone."""
        return Record.of(self.resolved, self.images.classes if isinstance(self.config, SupervisedConfig) else None)


def prepare(
    run: Run, given: Layer, file: Layer | None, resume: bool, source: Any = None, dry: bool = False
) -> Prepared:
    """Refuse what cannot work before anything starts; open the data; settle every field.

    given: the settings of this call. file: those of a file. source: data given from Python. dry: nothing will start,
    so another run may be there. Nothing is written.
    """
    # What lies in the folder now is looked at again under its lock: another process may start in the meantime.
    seen, exists = run.state(), run.exists()
    if exists and not resume and not dry:
        raise UsageError(
            f"out: {run.path} is a run already. Continue it with --resume (resume=True in Python), or take another "
            "place for the new one."
        )
    if resume and not exists and file is None and "method" not in given.values:
        raise UsageError(f"out: there is no run in {run.path} to resume. Given a method and data, one is started.")
    exists = exists and resume

    # Wrong fields are told before any data is read, and code that only a file names is refused.
    asked = continued(run, given, file) if exists else request(given, file)
    known = asked.provisional
    if exists:
        settled = asked.resolve().config
        refuse_changes(run, settled)
        refuse_edited(run, settled)
    refuse_unnamed_code(known.backbone, given.values.get("backbone"))
    refuse_unnamed_source(known.data, given.values.get("data"))
    refuse_unwritable("out", run.path, run.path)
    source = known.data if source is None else source
    if isinstance(source, str) and source == CUSTOM:
        raise UsageError("data: this run was trained on data given from Python: give the same data again.")

    # The data is opened, and tells its facts: how many images, how large, of how many classes.
    try:
        images = open_split(known, source, "train")
    except UsageError as error:
        if exists and "data" not in given.values:
            raise UsageError(f"{error}\n{run.begun()}") from error
        raise
    if known.needs_labels:
        images = labelled(images)
    device = pick_device(known.device)
    sizes_itself = asked.recipe is None and not exists
    side = median_side(images, known) if sizes_itself else 0
    facts = Facts(len(images), side, device.type == "cuda", class_count(images, known))

    # Now every field has a value, except mean and deviation, which need the pixels.
    resolved = asked.resolve(facts if sizes_itself or not exists else None)
    config = resolved.config
    shares = world() * config.accumulate
    if config.batch_size % shares:
        raise UsageError(
            f"batch_size: given {config.batch_size} for {world()} processes and accumulate {config.accumulate}; it is "
            f"over all of them and must be a multiple of {shares}."
        )
    plan = Plan(len(images), config.batch_size, config.epochs, config.seed)
    done = max([0, *(step for step, _ in run.checkpoints())]) if exists else None
    precision = pick_precision(config.precision, device)
    named_backbone = given.values.get("backbone")
    return Prepared(resolved, images, source, done, device, precision, plan, seen, named_backbone)


def continued(run: Run, given: Layer, file: Layer | None) -> Request:
    """What is asked of a run that goes on: its own settings, those of a file, those of this call."""
    own = Layer(str(run.config_file), run.saved)
    try:
        return request(given, Layer(own.origin, merge([own, file] if file else [own])[0]))
    except UsageError:
        named = {name: given.values[name] for name in ("method",) if name in given.values}
        try:
            request(Layer("given", named), own)
        except UsageError as error:  # the mistake is not in what is asked now
            raise UsageError(f"{own.origin} is damaged or of another version:\n{error}") from error
        raise


def refuse_changes(run: Run, config: Config) -> None:
    """A run that goes on keeps what it computes; it may only become longer."""
    saved, wanted = run.saved, config.model_dump(mode="json")
    changed = [name for name in saved if wanted.get(name) != saved[name] and name not in FREE_ON_RESUME]
    if changed:
        lines = [f"{name}: the run has {saved[name]!r}, given is {wanted.get(name)!r}." for name in changed]
        free = ", ".join(sorted(FREE_ON_RESUME & saved.keys()))
        raise UsageError("\n".join([*lines, f"A resumed run keeps its settings; these may change: {free}."]))
    if config.epochs < saved["epochs"]:
        raise UsageError(
            f"epochs: given {config.epochs}, but the run has {saved['epochs']}, and a resumed run can only go on for "
            "longer. To end it early, stop it (Ctrl-C saves) and use it as it is: evaluate, embed and --init take its "
            "latest checkpoint. A schedule of fewer epochs is another run."
        )


def class_count(images: Images, config: Config) -> int | None:
    """How many classes a supervised method must tell apart; None for all others."""
    if not isinstance(config, SupervisedConfig):
        return None
    assert images.labels is not None
    highest, asked = int(images.labels.max()) + 1, config.class_count
    if asked is not None and asked < highest:
        raise UsageError(f"class_count: given {asked}, but the labels of {images.name} go up to {highest - 1}.")
    return len(images.classes) if images.classes else highest


def labelled(images: Images) -> Images:
    """Those that have a label, for a method that needs them."""
    if images.labels is None:
        raise UsageError(f"data: {images.name} has no labels, and this method needs them.")
    refuse_multi_label(images, "data: this method")
    known = images if (images.labels >= 0).all() else images.subset(np.flatnonzero(images.labels >= 0))
    if known.labels is None or len(np.unique(known.labels)) < 2:
        raise UsageError(f"data: the images of {images.name} are of one class, and this method tells classes apart.")
    return known


def open_split(config: Config, source: Any, split: str) -> Images:
    """The images of a split. Which these are does not follow the run's seed: runs with other seeds compare."""
    return open_images(
        source,
        split,
        holdout=config.holdout,
        classes=config.classes,
        fraction=config.fraction,
        max_pixels=config.max_pixels,
    )


def median_side(images: Images, config: Config, sample: int = 64) -> int:
    """Median of the shorter side over a few images, for choosing sizes."""
    sides, reason = [], ""
    for index in evenly(len(images), sample):
        try:
            image = decode(images.read(int(index)), channels=config.channels, depth=config.depth)
            sides.append(min(image.shape[:2]))
        except (BrokenImage, OSError) as error:
            reason = f"{images.names[int(index)]}: {error}"
    if not sides:
        raise UnitsphereError(f"none of the images of {images.name} that were tried can be read. {reason}")
    return int(np.median(sides))
