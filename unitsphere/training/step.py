"""One step of training, plain or as a CUDA graph.

The plain step is the reference: it runs anywhere. On a GPU the same step is recorded once and replayed, so that the
host no longer launches thousands of small kernels one by one; and the networks may be compiled first. Neither
changes what is computed beyond rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from unitsphere.common.distributed import without_averaging
from unitsphere.methods.learners.learner import Inputs, Learner, StepOutput, joined
from unitsphere.modules.norms import one_by_one
from unitsphere.runs.checkpoint import restore_training_state, training_state

WARM_UP_STEPS = 3
RECOMPILE_LIMIT = 64
SCALER_STATE = {"scale": float, "_growth_tracker": int}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
TakeStep = Callable[[list[Tensor], Inputs, float], StepOutput]  # (views, the method's inputs, learning rate)


class PlainStep:
    """Forward, backward, optimiser, memory: as it reads.

    precision: fp32, bf16, or fp16, whose small gradients would vanish: the loss is scaled, and a step whose scaled
    gradient overflows is left out.
    """

    def __init__(
        self,
        method: Learner,
        optimizer: torch.optim.Optimizer,
        *,
        precision: str = "fp32",
        clip_norm: float | None = None,
        forward: nn.Module | None = None,
    ) -> None:
        """forward: what to call in the method's place, where it is wrapped."""
        self.method = method
        self.forward = forward or method
        self.optimizer = optimizer
        self.precision = precision
        self.clip_norm = clip_norm
        self.scaler = torch.amp.GradScaler(next(method.parameters()).device.type) if precision == "fp16" else None

    def __call__(self, views: list[Tensor], inputs: Inputs, rate: float) -> StepOutput:
        set_rate(self.optimizer, rate)
        return self.take(views, inputs)

    def take(self, views: list[Tensor], inputs: Inputs) -> StepOutput:
        self.optimizer.zero_grad(set_to_none=True)
        step = self.backward(views, inputs) if self.method.parts == 1 else self.accumulate(views, inputs)
        if self.scaler is None:
            self.clip()
            self.optimizer.step()
        else:
            self.scaler.unscale_(self.optimizer)
            self.clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.method.finish(step)
        return step

    def autocast(self, device: torch.device) -> torch.autocast:
        dtype = AUTOCAST.get(self.precision)
        # The cache of cast weights would outlive a recording.
        return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)

    def backward(self, views: list[Tensor], inputs: Inputs) -> StepOutput:
        """Adds the gradient of the loss; of a part of a batch, its share in that of the batch."""
        with self.autocast(views[0].device):
            step: StepOutput = self.forward(views, inputs)
        loss = step.loss / self.method.parts
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return step

    def accumulate(self, views: list[Tensor], inputs: Inputs) -> StepOutput:
        """The same for a batch that comes in parts, of which one is held at a time. Ranks exchange the gradients with
        the last."""
        with self.autocast(views[0].device):
            parts = self.method.in_parts(views, inputs)
        steps = []
        for number, part in enumerate(one_by_one(self.method, parts), 1):
            with nullcontext() if number == len(parts) else without_averaging(self.forward):
                steps.append(self.backward(*part))
        return joined(steps)

    def clip(self) -> None:
        if self.clip_norm is not None:
            trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(trained, self.clip_norm)

    def state(self) -> dict[str, Tensor]:
        """Everything that steps change, for a checkpoint."""
        state = training_state(self.method, self.optimizer)
        if self.scaler is not None:
            about = self.scaler.state_dict()
            state |= {f"scaler.{name}": torch.tensor(about[name], dtype=torch.float64) for name in SCALER_STATE}
        return state

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state`."""
        restore_training_state(self.method, self.optimizer, tensors)
        if self.scaler is not None:
            known = {name: kind(tensors[f"scaler.{name}"]) for name, kind in SCALER_STATE.items()}
            self.scaler.load_state_dict(self.scaler.state_dict() | known)


class RecordedStep:
    """The plain step, recorded with the first batch as a CUDA graph and replayed for every other.

    Recording needs steps to warm up, which train: what they change is put back. fp16 cannot be recorded: the host
    decides after each backward pass whether the step counts.
    """

    def __init__(self, plain: PlainStep, views: list[Tensor], inputs: Inputs) -> None:
        with torch.cuda.device(views[0].device):
            self.record(plain, views, inputs)

    def record(self, plain: PlainStep, views: list[Tensor], inputs: Inputs) -> None:
        self.plain = plain
        self.views = [view.clone(memory_format=torch.preserve_format) for view in views]
        self.inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        before = {name: tensor.clone() for name, tensor in plain.state().items()}
        side = recording_stream(views[0].device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                plain.take(self.views, self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        plain.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        # Only this thread is recorded: others load images meanwhile.
        with torch.cuda.graph(self.graph, stream=side, capture_error_mode="thread_local"):
            step = plain.take(self.views, self.inputs)
        self.step = replace(step, loss=step.loss.detach())  # the graph of autograd has done its part
        for name, tensor in plain.state().items():
            if name in before:
                tensor.copy_(before[name])
            else:
                tensor.zero_()  # an optimiser's slot before its first step

    def __call__(self, views: list[Tensor], inputs: Inputs, rate: float) -> StepOutput:
        for mine, given in zip(self.views, views, strict=True):
            mine.copy_(given)
        for name, mine in self.inputs.items():
            mine.copy_(inputs[name])
        set_rate(self.plain.optimizer, rate)
        self.graph.replay()
        return self.step


@cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: libraries keep workspaces for each stream that they have ever worked on. With a stream
    for each, 65 MiB stayed of every recording on an H200."""
    return torch.cuda.Stream(device)


def compile_networks(method: Learner) -> None:
    """Compile what the method encodes with. Networks of one shape share what was compiled; a process that trains many
    shapes, one run after another, must not reach torch's limit, beyond which nothing would be compiled."""
    from torch._dynamo import config as limits  # slow to import

    limits.recompile_limit = max(limits.recompile_limit, RECOMPILE_LIMIT)
    for network in method.networks:
        network.compile(dynamic=False)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
