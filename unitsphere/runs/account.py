"""A run's first account of itself, run.json: versions, hardware, and where it was begun."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import PIL
import torch
import torchvision

from unitsphere.common.version import __version__
from unitsphere.methods.resolve import Resolved
from unitsphere.weights.files import FORMAT


def account(resolved: Resolved) -> dict[str, Any]:
    """Return what is about to run, by which versions and on which machine."""
    return {
        "format": FORMAT,
        "unitsphere": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "numpy": numpy.__version__,
        "pillow": PIL.__version__,
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "started": now(),
        "folder": os.getcwd(),  # where a relative path of the data begins
        "data": resolved.config.data,
        "origins": resolved.origins,
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> str | None:
    """The commit of unitsphere itself, where it runs from a checkout."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return None
    try:
        asked = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip() or None
