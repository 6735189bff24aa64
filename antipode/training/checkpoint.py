"""Checkpoints are safetensors files with JSON in their metadata, and nothing else: loading never unpickles.

A checkpoint is written to a temporary name, flushed to the disk and renamed, so that what bears its name is whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from antipode.errors import AntipodeError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` if the block succeeds, and vanishes if it fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text)


def save_checkpoint(path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Tensors and JSON in one file."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(on_cpu, temporary, metadata={"antipode": json.dumps(meta)})


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads((file.metadata() or {}).get("antipode", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, meta  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise AntipodeError(f"{path} is not a readable checkpoint: {error}") from error


def training_state(method: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that training changes: `method.*` and `optimizer.<parameter>.<slot>`."""
    state = {f"method.{name}": tensor for name, tensor in method.state_dict().items()}
    names = [name for name, parameter in method.named_parameters() if parameter.requires_grad]
    for index, slots in optimizer.state_dict()["state"].items():
        for slot, value in slots.items():
            if value is not None:
                state[f"optimizer.{names[index]}.{slot}"] = torch.as_tensor(value)
    return state


def restore_training_state(method: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of training_state; the optimiser must hold the trainable parameters in their order."""
    method.load_state_dict(part(tensors, "method."))
    names = [name for name, parameter in method.named_parameters() if parameter.requires_grad]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in part(tensors, "optimizer.").items():
        parameter, _, slot = name.rpartition(".")
        state.setdefault(names.index(parameter), {})[slot] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
