"""Backbones from wherever they are: a run, a checkpoint, a file of weights, torchvision, or nowhere (random)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from unitsphere.common.errors import UnitsphereError, UsageError, nearest
from unitsphere.common.randomness import stream
from unitsphere.config.resolve import Config, Layer, named_normalisation, resolve
from unitsphere.methods.build import build_learner
from unitsphere.modules.backbones import build_backbone, timm_backbone, torchvision_backbone
from unitsphere.modules.encoder import Encoder
from unitsphere.modules.names import CUSTOM, RESNETS
from unitsphere.runs.checkpoint import load_checkpoint, part
from unitsphere.runs.run import Run
from unitsphere.views.evaluation import Preprocess

Spec = str | os.PathLike[str]
ONLINE = "method.online."
BACKBONE = ONLINE + "backbone."


@dataclass(frozen=True)
class Loaded:
    """A backbone in eval mode, what its input must look like, and where it comes from. config: of the training, where
    it is from a run or a checkpoint."""

    backbone: nn.Module
    preprocess: Preprocess
    name: str
    epoch: int | None = None
    seed: int | None = None
    config: Config | None = None
    run: Run | None = None


# Of weights that are no run, unless given.
ARCHITECTURE: dict[str, Any] = {"backbone": "resnet50", "stem": "imagenet", "image_size": 224, "channels": 3}


def load(spec: Spec | nn.Module, *, features: str = "backbone", seed: int = 0, **architecture: Any) -> Loaded:
    """What `evaluate` and `embed` look at. spec: a run's folder, one of its checkpoints, a file of weights,
    `random`, `pixels` (no backbone at all), `torchvision:NAME` (its ImageNet weights), or a module.

    A run knows its architecture and its preprocessing; for all the others they are ARCHITECTURE's unless given.
    features: `backbone`, or `embedding` for a run's backbone and head together.
    """
    given = {name: value for name, value in architecture.items() if value is not None}
    check_architecture(given)
    backbone, stem, image_size, channels = (ARCHITECTURE | given).values()
    plain = preprocess_for(image_size, named_normalisation("imagenet" if channels == 3 else "half", channels), channels)
    if isinstance(spec, nn.Module):
        backbone_only(features, type(spec).__name__)
        return Loaded(spec, plain, type(spec).__name__)
    name = os.fspath(spec)
    path = Path(name)
    if path.is_dir():
        run = Run.open(path)
        return from_checkpoint(*run.latest(), name=name, features=features, run=run, given=given)
    tensors, meta = read_weights(path) if path.is_file() else ({}, {})
    if "config" in meta:
        return from_checkpoint(tensors, meta, name=name, features=features, given=given)
    backbone_only(features, name)
    if name == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream(seed, "init"))
            module = build_backbone(backbone, channels=channels, stem=stem)
        return Loaded(module.eval(), plain, f"random {backbone}", epoch=0, seed=seed)
    if name == "pixels":
        unchanged = (0.0,) * channels, (1.0,) * channels
        return Loaded(nn.Flatten(), preprocess_for(image_size, unchanged, channels), "raw pixels", epoch=0, seed=seed)
    if name.removeprefix("torchvision:") in RESNETS and not tensors:
        if channels != 3:
            raise UsageError(f"channels: given {channels}, but the weights of {name} are for 3.")
        return Loaded(pretrained_torchvision(name.removeprefix("torchvision:")).eval(), plain, name)
    if not tensors:
        raise UsageError(
            f"{name!r} is no run, file of weights or known backbone. Allowed: a run's folder, a checkpoint, a file of "
            "weights, random, pixels, torchvision:NAME."
        )
    module = build_backbone(backbone, channels=channels, stem=stem)
    fill(module, tensors, name)
    return Loaded(module.eval(), plain, name)


def check_architecture(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name not in ARCHITECTURE:
            known = ", ".join(ARCHITECTURE)
            raise UsageError(f"{name}: there is no such setting.{nearest(name, ARCHITECTURE)} Of weights: {known}.")
        if isinstance(value, int) and value < 1:
            raise UsageError(f"{name}: given {value}; it must be at least 1.")


def refuse_another(given: Mapping[str, Any], config: Config, name: str) -> None:
    for setting, value in given.items():
        if value != getattr(config, setting):
            raise UsageError(f"{setting}: given {value!r}, but {name} has {getattr(config, setting)!r}. Leave it out.")


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
    """given: of its architecture, which the checkpoint knows itself."""
    config = resolve(Layer(name, meta["config"])).config
    refuse_another(given, config, name)
    if config.backbone == CUSTOM:
        raise UsageError(
            f"{name} was trained with a module given from Python, which its checkpoint cannot rebuild. "
            "Build the module and give it to unitsphere.load_backbone(run, into=module)."
        )
    encoder = build_learner(config).online
    assert isinstance(encoder, Encoder)
    encoder.load_state_dict(part(tensors, ONLINE))
    module = encoder if features == "embedding" else encoder.backbone
    return Loaded(module.eval(), preprocess_of(config), name, meta["epoch"], config.seed, config, run)


def load_backbone(run: Spec | Run, *, into: nn.Module | None = None) -> nn.Module:
    """The backbone of a run, as a plain nn.Module in eval mode. `into`: a module of the same architecture to fill."""
    if into is None:
        return load(run).backbone
    path = Path(run)
    tensors, _ = Run.open(path).latest() if path.is_dir() else load_checkpoint(path)
    into.load_state_dict(part(tensors, BACKBONE))
    return into.eval()


def load_transform(run: Spec | Run) -> Preprocess:
    """What turns an image into the input of the run's backbone: size, mean, deviation."""
    path = Path(run)
    if path.is_file():
        _, meta = load_checkpoint(path)
        if "config" not in meta:
            raise UsageError(f"{path} holds weights alone: only runs and their checkpoints know their preprocessing.")
        return preprocess_of(resolve(Layer(str(path), meta["config"])).config)
    return preprocess_of(Run.open(path).config)


def preprocess_of(config: Config) -> Preprocess:
    assert config.mean is not None and config.std is not None
    return preprocess_for(config.image_size, (config.mean, config.std), config.channels, config.depth)


def preprocess_for(
    size: int, statistics: tuple[tuple[float, ...], tuple[float, ...]], channels: int, depth: int = 8
) -> Preprocess:
    """Test-time preprocessing: large images are resized to 256/224 of the size and cropped, small ones only resized."""
    mean, std = statistics
    resize = round(size * 256 / 224) if size > 64 else size
    return Preprocess(size=size, resize=resize, mean=mean, std=std, channels=channels, depth=depth)


def pretrained_torchvision(name: str) -> nn.Module:
    try:
        return torchvision_backbone(name, 3, "imagenet", weights="DEFAULT")
    except OSError as error:
        raise UnitsphereError(f"the weights of torchvision's {name} cannot be downloaded: {error}") from error


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Named tensors of a .safetensors file, or of a torch file that holds nothing but tensors; and what a checkpoint
    says of itself."""
    if path.suffix == ".safetensors":
        return load_checkpoint(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(
            f"{path} holds no plain weights (only tensors are read, nothing is unpickled): {error}"
        ) from error
    while isinstance(content, dict) and isinstance(content.get("state_dict", content.get("model")), dict):
        content = content.get("state_dict", content.get("model"))
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds a {type(content).__name__}; named tensors are needed: save a state_dict().")
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}, {}


def fill(module: nn.Module, tensors: dict[str, Tensor], name: str) -> None:
    """Load a backbone's weights under whatever prefix they stand; a classifier's own weights are ignored."""
    wanted = module.state_dict()
    first = next(iter(wanted))
    prefixes = [key.removesuffix(first) for key in tensors if key.endswith(first)]
    for prefix in sorted(prefixes, key=len):
        found = {key: value for key, value in part(tensors, prefix).items() if key in wanted}
        counters = {key for key in wanted if key.endswith("num_batches_tracked")}
        if found.keys() | counters >= wanted.keys():
            refuse_lost_statistics(part(tensors, prefix).keys() - wanted.keys(), wanted.keys(), name)
            try:
                module.load_state_dict(found, strict=False)
                return
            except RuntimeError as error:
                raise UsageError(f"{name} does not fit the backbone: {error}") from error
    missing = [key for key in wanted if key not in tensors]
    raise UsageError(
        f"{name} does not fit the backbone: {len(missing)} of {len(wanted)} weights are missing, "
        f"{missing[0]} among them."
    )


def refuse_lost_statistics(unused: Set[str], wanted: Set[str], name: str) -> None:
    """Weights that were trained under batch norm compute something else under a norm that has no statistics."""
    norms = [key.removesuffix("running_mean") for key in unused if key.endswith("running_mean")]
    lost = sorted(norm for norm in norms if f"{norm}weight" in wanted)
    if lost:
        raise UsageError(
            f"{name} does not fit the backbone: it has {len(lost)} batch norms ({lost[0].removesuffix('.')} is one) "
            "where the backbone has another norm. Use --norm batch, or begin without these weights."
        )


def initialise(backbone: nn.Module, init: str, channels: int) -> None:
    """`--init`: fill a fresh backbone for images of so many channels with the weights of a run, a file, torchvision or
    timm."""
    if init.startswith("timm:"):
        fill(backbone, timm_backbone(init.removeprefix("timm:"), channels, pretrained=True).state_dict(), init)
    elif init.removeprefix("torchvision:") in RESNETS:
        fill(backbone, pretrained_torchvision(init.removeprefix("torchvision:")).state_dict(), init)
    elif Path(init).is_dir():
        fill(backbone, part(Run.open(init).latest()[0], BACKBONE), init)
    elif Path(init).is_file():
        tensors, _ = read_weights(Path(init))
        fill(backbone, part(tensors, BACKBONE) or tensors, init)  # of a checkpoint, the online backbone
    else:
        raise UsageError(f"init: {init!r} is no run and no file. Allowed: torchvision:NAME, timm:NAME, a file, a run.")
