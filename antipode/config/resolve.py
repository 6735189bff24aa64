"""Layers of settings, laid over each other: defaults < method < recipe or sizes < file < what was given.

Every value knows which layer it came from. A wrong one is refused with the field's name, what was given, what
is allowed and the nearest name; all mistakes are told at once.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from antipode.config.catalogue import METHODS, NORMALISATIONS, Patch, combined, family_of
from antipode.config.families import FAMILIES, FIELDS, Config, ContrastiveConfig, families_of
from antipode.config.recipes import RECIPES
from antipode.config.sizing import Facts, sized
from antipode.errors import UsageError, nearest
from antipode.modules.names import check_backbone
from antipode.views.policies import POLICIES, VIEWS, Policy


@dataclass(frozen=True)
class Layer:
    """Some settings and where they come from."""

    origin: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Resolved:
    config: Config
    origins: dict[str, str]  # field -> layer; "default" where no layer set it


def check_name(field: str, value: str, allowed: Iterable[str]) -> None:
    allowed = list(allowed)
    if value not in allowed:
        raise UsageError(f"{field}: {value!r} is not known.{nearest(value, allowed)} Allowed: {', '.join(allowed)}.")


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Settings from a TOML or JSON file."""
    path = Path(path)
    try:
        text = path.read_text()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"config: {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # both decoders raise subclasses of it
        raise UsageError(f"config: {path} is not valid {path.suffix.lstrip('.') or 'toml'}: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"config: {path} must hold a table of fields.")
    return values


def recipe_of(data: str) -> str | None:
    """The recipe that a data set's name implies: cifar10=/data/c has cifar10's."""
    name = data.partition("=")[0].removesuffix("-unlabelled")
    return name if name in RECIPES else None


def merge(layers: Iterable[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    """Later layers win. lr and base_lr are two ways to say one thing: the later of them wins whole."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        given = dict(layer.values)
        if given.get("lr") is not None and given.get("base_lr") is not None:
            raise UsageError(f"lr and base_lr are both set by {layer.origin}: give one of them.")
        if given.get("lr") is not None:
            given["base_lr"] = None
        elif given.get("base_lr") is not None:
            given["lr"] = None
        values.update(given)
        origins.update(dict.fromkeys(given, layer.origin))
    return values, origins


def explain(error: ValidationError, method: str = "") -> str:
    """All mistakes of a configuration, one a line. method: what it configures."""
    lines = []
    for problem in error.errors():
        name = str(problem["loc"][0]) if problem["loc"] else ""
        if problem["type"] == "extra_forbidden" and method and families_of(name):
            others = " and ".join(families_of(name))
            lines.append(f"{name}: it is a field of {others} methods; {method} is a {family_of(method)} method.")
        elif problem["type"] == "extra_forbidden":
            lines.append(f"{name}: there is no such field.{nearest(name, FIELDS)}")
        elif problem["type"] == "missing":
            lines.append(f"{name}: it must be given.")
        elif not name:
            lines.append(problem["msg"].removeprefix("Value error, ") + ".")
        else:
            message = problem["msg"].replace("Input should", "it should", 1).removeprefix("Value error, ")
            lines.append(f"{name}: given {problem['input']!r}; {message}.")
    return "\n".join(dict.fromkeys(lines))


def resolve(given: Layer, *, file: Layer | None = None, facts: Facts | None = None) -> Resolved:
    """The whole configuration of a run.

    `facts` size a run whose data has no recipe. Before they are known its sizes are provisional, and what must hold
    between sizes is not yet checked. A number of negatives K makes the queue hold K keys or, where a batch is larger,
    the last batch, of which K are drawn (EqCo 2.3).
    """
    user = [layer for layer in (file, given) if layer is not None]
    named, _ = merge(user)
    for field in ("method", "data"):
        if named.get(field) is None:
            raise UsageError(f"{field}: it must be given.")
    method, data = str(named["method"]), str(named["data"])
    for part in method.split("+"):
        check_name("method", part, METHODS)
    known = FAMILIES[family_of(method)].model_fields
    own = combined(method, {name: entry.patch for name, entry in METHODS.items()})
    recipe = named["recipe"] if named.get("recipe") else recipe_of(data)
    layers = [Layer(f"method {method}", own)]
    if recipe is not None:
        check_name("recipe", recipe, RECIPES)
        patches = RECIPES[recipe]
        common = {name: value for name, value in patches["*"].items() if name in known}
        layers.append(Layer(f"recipe {recipe}", {**common, **combined(method, patches), "recipe": recipe}))
    values, origins = merge([*layers, *user])
    config = validate(values, provisional=recipe is None)
    if recipe is None and facts is not None:
        origin = f"sized for {facts.count:,} images of {facts.side} pixels on {'CUDA' if facts.cuda else 'a CPU'}"
        sizes = sized(facts, own, {name: getattr(config, name) for name in named})
        layers.append(Layer(origin, {name: value for name, value in sizes.items() if name in known}))
        values, origins = merge([*layers, *user])
        config = validate(values)
    if isinstance(config, ContrastiveConfig) and config.negatives is not None and "queue_size" not in named:
        layers.append(Layer(f"{config.negatives} negatives", {"queue_size": max(config.negatives, config.batch_size)}))
        values, origins = merge([*layers, *user])
        config = validate(values, provisional=recipe is None and facts is None)
    return Resolved(config, {name: origins.get(name, "default") for name in FIELDS if name in known})


def validate(values: dict[str, Any], provisional: bool = False) -> Config:
    """A configuration of the method's family, or all that is wrong with it."""
    method = str(values["method"])
    try:
        config = FAMILIES[family_of(method)].model_validate(values, context="provisional" if provisional else None)
    except ValidationError as error:
        raise UsageError(explain(error, method)) from None
    check_name("views", config.views, [*VIEWS, *POLICIES, "custom"])
    check_name("normalise", config.normalise, ["computed", *NORMALISATIONS])
    check_backbone(config.backbone)
    normalisation(config)
    policies(config)  # their ranges are checked here, before anything starts
    return config


def normalisation(config: Config) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and deviation that are given or named; None where they are to be computed."""
    if config.mean is not None and config.std is not None:
        return config.mean, config.std
    if config.normalise == "computed":
        return None
    return named_normalisation(config.normalise, config.channels)


def named_normalisation(name: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    mean, std = NORMALISATIONS[name]
    if len(mean) == 1:
        return mean * channels, std * channels
    if len(mean) != channels:
        raise UsageError(f"normalise: {name} is for {len(mean)} channels and there are {channels}. Use computed.")
    return mean, std


def policies(config: Config) -> list[Policy]:
    """The policies of the first view, the second ..., with the parameters that the configuration changes in all of
    them. Where there are more views than policies, they take turns."""
    base = [POLICIES[name] for name in VIEWS.get(config.views, (config.views,)) if name != "custom"]
    changes: Patch = {
        name: getattr(config, name) for name in Policy.__dataclass_fields__ if getattr(config, name, None) is not None
    }
    try:
        return [replace(policy, **changes) for policy in base]
    except ValueError as error:
        raise UsageError(str(error)) from None


def as_table(resolved: Resolved) -> list[tuple[str, str, str]]:
    """(field, value, origin) for every field, for people."""
    values = resolved.config.model_dump(mode="json")
    return [(name, json.dumps(values[name]), origin) for name, origin in resolved.origins.items()]
