"""Optimisers: torch's SGD and AdamW, and LARS."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = ["LARS", "build_optimizer"]

ETA = 1e-3  # LARS's trust coefficient


class Settings(Protocol):
    """What an optimiser is built from; a run's configuration has all of it."""

    @property
    def optimizer(self) -> str: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def nesterov(self) -> bool: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def decays_norms(self) -> bool: ...


def build_optimizer(config: Settings, method: nn.Module) -> torch.optim.Optimizer:
    """Over what takes a gradient. On CUDA fused, with a rate that a recorded graph can read."""
    groups = parameter_groups(method, config.weight_decay, config.decays_norms)
    device = next(method.parameters()).device
    on_cuda = device.type == "cuda"
    rate = torch.tensor(config.learning_rate, device=device) if on_cuda else config.learning_rate
    if config.optimizer == "lars":
        return LARS(groups, lr=rate, momentum=config.momentum)
    how = {"fused": True} if on_cuda else {"foreach": True}
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=config.momentum, nesterov=config.nesterov, **how)
    return torch.optim.AdamW(groups, lr=rate, betas=(config.momentum, 0.999), capturable=on_cuda, **how)


def parameter_groups(method: nn.Module, weight_decay: float, decay_norms: bool) -> list[dict[str, Any]]:
    """All that takes a gradient; unless decay_norms, biases and the parameters of norms (all vectors) are apart,
    without weight decay and without LARS's own rate for each layer."""
    trained = [parameter for parameter in method.parameters() if parameter.requires_grad]
    if decay_norms:
        return [{"params": trained, "weight_decay": weight_decay}]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0, "adapt": False},
    ]
    return [group for group in groups if group["params"]]


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rates (You, Gitman & Ginsburg, arXiv 1708.03888, algorithm 1), for each parameter w with
    gradient g:

        rate = lr eta |w| / (|g| + weight_decay |w|)
        v = momentum v + rate (g + weight_decay w)
        w = w - v

    and rate = lr where |w| or |g| is 0, or in a group with adapt=False. lr may be a tensor on the parameters' device;
    the host waits for nothing, so that a step can be recorded.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta: float = ETA,
    ) -> None:
        usual = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta, "adapt": True}
        super().__init__(params, usual)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            if moved:
                self.step_group(group, moved, [parameter.grad for parameter in moved])
        return loss

    def step_group(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        decay, lr = group["weight_decay"], group["lr"]
        velocities = [self.velocity(parameter) for parameter in parameters]
        pushes = torch._foreach_add(gradients, parameters, alpha=decay)
        if group["adapt"]:
            weight_norms, gradient_norms = (torch.stack(torch._foreach_norm(each)) for each in (parameters, gradients))
            trust = group["eta"] * weight_norms / (gradient_norms + decay * weight_norms)
            trust = torch.where((weight_norms > 0) & (gradient_norms > 0), trust, 1.0)
            torch._foreach_mul_(pushes, list((lr * trust).unbind()))
        else:
            torch._foreach_mul_(pushes, lr)
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, pushes)
        torch._foreach_sub_(parameters, velocities)

    def velocity(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state["momentum_buffer"]
