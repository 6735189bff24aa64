"""One step of training, plain or as a CUDA graph.

The plain step is the reference, and it runs anywhere. On a GPU the same step is recorded once and replayed, so that
the host does not launch thousands of small kernels one by one. The networks may be compiled first. Both change what is
computed by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    """A training step as it reads: forward, backward, optimiser, memory."""

    def __init__(
        self,
        method: Learner,
        optimizer: torch.optim.Optimizer,
        *,
        precision: str = "fp32",
        clip_norm: float | None = None,
        forward: nn.Module | None = None,
    ) -> None:
        """precision: fp32, bf16 or fp16. forward: the module to call in place of the method, if it is wrapped (DDP)."""
        self.method = method
        self.forward = forward or method
        self.optimizer = optimizer
        self.precision = precision
        self.clip_norm = clip_norm
        # Small gradients would vanish in fp16: the loss is scaled, and a step whose scaled gradient overflows is left
        # out.
        self.scaler = torch.amp.GradScaler(next(method.parameters()).device.type) if precision == "fp16" else None

    def __call__(self, views: list[Tensor], inputs: Inputs, rate: float | None) -> StepOutput:
        """Take one step and return what the method gave.

        views: (n, C, H, W) each, of this rank's images. inputs: of `Learner.inputs`, on the same device. rate: the
        learning rate of the step; None keeps the one that the optimiser has.
        """
        method, optimizer, scaler, device = self.method, self.optimizer, self.scaler, views[0].device
        if rate is not None:
            set_rate(optimizer, rate)
        optimizer.zero_grad(set_to_none=True)

        # A batch that is too large for the device goes through in equal parts, one after another.
        dtype = AUTOCAST.get(self.precision)
        # The cache of cast weights would outlive a recording.
        autocast = torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)
        parts: Iterable[tuple[list[Tensor], Inputs]] = [(views, inputs)]
        if method.parts > 1:
            with autocast:
                parts = one_by_one(method, method.in_parts(views, inputs))

        # Forward and backward. The gradients of the parts add up, and ranks exchange them with the last part.
        outputs: list[StepOutput] = []
        for number, part in enumerate(parts, 1):
            with nullcontext() if number == method.parts else without_averaging(self.forward):
                with autocast:
                    outputs.append(self.forward(*part))
                loss = outputs[-1].loss / method.parts
                (loss if scaler is None else scaler.scale(loss)).backward()
        output = outputs[0] if method.parts == 1 else joined(outputs)

        # The optimiser moves the weights. Clipping needs the true size of the gradients.
        if scaler is not None:
            scaler.unscale_(optimizer)
        if self.clip_norm is not None:
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(trained, self.clip_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

        # The memory moves last: a queue takes the keys, a slow copy follows.
        method.finish(output)
        return output

    def state(self) -> dict[str, Tensor]:
        """Return everything that steps change, for a checkpoint."""
        state = training_state(self.method, self.optimizer)
        if self.scaler is not None:
            about = self.scaler.state_dict()
            state |= {f"scaler.{name}": torch.tensor(about[name], dtype=torch.float64) for name in SCALER_STATE}
        return state

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state` returned."""
        restore_training_state(self.method, self.optimizer, tensors)
        if self.scaler is not None:
            known = {name: kind(tensors[f"scaler.{name}"]) for name, kind in SCALER_STATE.items()}
            self.scaler.load_state_dict(self.scaler.state_dict() | known)


class RecordedStep:
    """The plain step, recorded with the first batch as a CUDA graph and replayed for every other one.

    Recording needs a few steps of warm-up, which train: what they change is put back. fp16 cannot be recorded, because
    the host decides after each backward pass whether the step counts.
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
                plain(self.views, self.inputs, None)
        torch.cuda.current_stream().wait_stream(side)
        plain.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        # Only this thread is recorded: others load images meanwhile.
        with torch.cuda.graph(self.graph, stream=side, capture_error_mode="thread_local"):
            step = plain(self.views, self.inputs, None)
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
    """Return the stream on which all recordings are made. Libraries keep workspaces for each stream that they have ever
    worked on: with a stream for each recording, 65 MiB of every one stayed on an H200."""
    return torch.cuda.Stream(device)


def compile_networks(method: Learner) -> None:
    """Compile the networks with which the method encodes. Networks of one shape share what was compiled. A process that
    trains many shapes, one run after another, must not reach torch's limit, beyond which nothing would be compiled."""
    from torch._dynamo import config as limits  # slow to import

    limits.recompile_limit = max(limits.recompile_limit, RECOMPILE_LIMIT)
    for network in method.networks:
        network.compile(dynamic=False)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all groups; one that is a tensor is filled, so that a recorded step reads it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
