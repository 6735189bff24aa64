"""The public names and signatures, held against tests/public_surface.txt.

A room's `__all__` names its public modules, and the `__all__` of a public module its public names. After a change that
is meant, write the snapshot anew and say in CHANGELOG.md what users must change:

    python tests/test_public_surface.py
"""

from __future__ import annotations

import difflib
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

SNAPSHOT = Path(__file__).with_name("public_surface.txt")
PACKAGE = Path(__file__).parents[1] / "unitsphere"
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
COMMAND = "python tests/test_public_surface.py"


def surface() -> list[str]:
    """One line a name: where it stands, what it is, what it takes."""
    return [*lines_of(import_module("unitsphere")), *(line for room in ROOMS for line in of_room(f"unitsphere.{room}"))]


def of_room(name: str) -> list[str]:
    room = import_module(name)
    lines: list[str] = []
    for each in room.__all__:
        path = PACKAGE.parent.joinpath(*name.split("."), each)
        if path.is_dir():
            lines += of_room(f"{name}.{each}")
        elif path.with_suffix(".py").is_file():
            lines += lines_of(import_module(f"{name}.{each}"))
        else:
            lines.append(described(f"{name}.{each}", getattr(room, each)))
    return lines


def lines_of(module: ModuleType) -> list[str]:
    """The names of a module, and of its own classes the methods."""
    lines = []
    for name in sorted(module.__all__):
        value, full = getattr(module, name), f"{module.__name__}.{name}"
        lines.append(described(full, value))
        own = inspect.isclass(value) and value.__module__ == module.__name__  # else its own module tells
        for member, inner in sorted(vars(value).items()) if own else []:
            inner = inner.__func__ if isinstance(inner, classmethod | staticmethod) else inner
            if not member.startswith("_") and (inspect.isfunction(inner) or isinstance(inner, property)):
                lines.append(described(f"{full}.{member}", inner))
    return lines


def described(name: str, value: Any) -> str:
    if inspect.isclass(value) and issubclass(value, BaseModel):
        return f"{name}: model of {', '.join(value.model_fields)}"
    if inspect.isclass(value) and issubclass(value, Exception):
        return f"{name}: {value.__mro__[1].__name__}"
    if isinstance(value, property):
        return f"{name}: property"
    if inspect.isclass(value):
        maker = next(each for each in value.__mro__ if {"__init__", "__new__"} & set(vars(each)))
        if not maker.__module__.startswith("unitsphere."):
            return f"{name}: {value.__mro__[1].__name__}"  # its parameters are those of another package
    if callable(value):
        text = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))  # an address is another in each run
        text = re.sub(r"ForwardRef\('([^']*)'[^)]*\)", r"'\1'", text)
        return name + re.sub(r"(: |-> )(['\"])(.*?)\2", r"\1\3", text)
    return f"{name}: {type(value).__name__}"


def test_the_public_names_and_signatures_are_those_of_the_snapshot():
    now, before = surface(), SNAPSHOT.read_text().splitlines()
    changed = [line for line in difflib.unified_diff(before, now, lineterm="", n=0) if re.match(r"[+-][^+-]", line)]
    if changed:
        pytest.fail(
            "the public surface is another than tests/public_surface.txt has:\n"
            + "\n".join(changed)
            + f"\nIf that is meant, write it anew with `{COMMAND}`, and say in CHANGELOG.md what users must change.",
            pytrace=False,
        )


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_names_its_public_modules_and_they_their_names(room):
    """`of_room` fails where a name in an `__all__` is nowhere; a star import must give exactly these names."""
    module = import_module(f"unitsphere.{room}")
    assert list(module.__all__) == sorted(module.__all__)
    given: dict[str, Any] = {}
    exec(f"from unitsphere.{room} import *", given)
    assert set(given) - {"__builtins__"} == set(module.__all__)


def test_what_readme_docs_and_examples_import_is_public():
    names = {re.split(r"[:( ]", line)[0] for line in surface()}
    texts = [*PACKAGE.parent.glob("*.md"), *PACKAGE.parent.glob("docs/*.md"), *PACKAGE.parent.glob("examples/*.py")]
    asked = {
        f"{module}.{name.strip()}"
        for path in texts
        for module, found in re.findall(r"^from (unitsphere[\w.]*) import ([\w, ]+)$", path.read_text(), re.MULTILINE)
        for name in found.split(",")
    }
    assert len(asked) > 15 and asked <= names


def test_a_changed_signature_and_a_lost_name_are_seen(monkeypatch):
    before = surface()
    monkeypatch.setattr("unitsphere.modules.slow_copy.follow", lambda target, source: None)
    monkeypatch.setattr("unitsphere.data.loader.__all__", ["Loader"])
    lost = {line.partition("(")[0] for line in set(before) - set(surface())}
    assert lost == {"unitsphere.modules.slow_copy.follow", "unitsphere.data.loader.channel_statistics"}


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(surface()) + "\n")
    print(f"wrote {SNAPSHOT}")
