"""Methods, protocols, sources and backbones from outside the package: code that the user names, or that is installed.

Two forms are known: `package.module:Name`, and the name of an entry point that an installed package declares. Nothing
is imported until a name is chosen. Imports no torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from unitsphere.common.errors import UsageError, check_word, nearest


def names_code(name: str) -> bool:
    """Whether `name` has the form `package.module:Name`, and so is not one of the package's own names."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def installed_names(group: str) -> dict[str, list[EntryPoint]]:
    """List the entry points of a group by name, without importing any. Two packages may declare one name."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value)):
        if entry not in found.setdefault(entry.name, []):
            found[entry.name].append(entry)
    return found


def load_named(
    kind: str, name: str, group: str, expected: type | tuple[type, ...] | None = None, known: Iterable[str] = ()
) -> Any:
    """Import what `name` stands for, and raise UsageError where that fails.

    kind: what is named, as the user's option says it ("protocol"). name: `package.module:Name`, for which the working
    folder is searched too, or an entry point's name. group: of the entry points. expected: the class that the object
    must be an instance or a subclass of. known: the package's own names, for the message about an unknown one.
    Returns the object.
    """
    if names_code(name):
        module, _, attribute = name.partition(":")
        found = _attribute(kind, name, module, attribute)
    else:
        installed = installed_names(group)
        if name not in installed:
            if ":" in name:
                raise UsageError(f"{kind}: given {name!r}. Code from outside is named package.module:Name.")
            check_word(kind, name, [*known, *(each for each in installed if each not in known)])
        entries = installed[name]
        if len(entries) > 1:
            values = " and ".join(entry.value for entry in entries)
            raise UsageError(f"{kind}: several installed packages declare {name!r}: {values}. Give one of these.")
        found = _attribute(kind, name, entries[0].module, entries[0].attr)
    if expected is not None and not _is_a(found, expected):
        classes = expected if isinstance(expected, tuple) else (expected,)
        wanted = " or ".join(f"{each.__module__}.{each.__qualname__}" for each in classes)
        what = f"the class {found.__name__}" if isinstance(found, type) else f"of type {type(found).__name__}"
        raise UsageError(f"{kind}: {name} is {what}. It must be a subclass or an instance of {wanted}.")
    return found


def _attribute(kind: str, name: str, module: str, attribute: str) -> Any:
    try:
        with _working_folder_on_the_path() if names_code(name) else nullcontext():
            found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise UsageError(
                f"{kind}: {name} cannot be imported, for there is no module {error.name!r}, neither installed nor in "
                f"{os.getcwd()}. Install it, or go to the folder that holds it."
            ) from error
        raise UsageError(f"{kind}: {name} cannot be imported: {error}. Install what it needs.") from error
    except (Exception, SystemExit) as error:  # whatever a stranger's module does when it is imported
        raise UsageError(f"{kind}: {name} cannot be imported: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [each for each in vars(found) if not each.startswith("_")]
            raise UsageError(f"{kind}: {module} has no {part!r}.{nearest(part, public)}")
        found = getattr(found, part)
    return found


@contextmanager
def _working_folder_on_the_path() -> Iterator[None]:
    """Search the working folder first, as `python file.py` does, until the import is over."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    importlib.invalidate_caches()  # the file may have been written a moment ago
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)


def _is_a(found: Any, expected: type | tuple[type, ...]) -> bool:
    return isinstance(found, expected) or (isinstance(found, type) and issubclass(found, expected))
