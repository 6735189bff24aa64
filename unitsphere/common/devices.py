"""Which device, and in which precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from unitsphere.common.distributed import launched, local_rank
from unitsphere.common.errors import UnitsphereError, UsageError

__all__ = ["pick_device"]

TRITON = find_spec("triton") is not None
SIGNS = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")  # of too little memory


def pick_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:N as a device that is really there. Of several processes each has its own. A card becomes
    the current one: streams and recordings are made there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda:") and launched():
        raise UsageError(f"device: given {name} to several processes, of which each has its own. Use cuda.")
    if name == "cuda" and launched():
        name = f"cuda:{local_rank()}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device: {name!r} is not known. Allowed: auto, cpu, cuda, cuda:N.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device: {name!r} was given, but {torch.cuda.device_count()} CUDA devices are here.")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def pick_precision(name: str, device: torch.device) -> str:
    """auto is bf16 on cards that have it, else fp32."""
    if name == "auto":
        return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return name


@contextmanager
def one_thread() -> Iterator[None]:
    """Within, torch computes on one thread of the host. For small tables that every step needs: threads gain nothing
    there, and each of them must get a core, which those that decode images have."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A small CPU tensor on the device, without making the host wait for what the device still has to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[Callable[[], None]]:
    """What is asked of a card within goes on beside what is asked of it afterwards, until the function given is called,
    which waits for it (on the card: the host does not)."""
    if device.type != "cuda":
        yield lambda: None
        return
    here, there = torch.cuda.current_stream(device), side_stream(device)
    there.wait_stream(here)
    with torch.cuda.stream(there):
        yield lambda: here.wait_stream(there)


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def memory_errors(advice: str) -> Iterator[None]:
    """Running out of memory becomes an error that says what to lower."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error)
        known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        known = known or any(sign in text for sign in SIGNS)
        if not known:
            raise
        raise UnitsphereError(f"out of memory. {advice} ({text.splitlines()[0] if text else 'no details'})") from error
