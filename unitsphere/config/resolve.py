"""Layers of settings, laid over each other: defaults < method < recipe or sizes < file < what was given.

Every value knows which layer it came from. A wrong one is refused with the field's name, what was given, what
is allowed and the nearest name; all mistakes are told at once.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unitsphere.common.errors import UsageError, check_word, nearest
from unitsphere.config.catalogue import METHODS, NORMALISATIONS, Patch, combined, disputes, family_of
from unitsphere.config.families import FAMILIES, FIELDS, Config, ContrastiveConfig, families_of
from unitsphere.config.idle import idle_notes
from unitsphere.config.recipes import BY_LENGTH, RECIPES
from unitsphere.config.sizing import Facts, sized
from unitsphere.modules.names import check_backbone
from unitsphere.views.policies import POLICIES, VIEWS, Policy


@dataclass(frozen=True)
class Layer:
    """Some settings and where they come from."""

    origin: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Resolved:
    config: Config
    origins: dict[str, str]  # field -> layer; "default" where no layer set it
    given: frozenset[str] = frozenset()  # the fields that the user asked for by name, now

    @property
    def notes(self) -> list[str]:
        """What a person should know of these settings before the run starts."""
        return [*self.config.notes, *idle_notes(self.config, sorted(self.given))]


# pydantic's kinds of mistakes, in words for people
PROBLEMS = {
    "int_parsing": "it should be a whole number",
    "int_from_float": "it should be a whole number",
    "int_type": "it should be a whole number",
    "float_parsing": "it should be a number",
    "float_type": "it should be a number",
    "bool_parsing": "it should be true or false",
    "bool_type": "it should be true or false",
    "string_type": "it should be text",
}


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
            option = f" --{name} is an option of the command alone." if name in ("out", "resume", "config") else ""
            lines.append(f"{name}: there is no such field.{option or nearest(name, FIELDS)}")
        elif problem["type"] == "missing":
            lines.append(f"{name}: it must be given.")
        elif not name:
            lines.append(problem["msg"].removeprefix("Value error, ") + ".")
        elif problem["type"] == "string_pattern_mismatch":
            lines.append(f"{name}: given {problem['input']!r}; allowed: {FIELDS[name].description}.")
        else:
            message = problem["msg"].replace("Input should", "it should", 1).removeprefix("Value error, ")
            lines.append(f"{name}: given {problem['input']!r}; {PROBLEMS.get(problem['type'], message)}.")
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
        check_word("method", part, METHODS)
    known = FAMILIES[family_of(method)].model_fields
    patches = {name: entry.patch for name, entry in METHODS.items()}
    own = combined(method, patches)
    recipe = named["recipe"] if named.get("recipe") else recipe_of(data)
    layers, by_recipe = [Layer(f"method {method}", own)], {}
    if recipe is not None:
        check_word("recipe", recipe, RECIPES)
        by_recipe = RECIPES[recipe]
        common = {name: value for name, value in by_recipe["*"].items() if name in known}
        layers.append(Layer(f"recipe {recipe}", {**common, **combined(method, by_recipe), "recipe": recipe}))
    disputed = disputes(method, patches, by_recipe)
    settled = named.keys() | ({"base_lr"} if named.get("lr") else set())
    refuse_disputes(method, {field: sides for field, sides in disputed.items() if field not in settled})

    def laid(provisional: bool = True) -> Config:
        return validate(merge([*layers, *user])[0], provisional)

    config = laid()
    if presets := BY_LENGTH.get((recipe or "", method)):
        length = min(presets, key=lambda epochs: abs(math.log(epochs / config.epochs)))
        layers.append(Layer(f"{method} for {length} epochs", presets[length]))
        config = laid()
    if recipe is None and facts is not None:
        origin = f"sized for {facts.count:,} images of {facts.side} pixels on {'CUDA' if facts.cuda else 'a CPU'}"
        sizes = sized(facts, own, {name: getattr(config, name) for name in named})
        layers.append(Layer(origin, {name: value for name, value in sizes.items() if name in known}))
        config = laid()
    if isinstance(config, ContrastiveConfig) and config.negatives is not None and "queue_size" not in named:
        layers.append(Layer(f"{config.negatives} negatives", {"queue_size": max(config.negatives, config.batch_size)}))
    if config.norm != "batch" and "head_norm" in known and "head_norm" not in named:
        layers.append(Layer(f"norm {config.norm}", {"head_norm": config.norm}))
    layers.append(Layer(f"shortened to fit {config.epochs} epochs", shortened(config, named)))
    _, origins = merge([*layers, *user])
    config = laid(provisional=recipe is None and facts is None)
    given_names = frozenset(name for name, value in given.values.items() if value is not None)
    return Resolved(config, {name: origins.get(name, "default") for name in FIELDS if name in known}, given_names)


def refuse_disputes(method: str, disputed: Mapping[str, str]) -> None:
    if disputed:
        lines = [f"  {field} ({sides}): give --{field.replace('_', '-')}" for field, sides in disputed.items()]
        raise UsageError("\n".join([f"method: the parts of {method} differ; say which it shall be:", *lines]))


def shortened(config: Config, named: Mapping[str, Any]) -> Patch:
    """Warm-ups that nobody asked for and that would not end within a short run: a tenth of its epochs."""
    fitting = {"warmup_epochs": config.epochs / 10, "mixing_warmup": config.epochs // 10}
    return {
        name: value
        for name, value in fitting.items()
        if name not in named and getattr(config, name, 0) >= config.epochs
    }


def validate(values: dict[str, Any], provisional: bool = False) -> Config:
    """A configuration of the method's family, or all that is wrong with it."""
    method = str(values["method"])
    try:
        config = FAMILIES[family_of(method)].model_validate(values, context="provisional" if provisional else None)
    except ValidationError as error:
        raise UsageError(explain(error, method)) from None
    if config.views != "custom":
        check_word("views", config.views, [*VIEWS, *POLICIES])
    check_word("normalise", config.normalise, ["computed", *NORMALISATIONS])
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
