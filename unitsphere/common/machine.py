"""What this machine can spare: cores and memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def worker_count() -> int:
    """The cores that this process may use, of those of the machine's processes that torchrun started with it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _container_cores()) // _together())


def _together() -> int:
    """Processes that torchrun started together on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _container_cores(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """The share of the cores that a container has, rounded up."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return 2**31
    return 2**31 if quota == "max" else -(-int(quota) // int(period))


def free_memory(device: torch.device) -> int:
    """Bytes that this process could still take on the device: of the machine's memory, within the container's limit
    where there is one, its share among the processes started together."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_system_memory(), _container_memory()) // _together()


def _system_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return 4 * 2**30


def _container_memory() -> int:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        held = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 2**62
    return 2**62 if limit == "max" else max(0, int(limit) - int(held["anon"]))  # file caches can be given up
