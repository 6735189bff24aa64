"""unitsphere doctor: what this machine has, and what will be slow."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unitsphere.cli.command import add_command
from unitsphere.common.extras import EXTRAS, how_to_install

GIB = 2**30
PHOTO = (500, 375)  # pixels of an ordinary photo of ImageNet
FEW_PHOTOS = 2000  # a second: a GPU that trains a ResNet-50 may ask for more


def add_commands(commands: Any) -> None:
    command = add_command(commands, "doctor", run_doctor, "say what this machine has and what will be slow")
    command.add_argument("--json", action="store_true", help="print JSON")


def run_doctor(options: argparse.Namespace) -> None:
    facts = examine()
    warnings = advice(facts)
    if options.json:
        print(json.dumps({**facts, "warnings": warnings}, indent=2))
        return
    for name, line in describe(facts):
        print(f"{name:<12} {line}")
    print()
    for warning in warnings:
        print(f"! {warning}")
    if not warnings:
        print("nothing here will be slow for a reason that could be seen.")


def examine() -> dict[str, Any]:
    """Everything that was looked at, as JSON holds it. Sizes in bytes."""
    import torch
    from torch import distributed

    from unitsphere.common.allocator import fast_cpu
    from unitsphere.common.machine import free_memory, worker_count
    from unitsphere.common.version import __version__
    from unitsphere.data.workers import CAN_FORK

    packages = ("torch", "torchvision", "triton", "numpy", "pillow", "safetensors", *EXTRAS)
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "unitsphere": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: version_of(name) for name in packages},
        "cuda": torch.version.cuda,
        "devices": [device(number) for number in range(torch.cuda.device_count())],
        "nvidia_driver": Path("/proc/driver/nvidia/version").exists(),
        "keeps_memory": fast_cpu(),
        "cores": {"machine": os.cpu_count(), "affinity": affinity, "given": worker_count()},
        "memory": free_memory(torch.device("cpu")),
        "disks": {name: disk(folder) for name, folder in folders().items()},
        "jpeg": decoding(),
        "fork": CAN_FORK,
        "nccl": distributed.is_available() and distributed.is_nccl_available(),
        "gloo": distributed.is_available() and distributed.is_gloo_available(),
    }


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown" if find_spec(package) else None  # vendors rename their builds


def device(number: int) -> dict[str, Any]:
    import torch

    about = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    return {
        "name": about.name,
        "memory": total,
        "free": free,
        "capability": f"{about.major}.{about.minor}",
        "bf16": about.major >= 8,  # torch's own question answers for cards that only emulate it
    }


def folders() -> dict[str, Path]:
    """Where runs, indexes and compiled kernels will be written, by default."""
    import tempfile

    from unitsphere.data.index import cache_folder

    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    return {"working folder": Path.cwd(), "cache": cache_folder(), "compiled kernels": Path(compiled)}


def disk(folder: Path) -> dict[str, Any]:
    """Of the folder, or of the nearest above it that exists."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    writable = os.access(there, os.W_OK | os.X_OK)
    return {"folder": str(folder), "free": shutil.disk_usage(there).free, "writable": writable}


def decoding(seconds: float = 1.0) -> dict[str, Any]:
    """How many photos one core decodes in a second, tried on a generated one."""
    from PIL import features

    from unitsphere.images.decode import decode, formats

    photo = picture()
    formats()
    decode(photo)
    count, started = 0, time.perf_counter()
    while (taken := time.perf_counter() - started) < seconds:
        decode(photo)
        count += 1
    turbo = bool(features.check("libjpeg_turbo"))
    return {"turbo": turbo, "bytes": len(photo), "pixels": list(PHOTO), "images_per_second": count / taken}


def picture() -> bytes:
    """A JPEG with detail at all scales, as photos have it."""
    import io

    import numpy as np
    from PIL import Image

    width, height = PHOTO
    random = np.random.default_rng(0)
    mixed = np.zeros((height, width, 3), np.float32)
    for detail in (4, 16, 64, 256):
        noise = random.integers(0, 256, (max(1, detail * height // width), detail, 3), dtype=np.uint8)
        mixed += np.asarray(Image.fromarray(noise).resize(PHOTO, Image.Resampling.BICUBIC), np.float32) / 4
    file = io.BytesIO()
    Image.fromarray(mixed.astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def describe(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, how it is) for people."""
    packages, cores, jpeg = facts["packages"], facts["cores"], facts["jpeg"]
    needed = (f"{name} {packages[name] or 'missing'}" for name in packages if name not in EXTRAS)
    extras = (f"{name} {packages[name] or 'missing'}" for name in EXTRAS)
    rate = jpeg["images_per_second"]
    return [
        ("unitsphere", f"{facts['unitsphere']} on Python {facts['python']}, {facts['system']}"),
        ("packages", ", ".join(needed)),
        ("extras", ", ".join(extras)),
        *((f"cuda:{number}", describe_device(each)) for number, each in enumerate(facts["devices"])),
        ("allocator", "freed memory stays with the process" if facts["keeps_memory"] else "freed memory is given back"),
        ("cores", f"{cores['given']} given to this process, of {cores['machine']} of the machine"),
        ("memory", f"{facts['memory'] / GIB:.1f} GiB free"),
        *(("disk", describe_disk(name, each)) for name, each in facts["disks"].items()),
        (
            "decoding",
            f"{rate:,.0f} photos a second on a core ({PHOTO[0]}x{PHOTO[1]}, {jpeg['bytes'] / 1000:.0f} kB"
            f"{', libjpeg-turbo' if jpeg['turbo'] else ''}): {cores['given']} cores can decode about "
            f"{rate * cores['given']:,.0f}; workers are {'processes' if facts['fork'] else 'threads'}",
        ),
        ("processes", f"NCCL {'yes' if facts['nccl'] else 'no'}, gloo {'yes' if facts['gloo'] else 'no'}"),
    ]


def describe_device(device: dict[str, Any]) -> str:
    return (
        f"{device['name']}, {device['free'] / GIB:.1f} of {device['memory'] / GIB:.1f} GiB free, "
        f"compute capability {device['capability']}, {'bf16' if device['bf16'] else 'no bf16'}"
    )


def describe_disk(name: str, disk: dict[str, Any]) -> str:
    locked = "" if disk["writable"] else ", may not be written"
    return f"{disk['free'] / GIB:.1f} GiB free in the {name}, {disk['folder']}{locked}"


def advice(facts: dict[str, Any]) -> list[str]:
    """What will be slow or fail, and what to do about it."""
    found = [*advice_on_devices(facts), *advice_on_cores(facts)]
    for name, each in facts["disks"].items():
        if not each["writable"]:
            found.append(f"the {name} {each['folder']} may not be written to.")
        elif each["free"] < 5 * GIB:
            found.append(f"the {name} {each['folder']} has {each['free'] / GIB:.1f} GiB left: checkpoints need more.")
    if facts["memory"] < 4 * GIB:
        found.append(
            f"only {facts['memory'] / GIB:.1f} GiB of memory are free: use few --workers and --resident false."
        )
    for extra in dict.fromkeys(EXTRAS.values()):
        missing = [package for package in EXTRAS if EXTRAS[package] == extra and not facts["packages"][package]]
        if missing:
            found.append(f"{' and '.join(missing)} missing, if you need it: {how_to_install(extra)}")
    return found


def advice_on_devices(facts: dict[str, Any]) -> list[str]:
    devices = facts["devices"]
    if not devices:
        reason = "torch was built without CUDA" if facts["cuda"] is None else f"torch's CUDA {facts['cuda']} finds none"
        if facts["nvidia_driver"]:
            return [f"there is an NVIDIA driver, but {reason}: install a torch build that fits the driver."]
        return ["no CUDA device: training runs on the cores, which is for small images and small networks."]
    found = []
    if not all(each["bf16"] for each in devices):
        found.append("a card has no bf16: train there with --precision fp16.")
    if not facts["packages"]["triton"]:
        found.append("Triton is missing: neither --compile nor the fused loss and views. Take torch's ordinary build.")
    if len(devices) > 1 and not facts["nccl"]:
        found.append("several cards, but this torch has no NCCL: torchrun cannot join them.")
    return found


def advice_on_cores(facts: dict[str, Any]) -> list[str]:
    cores, jpeg, found = facts["cores"], facts["jpeg"], []
    if cores["given"] < (cores["machine"] or 1):
        found.append(
            f"only {cores['given']} of {cores['machine']} cores are given to this process (by its affinity, its "
            "container or torchrun): ask for more if images are not decoded fast enough."
        )
    if not jpeg["turbo"]:
        found.append("Pillow has no libjpeg-turbo, so JPEGs decode slowly: take Pillow's ordinary wheels from PyPI.")
    total = jpeg["images_per_second"] * cores["given"]
    if facts["devices"] and total < FEW_PHOTOS * len(facts["devices"]):
        found.append(
            f"the cores decode about {total:,.0f} photos a second, which a card may well exceed: shrink them once with "
            "`unitsphere pack --size 256`, or let them stay in memory (--resident true)."
        )
    if not facts["fork"]:
        found.append(f"no processes can be forked on {sys.platform}: threads decode, and wait for each other.")
    return found
