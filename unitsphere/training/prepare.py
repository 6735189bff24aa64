"""Before a run starts: what was asked becomes a whole configuration, and the data is opened."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unitsphere.common.devices import pick_device, pick_precision
from unitsphere.common.distributed import world
from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.common.files import refuse_unwritable
from unitsphere.config.families import FIELDS_FREE_ON_RESUME, SupervisedConfig
from unitsphere.config.resolve import Config, Layer, Resolved, merge, normalisation, resolve
from unitsphere.config.sizing import Facts
from unitsphere.data.images import Images, evenly, refuse_multi_label
from unitsphere.data.loader import Loader, channel_statistics
from unitsphere.data.sharing import loader as loader_of
from unitsphere.data.source import open_images
from unitsphere.features.extract import extract
from unitsphere.images.decode import BrokenImage, decode
from unitsphere.runs.run import Run
from unitsphere.training.loop import Plan
from unitsphere.weights.loading import preprocess_of


@dataclass
class Prepared:
    """A run that can start. The configuration lacks at most mean and deviation, which need the pixels."""

    resolved: Resolved
    images: Images
    source: Any  # what the images come from: the data's name, or the user's own object
    done: int | None  # steps of the run that is continued; None for a new one
    device: torch.device
    precision: str
    plan: Plan

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
        names = hashlib.blake2b("\n".join(self.images.names).encode(errors="surrogateescape"), digest_size=16)
        return {"images": len(self.images), "names": names.hexdigest()}

    def settle_statistics(self, loader: Loader) -> None:
        """Fill in mean and deviation, by name or computed from the images."""
        config = self.config
        if config.mean is not None:
            return
        mean, std = normalisation(config) or channel_statistics(loader)
        found = {"mean": [float(f"{m:.6g}") for m in mean], "std": [float(f"{s:.6g}") for s in std]}
        self.resolved = settled(self.resolved, found, f"normalise {config.normalise}")


def prepare(
    run: Run, given: Layer, file: Layer | None, resume: bool, source: Any = None, dry: bool = False
) -> Prepared:
    """Refuse what cannot work before anything starts; open the data; settle every field. dry: nothing will start, so
    another run may be there."""
    exists = run.exists()
    if exists and not resume and not dry:
        raise UsageError(
            f"out: {run.path} is a run already. Continue it with --resume (resume=True in Python), or take another "
            "place for the new one."
        )
    if resume and not exists and file is None and "method" not in given.values:
        raise UsageError(f"out: there is no run in {run.path} to resume. Given a method and data, one is started.")
    exists = exists and resume
    # Wrong fields are told before any data is read.
    resolved = continued(run, given, file) if exists else resolve(given, file=file)
    refuse_unwritable("out", run.path, run.path)
    source = resolved.config.data if source is None else source
    if isinstance(source, str) and source == "custom":
        raise UsageError("data: this run was trained on data given from Python: give the same data again.")
    try:
        images = open_split(resolved.config, source, "train")
    except UsageError as error:
        if exists and "data" not in resolved.given:
            raise UsageError(f"{error}\n{run.begun()}") from error
        raise
    if resolved.config.needs_labels:
        images = labelled(images)
    device = pick_device(resolved.config.device)
    if not exists and resolved.config.recipe is None:
        facts = Facts(len(images), median_side(images, resolved.config), device.type == "cuda")
        resolved = resolve(given, file=file, facts=facts)
    if isinstance(resolved.config, SupervisedConfig):
        assert images.labels is not None
        highest, asked = int(images.labels.max()) + 1, resolved.config.class_count
        if asked is None:
            count = len(images.classes) if images.classes else highest
            resolved = settled(resolved, {"class_count": count}, "the data's labels")
        elif asked < highest:
            raise UsageError(f"class_count: given {asked}, but the labels of {images.name} go up to {highest - 1}.")
    config = resolved.config
    shares = world() * config.accumulate
    if config.batch_size % shares:
        raise UsageError(
            f"batch_size: given {config.batch_size} for {world()} processes and accumulate {config.accumulate}; it is "
            f"over all of them and must be a multiple of {shares}."
        )
    plan = Plan(len(images), config.batch_size, config.epochs, config.seed)
    done = max([0, *(step for step, _ in run.checkpoints())]) if exists else None
    return Prepared(resolved, images, source, done, device, pick_precision(config.precision, device), plan)


def settled(resolved: Resolved, found: dict[str, Any], origin: str) -> Resolved:
    """The configuration with what was found out since."""
    config = resolve(Layer("settled", resolved.config.model_dump(mode="json") | found)).config
    return replace(resolved, config=config, origins=resolved.origins | dict.fromkeys(found, origin))


def labelled(images: Images) -> Images:
    """Those that have a label, for a method that needs them."""
    if images.labels is None:
        raise UsageError(f"data: {images.name} has no labels, and this method needs them.")
    refuse_multi_label(images, "data: this method")
    known = images if (images.labels >= 0).all() else images.subset(np.flatnonzero(images.labels >= 0))
    if known.labels is None or len(np.unique(known.labels)) < 2:
        raise UsageError(f"data: the images of {images.name} are of one class, and this method tells classes apart.")
    return known


def continued(run: Run, given: Layer, file: Layer | None) -> Resolved:
    """The configuration of an existing run, with more epochs if asked; nothing else may change of what it computes."""
    saved = run.config.model_dump(mode="json")
    user = [layer for layer in (file, given) if layer is not None]
    asked, _ = merge(user)
    config = resolve(Layer("given", saved | asked)).config
    wanted = config.model_dump(mode="json")
    changed = [name for name in saved if wanted[name] != saved[name] and name not in FIELDS_FREE_ON_RESUME]
    if changed:
        lines = [f"{name}: the run has {saved[name]!r}, given is {wanted[name]!r}." for name in changed]
        free = ", ".join(sorted(FIELDS_FREE_ON_RESUME & saved.keys()))
        raise UsageError("\n".join([*lines, f"A resumed run keeps its settings; these may change: {free}."]))
    if config.epochs < saved["epochs"]:
        raise UsageError(f"epochs: the run has {saved['epochs']}; a resumed run can only go on for longer.")
    _, origins = merge([Layer(str(run.config_file), wanted), *user])
    return Resolved(config, origins, frozenset(given.values))


def open_split(config: Config, source: Any, split: str) -> Images:
    """The images of a split. Which these are does not follow the run's seed: runs with other seeds compare."""
    return open_images(source, split, holdout=config.holdout, classes=config.classes, fraction=config.fraction)


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
