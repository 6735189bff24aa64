"""The named methods, alone or combined as in jcl+mochi+eqco, and those of other packages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unitsphere.common.errors import UsageError, check_word
from unitsphere.common.outside import installed_names, load_named, names_code
from unitsphere.config.fields import (
    DataFields,
    ModelFields,
    OptimisationFields,
    RunFields,
    RunningFields,
    Section,
    ViewFields,
)
from unitsphere.config.layers import Patch
from unitsphere.config.recipes import RECIPES
from unitsphere.methods import byol, eqco, jcl, mochi, moco, msbreg, simclr, simo, supervised
from unitsphere.methods.contrastive import ContrastiveMethod
from unitsphere.methods.declaration import About, Method
from unitsphere.methods.regression import RegressionMethod
from unitsphere.methods.supervised import SupervisedMethod

__all__ = ["METHODS", "find_method"]

GROUP = "unitsphere.methods"  # entry points of other packages

METHODS: dict[str, Method] = {
    "moco-v1": ContrastiveMethod(moco.V1),
    "moco-v2": ContrastiveMethod(moco.V2),
    "simclr": ContrastiveMethod(simclr.SIMCLR),
    "eqco": ContrastiveMethod(eqco.EQCO),
    "simo": ContrastiveMethod(simo.SIMO),
    "jcl": ContrastiveMethod(jcl.JCL),
    "jcl-vanilla": ContrastiveMethod(jcl.VANILLA),
    "mochi": ContrastiveMethod(mochi.MOCHI),
    "byol": RegressionMethod(byol.BYOL),
    "msbreg": RegressionMethod(msbreg.MSBREG),
    "supervised": SupervisedMethod(supervised.SUPERVISED),
}

BEFORE = (RunFields, DataFields, ViewFields, ModelFields)  # the common sections that --help shows before a method's own
AFTER = (OptimisationFields, RunningFields)


def sections_of(*methods: Method) -> tuple[type[Section], ...]:
    """The sections of fields of these methods, the common ones included, in the order of --help."""
    own = dict.fromkeys(section for method in methods for section in method.sections)
    return (*BEFORE, *own, *AFTER)


SECTIONS = sections_of(*METHODS.values())
FIELDS = {name: field for section in SECTIONS for name, field in section.model_fields.items()}


def find_method(name: str, named_now: str | None) -> Method:
    """The method of a name: one of METHODS, several as in jcl+eqco, an entry point, or `package.module:Class`.

    named_now: the method that the user names in this call. Code of a module is imported only if it is this one: a name
    that stands in a file would run whatever the file's author likes.
    """
    if names_code(name):
        if name != named_now:
            raise UsageError(
                f"method: {name} is code of a module, and a file names it. Nothing is imported unless you name it "
                f"yourself: --method {name} (method={name!r} in Python)."
            )
        return declared(name, load_named("method", name, GROUP))
    parts = name.split("+")
    if len(parts) == 1 and name not in METHODS and name in installed_names(GROUP):
        return declared(name, load_named("method", name, GROUP))
    for part in parts:
        check_word("method", part, METHODS)
    first = METHODS[parts[0]]
    for other in parts[1:]:
        if METHODS[other].family != first.family:
            raise UsageError(
                f"method: {name} cannot be combined: {parts[0]} is a {first.family} method, and {other} a "
                f"{METHODS[other].family} one."
            )
    return first if len(parts) == 1 else type(first)(combined([METHODS[part].about for part in parts]))


def is_outside(name: str) -> bool:
    """Whether a method's name is that of one from another package."""
    return names_code(name) or ("+" not in name and name not in METHODS and name in installed_names(GROUP))


def declared(name: str, found: Any) -> Method:
    """What an outside name stands for, if it declares a method: a subclass of Method, or an instance of one."""
    method = found() if isinstance(found, type) and issubclass(found, Method) else found
    if not isinstance(method, Method) or not isinstance(getattr(method, "about", None), About):
        raise UsageError(
            f"method: {name} is no method: a subclass of unitsphere.Method with `about`, `Config` and `build` is "
            "needed. examples/vicreg.py is one."
        )
    return method


def combined(parts: list[About]) -> About:
    """Merge several methods; where they differ, `disputes` tells, and the user must settle it."""
    names = dict.fromkeys(recipe for part in parts for recipe in part.recipes)
    return About(
        title=" and ".join(part.title for part in parts),
        paper="; ".join(dict.fromkeys(part.paper for part in parts)),
        needs="; ".join(dict.fromkeys(part.needs for part in parts)),
        defaults=merged([part.defaults for part in parts]),
        recipes={name: merged([part.recipes.get(name, {}) for part in parts]) for name in names},
    )


def merged(patches: list[Patch]) -> Patch:
    return {field: value for patch in patches for field, value in patch.items()}


def disputes(name: str, recipe: str | None) -> dict[str, str]:
    """The fields that the parts of a combined method would have different values of, and who would have what."""
    parts = name.split("+")
    sides: dict[str, dict[str, Any]] = {}
    for part in parts if len(parts) > 1 else []:
        about = METHODS[part].about
        layers: list[Mapping[str, Any]] = [about.defaults]
        if recipe is not None:
            layers.append({**RECIPES.get(recipe, {}), **about.recipes.get(recipe, {})})
        for patch in layers:
            for field, value in patch.items():
                sides.setdefault(field, {})[part] = value
    return {
        field: ", ".join(f"{part}: {value}" for part, value in values.items())
        for field, values in sides.items()
        if any(value != next(iter(values.values())) for value in values.values())
    }


def families_of(field: str) -> list[str]:
    """The families whose methods have a field."""
    return list(dict.fromkeys(method.family for method in METHODS.values() if field in method.Config.model_fields))
