"""Tensors in files: safetensors with JSON in their metadata for our own, torch files of plain tensors for others'.

Nothing is ever unpickled. A file is written to a temporary name, flushed to the disk and renamed, so that what bears
its name is whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.common.files import replacing

__all__ = ["load_tensors", "read_weights", "save_tensors"]

META, OLD_META = "unitsphere", "antipode"  # the package was called antipode until November 2026
FORMAT = 2  # of what the metadata says; files without a number are of format 1


def save_tensors(path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write tensors and JSON into one file."""
    on_cpu = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(on_cpu, temporary, metadata={META: json.dumps({"format": FORMAT, **meta})})


def load_tensors(path: Path, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote; with tensors=False only the JSON."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            meta = json.loads(metadata.get(META) or metadata.get(OLD_META) or "{}")
            found = {name: file.get_tensor(name) for name in file.keys() if tensors}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise UnitsphereError(f"{path} is not a readable checkpoint: {error}") from error
    if not isinstance(meta, dict):
        raise UnitsphereError(f"{path} is not a readable checkpoint: its metadata is no table.")
    refuse_newer(path, meta)
    return found, meta


def refuse_newer(path: Path, meta: dict[str, Any]) -> None:
    """Refuse what a later version of unitsphere wrote: it may mean something else."""
    written = meta.get("format", 1)
    if not isinstance(written, int) or written > FORMAT:
        raise UnitsphereError(
            f"{path} has format {written!r}, and this version of unitsphere reads formats up to {FORMAT}: update it."
        )


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read named tensors from a .safetensors file, or from a torch file that holds nothing but tensors; and what a
    checkpoint says of itself."""
    if path.suffix == ".safetensors":
        return load_tensors(path)
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
