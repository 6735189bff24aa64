"""Memory that stays with the process between steps, so that a CPU does not fault its pages in anew each time."""

from __future__ import annotations

import ctypes
import platform

__all__ = ["fast_cpu"]

# Parameters of glibc's mallopt, from malloc.h, and their values.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
SETTINGS = {MMAP_THRESHOLD: 2**30, TRIM_THRESHOLD: 2**31 - 1, TOP_PAD: 256 * 2**20}

_done = False


def fast_cpu() -> bool:
    """Keep freed memory in the process, for training on a CPU.

    glibc maps every block above 32 MiB anew and returns it to the system when it is freed, so that a training step
    faults its pages in again. Call this once, before the first step. The command does so itself; `import unitsphere`
    does not, for it changes the whole process. Linux with glibc only; elsewhere nothing happens.
    Returns whether it is on.
    """
    global _done
    if not _done and platform.libc_ver()[0] == "glibc":
        try:
            mallopt = ctypes.CDLL(None).mallopt
        except (OSError, AttributeError):
            return False
        taken = [mallopt(parameter, value) for parameter, value in SETTINGS.items()]
        _done = all(taken)
    return _done


def is_fast() -> bool:
    """Whether `fast_cpu` is on in this process."""
    return _done
