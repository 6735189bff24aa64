"""Backbones from wherever they are: a run, a checkpoint, a file of weights, torchvision, timm, or nowhere (random)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from unitsphere.common.errors import UsageError, nearest
from unitsphere.common.randomness import stream
from unitsphere.config.config import Config
from unitsphere.config.images import Statistics, named_normalisation
from unitsphere.modules.backbones import build_backbone, feature_dim, refuse_unnamed_code
from unitsphere.modules.encoder import Encoder
from unitsphere.modules.heads import projection_head
from unitsphere.modules.image_norms import use_norm
from unitsphere.modules.names import CUSTOM
from unitsphere.runs.record import Record
from unitsphere.runs.run import Run
from unitsphere.views.evaluation import Preprocess
from unitsphere.weights.files import load_tensors, read_weights
from unitsphere.weights.names import fill, part, published

__all__ = ["Loaded", "load", "load_backbone", "load_transform"]

Spec = str | os.PathLike[str]
ONLINE = "method.online."
BACKBONE = ONLINE + "backbone."


@dataclass(frozen=True)
class Loaded:
    """A backbone in eval mode, what its input must look like, and where it comes from. record: of the training, where
    it is from a run or a checkpoint."""

    backbone: nn.Module
    preprocess: Preprocess
    name: str
    epoch: int | None = None
    seed: int | None = None
    record: Record | None = None
    run: Run | None = None


# The architecture of weights that are no run, unless it is given.
ARCHITECTURE: dict[str, Any] = {"backbone": "resnet50", "stem": "imagenet", "image_size": 224, "channels": 3}


def load(spec: Spec | nn.Module, *, features: str = "backbone", seed: int = 0, **architecture: Any) -> Loaded:
    """Load what `evaluate` and `embed` look at.

    spec: a run's folder, one of its checkpoints, a file of weights, `random`, `pixels` (no backbone at all),
    `torchvision:NAME` (its ImageNet weights), or a module. A run knows its architecture and its preprocessing; for all
    others they are ARCHITECTURE's unless given. A backbone that is code of a module is imported only if it is given.
    features: `backbone`, or `embedding` for a run's backbone and head together.
    """
    given = {name: value for name, value in architecture.items() if value is not None}
    check_architecture(given)
    if isinstance(spec, nn.Module):
        backbone_only(features, type(spec).__name__)
        return Loaded(spec, assumed(given), type(spec).__name__)
    name = os.fspath(spec)
    path = Path(name)
    if path.is_dir():
        run = Run.open(path)
        return from_checkpoint(*run.latest(), name=name, features=features, run=run, given=given)
    tensors, meta = read_weights(path) if path.is_file() else ({}, {})
    if "config" in meta or "record" in meta:
        return from_checkpoint(tensors, meta, name=name, features=features, given=given)
    backbone_only(features, name)
    backbone, stem, image_size, channels = (ARCHITECTURE | given).values()
    plain = assumed(given)
    if name == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream(seed, "init"))
            module = build_backbone(backbone, channels=channels, stem=stem, named_now=given.get("backbone"))
        return Loaded(module.eval(), plain, f"random {backbone}", epoch=0, seed=seed)
    if name == "pixels":
        unchanged = (0.0,) * channels, (1.0,) * channels
        return Loaded(nn.Flatten(), preprocess_for(image_size, unchanged, channels), "raw pixels", epoch=0, seed=seed)
    if not tensors and not name.startswith("timm:") and (weights := published(name, channels)) is not None:
        return Loaded(weights.eval(), plain, name)
    if not tensors:
        raise UsageError(
            f"{name!r} is no run, file of weights or known backbone. Allowed: a run's folder, a checkpoint, a file of "
            "weights, random, pixels, torchvision:NAME."
        )
    module = build_backbone(backbone, channels=channels, stem=stem, named_now=given.get("backbone"))
    fill(module, tensors, name)
    return Loaded(module.eval(), plain, name)


def assumed(given: Mapping[str, Any]) -> Preprocess:
    """The preprocessing of weights that do not know their own: ImageNet's mean and deviation, at the size given."""
    architecture = {**ARCHITECTURE, **given}
    channels = architecture["channels"]
    statistics = named_normalisation("imagenet" if channels == 3 else "half", channels)
    return preprocess_for(architecture["image_size"], statistics, channels)


def check_architecture(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name not in ARCHITECTURE:
            known = ", ".join(ARCHITECTURE)
            raise UsageError(f"{name}: there is no such setting.{nearest(name, ARCHITECTURE)} Of weights: {known}.")
        if isinstance(value, int) and value < 1:
            raise UsageError(f"{name}: given {value}; it must be at least 1.")


def backbone_only(features: str, name: str) -> None:
    """Only a run knows a head."""
    if features != "backbone":
        raise UsageError(f"features: {features!r} is for runs and their checkpoints; {name} has no head.")


def from_checkpoint(
    tensors: dict[str, Tensor],
    meta: dict[str, Any],
    name: str,
    features: str = "backbone",
    run: Run | None = None,
    given: Mapping[str, Any] = MappingProxyType({}),
) -> Loaded:
    """The backbone of a checkpoint, from its record alone: no method, queue or slow copy is built.

    given: what the user says of its architecture. It must agree with the record.
    """
    record = Record.read(meta, name)
    for setting, value in given.items():
        if value != getattr(record, setting):
            raise UsageError(f"{setting}: given {value!r}, but {name} has {getattr(record, setting)!r}. Leave it out.")
    if record.backbone == CUSTOM:
        raise UsageError(
            f"{name} was trained with a module given from Python, which its checkpoint cannot rebuild. "
            "Build the module and give it to unitsphere.load_backbone(run, into=module)."
        )
    refuse_unnamed_code(record.backbone, given.get("backbone"))
    preprocess = preprocess_of(record)
    with torch.random.fork_rng(devices=[]):
        module = build_backbone(
            record.backbone, channels=record.channels, stem=record.stem, named_now=given.get("backbone")
        )
        if record.norm != "batch":
            use_norm(module, record.norm)
        if features == "embedding":
            module = encoder_of(record, module, name)
    wanted = part(tensors, ONLINE if features == "embedding" else BACKBONE)
    try:
        module.load_state_dict(wanted)
    except RuntimeError as error:
        raise UsageError(f"{name} is damaged: its tensors are not those of its own backbone: {error}") from error
    return Loaded(module.eval(), preprocess, name, meta.get("epoch"), record.seed, record, run)


def encoder_of(record: Record, backbone: nn.Module, name: str) -> Encoder:
    """A fresh backbone and head."""
    head = record.head
    if head is None:
        raise UsageError(
            f"features: 'embedding' is of backbone and head, and {name} ({record.method}) has no head that can be "
            "built again. Use features backbone."
        )
    width = feature_dim(backbone, record.channels, record.image_size)
    return Encoder(backbone, projection_head(head.kind, width, head.dim, head.hidden, head.norm))  # type: ignore[arg-type]


def load_backbone(run: Spec | Run, *, into: nn.Module | None = None, backbone: str | None = None) -> nn.Module:
    """Load the backbone of a run, as a plain nn.Module in eval mode.

    into: a module of the same architecture to fill. backbone: the name of a backbone that is code of a module; it is
    imported only if it is given here.
    """
    if into is None:
        return load(run, backbone=backbone).backbone
    path = Path(run)
    tensors, _ = Run.open(path).latest() if path.is_dir() else load_tensors(path)
    try:
        into.load_state_dict(part(tensors, BACKBONE))
    except RuntimeError as error:
        raise UsageError(f"into: the module is not of the architecture of {path}: {error}") from error
    return into.eval()


def load_transform(run: Spec | Run) -> Preprocess:
    """Load what turns an image into the input of the run's backbone: size, mean, deviation."""
    path = Path(run)
    if not path.is_file():
        return preprocess_of(Run.open(path).record)
    _, meta = load_tensors(path, tensors=False)
    if "config" not in meta and "record" not in meta:
        raise UsageError(f"{path} holds weights alone: only runs and their checkpoints know their preprocessing.")
    return preprocess_of(Record.read(meta, str(path)))


def preprocess_of(seen: Record | Config) -> Preprocess:
    """The preprocessing at test time of a run's images."""
    if seen.mean is None or seen.std is None:
        raise UsageError("mean and std: they are not known yet: the run has not read its images.")
    return preprocess_for(seen.image_size, (seen.mean, seen.std), seen.channels, seen.depth)


def preprocess_for(size: int, statistics: Statistics, channels: int, depth: int = 8) -> Preprocess:
    """Test-time preprocessing: large images are resized to 256/224 of the size and cropped, small ones only resized."""
    mean, std = statistics
    resize = round(size * 256 / 224) if size > 64 else size
    return Preprocess(size=size, resize=resize, mean=mean, std=std, channels=channels, depth=depth)


def initialise(backbone: nn.Module, init: str, channels: int) -> None:
    """`--init`: fill a fresh backbone for images of so many channels with the weights of a run, a file, torchvision or
    timm."""
    path = Path(init)
    if (weights := published(init, channels)) is not None:
        fill(backbone, weights.state_dict(), init)
    elif path.is_dir():
        fill(backbone, part(Run.open(init).latest()[0], BACKBONE), init)
    elif path.is_file():
        tensors, _ = read_weights(path)
        fill(backbone, part(tensors, BACKBONE) or tensors, init)  # of a checkpoint, the online backbone
    else:
        raise UsageError(f"init: {init!r} is no run and no file. Allowed: torchvision:NAME, timm:NAME, a file, a run.")
