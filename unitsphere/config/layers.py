"""Layers of settings: defaults < method < recipe or sizes < file < what was given. Later layers win."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unitsphere.common.errors import UsageError
from unitsphere.data.files import read_regular

LARGEST = 2**24  # bytes of a file of settings
Patch = dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """Some settings and where they come from."""

    origin: str
    values: Mapping[str, Any]


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read settings from a TOML or JSON file."""
    path = Path(path)
    try:
        text = read_regular(path, LARGEST).decode()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"config: {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:  # both decoders raise subclasses of ValueError
        raise UsageError(f"config: {path} is not valid {path.suffix.lstrip('.') or 'toml'}: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"config: {path} must hold a table of fields.")
    return values


def merge(layers: Iterable[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge layers into values and, for each field, the origin of its value.

    lr and base_lr are two ways to say one thing: the later of them wins, and the other becomes None.
    """
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
