"""Tensors in files: safetensors with JSON in their metadata for our own, torch files of plain tensors for others'.

Nothing is ever unpickled. A file is written to a temporary name, flushed to the disk and renamed, so that what bears
its name is whole. It carries a checksum of each tensor and of its JSON, so that a bit that flips later is noticed.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unitsphere.common.distributed import rank
from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.common.files import replacing
from unitsphere.common.terminal import warn

__all__ = ["load_tensors", "read_weights", "save_tensors"]

META, OLD_META = "unitsphere", "antipode"  # the package was called antipode until November 2026
FORMAT = 2  # of what the metadata says; files without a number are of format 1
CHECKSUMS = "checksums"  # in the JSON: of each tensor
OF_META = "unitsphere.crc32"  # beside the JSON: its own
told: set[str] = set()  # notices that this process has given


class Damaged(UnitsphereError):
    """A file that is not as it was written."""


def save_tensors(path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write tensors and JSON into one file."""
    on_cpu = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    checksums = {name: checksum(tensor) for name, tensor in on_cpu.items()}
    about = json.dumps({"format": FORMAT, **meta, CHECKSUMS: checksums})
    with replacing(path) as temporary:
        save_file(on_cpu, temporary, metadata={META: about, OF_META: crc32(about.encode())})


def load_tensors(path: Path, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote; with tensors=False only the JSON. Raises Damaged if it is not as it was
    written."""
    try:
        refuse_closed(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            text = metadata.get(META) or metadata.get(OLD_META) or "{}"
            meta = json.loads(text)
            found = {name: file.get_tensor(name) for name in file.keys() if tensors}  # noqa: SIM118
    except PermissionError as error:
        raise UnitsphereError(f"{path} may not be read: permission denied. Ask its owner for the right.") from error
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise Damaged(f"{path} is damaged, or no checkpoint: {error}") from error
    if not isinstance(meta, dict):
        raise Damaged(f"{path} is damaged: its metadata is no table.")
    refuse_newer(path, meta)
    checksums = meta.pop(CHECKSUMS, None)
    if OF_META in metadata or checksums is not None:
        if metadata.get(OF_META) != crc32(text.encode()) or not isinstance(checksums, dict):
            raise Damaged(f"{path} is damaged: its metadata is not as it was written.")
        if tensors:
            refuse_changed(path, found, checksums)
    elif "config" in meta:
        notice = "written before checksums were: damage to it may go unnoticed. The next checkpoint has them"
        if rank() == 0 and notice not in told:
            told.add(notice)
            warn(f"checksums: {path} was {notice}.")
    if "config" in meta and (lost := not_finite(found)):
        raise Damaged(f"{path} is damaged: {lost} has values that are infinite or no numbers.")
    return found, meta


def refuse_changed(path: Path, found: dict[str, Tensor], checksums: dict[str, str]) -> None:
    """Refuse tensors that are not those whose checksums were written."""
    for name in sorted(found.keys() | checksums.keys()):
        if name not in found:
            raise Damaged(f"{path} is damaged: its tensor {name} is missing.")
        if checksums.get(name) != checksum(found[name]):
            raise Damaged(f"{path} is damaged: its tensor {name} is not as it was written.")


def checksum(tensor: Tensor) -> str:
    """Return the CRC-32 of a tensor's type, shape and bytes, which must lie in one piece on the CPU.

    A CRC finds every flipped bit. 100 MB take 40 ms; a cryptographic hash takes four times as long or more, and would
    protect from nothing here: who changes a file on purpose can change its checksums.
    """
    about = f"{tensor.dtype} {list(tensor.shape)}".encode()
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{zlib.crc32(content, zlib.crc32(about)):08x}"


def crc32(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def not_finite(tensors: dict[str, Tensor]) -> str | None:
    """Return the name of a tensor with values that are infinite or no numbers, if there is one."""
    for name, tensor in tensors.items():
        # A sum is quicker than a look at each value, and not finite if one of them is not.
        if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all():
            return name
    return None


def refuse_closed(path: Path) -> None:
    """Raise PermissionError for a file that may not be read: safetensors does not say so. And what is no file, such as
    a pipe that nobody writes to, must not be opened."""
    if not path.is_file():
        raise FileNotFoundError("there is no such file")
    if not os.access(path, os.R_OK):
        raise PermissionError(path)


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
        refuse_closed(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError as error:
        raise UnitsphereError(f"{path} may not be read: permission denied. Ask its owner for the right.") from error
    except Exception as error:
        raise UsageError(
            f"{path} holds no plain weights (only tensors are read, nothing is unpickled): {error}"
        ) from error
    for _ in range(8):  # a table may hold itself
        inner = content.get("state_dict", content.get("model")) if isinstance(content, dict) else None
        if not isinstance(inner, dict):
            break
        content = inner
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds a {type(content).__name__}; named tensors are needed: save a state_dict().")
    named = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if not named:
        raise UsageError(f"{path} holds no tensors under names: save a state_dict().")
    return named, {}
