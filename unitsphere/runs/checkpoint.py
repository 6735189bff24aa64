"""What of training a checkpoint holds: the learner's state and the optimiser's, by names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unitsphere.weights.names import part


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
