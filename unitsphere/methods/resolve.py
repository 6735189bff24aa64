"""From what was asked to a whole configuration, every value of which knows where it came from.

A wrong field is refused with its name, what was given, what is allowed and the nearest name; all mistakes at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from unitsphere.common.errors import UsageError, check_word, nearest
from unitsphere.config.config import Config
from unitsphere.config.images import NORMALISATIONS, normalisation, policies
from unitsphere.config.layers import Layer, Patch, merge
from unitsphere.config.recipes import RECIPES, recipe_of
from unitsphere.config.sizing import Facts, sized
from unitsphere.config.unused import why_unused
from unitsphere.methods.catalogue import FIELDS, disputes, families_of, find_method
from unitsphere.methods.declaration import Method
from unitsphere.modules.names import check_backbone
from unitsphere.views.policies import POLICIES, VIEWS


@dataclass(frozen=True)
class Resolved:
    """A whole configuration. origins: where each field's value is from ("default" where no layer set it). given: the
    fields that the user named in this call."""

    method: Method
    config: Config
    origins: dict[str, str]
    given: frozenset[str] = frozenset()

    @property
    def notes(self) -> list[str]:
        """What a person should know of these settings before the run starts."""
        reasons = {name: self.why_unused(name) for name in sorted(self.given) if name in self.origins}
        unused = [f"{name} has no effect: {reason}." for name, reason in reasons.items() if reason]
        return [*self.config.notes, *unused]

    def why_unused(self, field: str) -> str:
        """Say why a field has no effect; empty where it has one."""
        return why_unused(self.config, field, self.method.unused)

    def with_facts(self, found: Mapping[str, Any], origin: str) -> Resolved:
        """Fill in what the data has told since: values that need no check."""
        config = self.config.model_copy(update=dict(found))
        return replace(self, config=config, origins=self.origins | dict.fromkeys(found, origin))


@dataclass(frozen=True)
class Request:
    """What was asked, checked as far as it can be without the data.

    named: the fields that file and user name, with their values. provisional: the configuration without what follows
    from sizes, from the length of the run or from the data.
    """

    method: Method
    name: str
    given: Layer
    user: tuple[Layer, ...]
    named: dict[str, Any]
    recipe: str | None
    provisional: Config

    def resolve(self, facts: Facts | None = None) -> Resolved:
        """The whole configuration. facts: these size a run whose data has no recipe; without them its sizes are
        provisional, and what must hold between sizes is not checked."""
        about, Config = self.method.about, self.method.Config
        layers = layers_of(self.method, self.name, self.recipe)

        def values() -> dict[str, Any]:
            """All fields as they stand now."""
            defaults = {name: field.default for name, field in Config.model_fields.items()}
            return defaults | merge([*layers, Layer("named", self.named)])[0]

        if self.recipe is not None:
            if lengths := about.lengths.get(self.recipe):
                epochs = values()["epochs"]
                length = min(lengths, key=lambda known: abs(math.log(known / epochs)))
                layers.append(Layer(f"{self.name} for {length} epochs", lengths[length]))
        elif facts is not None:
            origin = f"sized for {facts.count:,} images of {facts.side} pixels on {'CUDA' if facts.cuda else 'a CPU'}"
            sizes = sized(facts, about.defaults, self.named)
            layers.append(Layer(origin, sizes | self.method.size(sizes, facts, self.named)))
        for origin, patch in self.method.follow(values(), self.named).items():
            layers.append(Layer(origin, patch))
        now = values()
        if now["norm"] != "batch" and "head_norm" in now and "head_norm" not in self.named:
            layers.append(Layer(f"norm {now['norm']}", {"head_norm": now["norm"]}))
        if now["warmup_epochs"] >= now["epochs"] and "warmup_epochs" not in self.named:
            layers.append(Layer(f"shortened to fit {now['epochs']} epochs", {"warmup_epochs": now["epochs"] / 10}))
        if facts is not None and facts.classes is not None and now.get("class_count", 0) is None:
            layers.append(Layer("the data's labels", {"class_count": facts.classes}))
        merged, origins = merge([*layers, *self.user])
        config = validate(self.method, merged, provisional=self.recipe is None and facts is None)
        given = frozenset(name for name, value in self.given.values.items() if value is not None)
        return Resolved(self.method, config, {name: origins.get(name, "default") for name in in_order(Config)}, given)


def layers_of(method: Method, name: str, recipe: str | None) -> list[Layer]:
    """What the method and the recipe set. name: of the method, for the origin."""
    about, fields = method.about, method.Config.model_fields
    layers = [Layer(f"method {name}", about.defaults)]
    if recipe is not None:
        common = {field: value for field, value in RECIPES[recipe].items() if field in fields}
        layers.append(Layer(f"recipe {recipe}", {**common, **about.recipes.get(recipe, {}), "recipe": recipe}))
    return layers


def request(given: Layer, file: Layer | None = None) -> Request:
    """Check what was asked before any data is read.

    given: the settings of this call; only these may name code of a module. file: those of a file.
    """
    user = tuple(layer for layer in (file, given) if layer is not None)
    asked, _ = merge(user)
    for field in ("method", "data"):
        if asked.get(field) is None:
            raise UsageError(f"{field}: it must be given.")
    name, data = str(asked["method"]), str(asked["data"])
    method = find_method(name, given.values.get("method"))
    recipe = asked["recipe"] if asked.get("recipe") else recipe_of(data)
    if recipe is not None:
        check_word("recipe", str(recipe), RECIPES)
    settled = asked.keys() | ({"base_lr"} if asked.get("lr") else set())
    refuse_disputes(name, {field: sides for field, sides in disputes(name, recipe).items() if field not in settled})
    provisional = validate(method, merge([*layers_of(method, name, recipe), *user])[0], provisional=True)
    named = {field: getattr(provisional, field) for field in asked}
    return Request(method, name, given, user, named, recipe, provisional)


def resolve(given: Layer, *, file: Layer | None = None, facts: Facts | None = None) -> Resolved:
    """`request` and `Request.resolve` in one."""
    return request(given, file).resolve(facts)


def refuse_disputes(method: str, disputed: Mapping[str, str]) -> None:
    if disputed:
        lines = [f"  {field} ({sides}): give --{field.replace('_', '-')}" for field, sides in disputed.items()]
        raise UsageError("\n".join([f"method: the parts of {method} differ; say which it shall be:", *lines]))


def validate(method: Method, values: Patch, provisional: bool = False) -> Config:
    """A configuration of the method, or all that is wrong with it."""
    try:
        config = method.Config.model_validate(values, context="provisional" if provisional else None)
    except ValidationError as error:
        raise UsageError(explain(error, method, str(values["method"]))) from None
    if config.views != "custom":
        check_word("views", config.views, [*VIEWS, *POLICIES])
    check_word("normalise", config.normalise, ["computed", *NORMALISATIONS])
    check_backbone(config.backbone)
    normalisation(config)
    policies(config)  # their ranges are checked here, before anything starts
    return config


def in_order(Config: type[Config]) -> list[str]:
    """The fields of a configuration in the order of --help, those of an outside method last."""
    return [name for name in [*FIELDS, *Config.model_fields] if name in Config.model_fields]


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


def explain(error: ValidationError, method: Method | None = None, name: str = "") -> str:
    """All mistakes of a configuration, one a line. method, name: what it configures, where it is a method."""
    known = method.Config.model_fields if method is not None else FIELDS
    lines = []
    for problem in error.errors():
        field = str(problem["loc"][0]) if problem["loc"] else ""
        if problem["type"] == "extra_forbidden" and method is not None and families_of(field):
            others = " and ".join(families_of(field))
            a = f"a {method.family} method" if method.family else "none of these"
            lines.append(f"{field}: it is a field of {others} methods; {name} is {a}.")
        elif problem["type"] == "extra_forbidden":
            option = f" --{field} is an option of the command alone." if field in ("out", "resume", "config") else ""
            lines.append(f"{field}: there is no such field.{option or nearest(field, known)}")
        elif problem["type"] == "missing":
            lines.append(f"{field}: it must be given.")
        elif not field:
            lines.append(problem["msg"].removeprefix("Value error, ") + ".")
        elif problem["type"] == "string_pattern_mismatch":
            lines.append(f"{field}: given {problem['input']!r}; allowed: {known[field].description}.")
        else:
            message = problem["msg"].replace("Input should", "it should", 1).removeprefix("Value error, ")
            lines.append(f"{field}: given {problem['input']!r}; {PROBLEMS.get(problem['type'], message)}.")
    return "\n".join(dict.fromkeys(lines))


def as_table(resolved: Resolved) -> list[tuple[str, str, str]]:
    """(field, value, origin) for every field, for people."""
    values = resolved.config.model_dump(mode="json")
    return [(name, json.dumps(values[name]), origin) for name, origin in resolved.origins.items()]
