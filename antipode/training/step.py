"""One step of training, plain or as a CUDA graph.

The plain step is the reference: it runs anywhere. On a GPU the same step is recorded once and replayed, so that the
host no longer launches thousands of small kernels one by one; and the networks may be compiled first. Neither
changes what is computed beyond rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from antipode.config.resolve import Config
from antipode.methods.method import Inputs, Method, Step
from antipode.training.checkpoint import training_state

WARM_UP_STEPS = 3
TakeStep = Callable[[list[Tensor], Inputs, float], Step]  # (views, the method's inputs, learning rate)


def build_optimizer(config: Config, method: nn.Module) -> torch.optim.Optimizer:
    """SGD or AdamW over what takes a gradient. On CUDA fused, with a rate that a recorded graph can read."""
    parameters = [parameter for parameter in method.parameters() if parameter.requires_grad]
    on_cuda = parameters[0].is_cuda
    rate = torch.tensor(config.learning_rate, device=parameters[0].device) if on_cuda else config.learning_rate
    how = {"fused": True} if on_cuda else {"foreach": True}
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=rate,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            **how,
        )
    return torch.optim.AdamW(
        parameters,
        lr=rate,
        betas=(config.momentum, 0.999),
        weight_decay=config.weight_decay,
        capturable=on_cuda,
        **how,
    )


class PlainStep:
    """Forward, backward, optimiser, memory: as it reads."""

    def __init__(
        self,
        method: Method,
        optimizer: torch.optim.Optimizer,
        *,
        bf16: bool = False,
        clip_norm: float | None = None,
        forward: nn.Module | None = None,
    ) -> None:
        """forward: what to call in the method's place, where it is wrapped."""
        self.method = method
        self.forward = forward or method
        self.optimizer = optimizer
        self.bf16 = bf16
        self.clip_norm = clip_norm

    def __call__(self, views: list[Tensor], inputs: Inputs, rate: float) -> Step:
        set_rate(self.optimizer, rate)
        return self.take(views, inputs)

    def take(self, views: list[Tensor], inputs: Inputs) -> Step:
        self.optimizer.zero_grad(set_to_none=True)
        # The cache of cast weights would outlive a recording.
        with torch.autocast(views[0].device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            step: Step = self.forward(views, inputs)
        step.loss.backward()
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.method.online.parameters(), self.clip_norm)
        self.optimizer.step()
        self.method.finish(step)
        return step


class RecordedStep:
    """The plain step, recorded with the first batch as a CUDA graph and replayed for every other.

    Recording needs steps to warm up, which train: what they change is put back.
    """

    def __init__(self, plain: PlainStep, views: list[Tensor], inputs: Inputs) -> None:
        self.plain = plain
        self.views = [view.clone(memory_format=torch.preserve_format) for view in views]
        self.inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        before = {name: tensor.clone() for name, tensor in self.state().items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                plain.take(self.views, self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        plain.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        # Only this thread is recorded: others load images meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.step = plain.take(self.views, self.inputs)
        for name, tensor in self.state().items():
            if name in before:
                tensor.copy_(before[name])
            else:
                tensor.zero_()  # an optimiser's slot before its first step

    def state(self) -> dict[str, Tensor]:
        return training_state(self.plain.method, self.plain.optimizer)

    def __call__(self, views: list[Tensor], inputs: Inputs, rate: float) -> Step:
        for mine, given in zip(self.views, views, strict=True):
            mine.copy_(given)
        for name, mine in self.inputs.items():
            mine.copy_(inputs[name])
        set_rate(self.plain.optimizer, rate)
        self.graph.replay()
        return self.step


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
