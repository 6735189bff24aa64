"""Checkpoints are safetensors files with JSON in their metadata, and nothing else: loading never unpickles.

A checkpoint is written to a temporary name, flushed to the disk and renamed, so that what bears its name is whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from unitsphere.common.errors import UnitsphereError
from unitsphere.common.files import replacing

META, OLD_META = "unitsphere", "antipode"  # the package was called antipode until November 2026


def save_checkpoint(path: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Tensors and JSON in one file."""
    on_cpu = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(on_cpu, temporary, metadata={META: json.dumps(meta)})


def load_checkpoint(path: Path, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What was saved; without the tensors only the JSON is read."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            meta = json.loads(metadata.get(META) or metadata.get(OLD_META) or "{}")
            return {name: file.get_tensor(name) for name in file.keys() if tensors}, meta  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UnitsphereError(f"{path} is not a readable checkpoint: {error}") from error


def training_state(method: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that training changes: `method.*` and `optimizer.<parameter>.<slot>`."""
    state = {f"method.{name}": tensor for name, tensor in method.state_dict().items()}
    names = trained_names(method, optimizer)
    for index, slots in optimizer.state_dict()["state"].items():
        for slot, value in slots.items():
            if value is not None:
                state[f"optimizer.{names[index]}.{slot}"] = torch.as_tensor(value)
    return state


def restore_training_state(method: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of training_state."""
    method.load_state_dict(part(tensors, "method."))
    parameters = dict(method.named_parameters())
    places = {name: place for place, name in enumerate(trained_names(method, optimizer))}
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in part(tensors, "optimizer.").items():
        owner, _, slot = name.rpartition(".")
        if tensor.shape == parameters[owner].shape:  # fused optimisers want the layout of their parameter
            tensor = torch.empty_like(parameters[owner]).copy_(tensor)
        state.setdefault(places[owner], {})[slot] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def trained_names(method: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of what an optimiser trains, in its order, group by group."""
    names = {parameter: name for name, parameter in method.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
