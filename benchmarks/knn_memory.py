"""Memory of k-NN over as many features as ImageNet has images: python -m benchmarks.knn_memory

The bank is generated. Each form of it is searched in a process of its own, whose peak is the kernel's own count:
- bfloat16 in memory, what `extract` keeps of a backbone under bf16;
- float32 in a file that is larger than the allowance, mapped. The pages of a file count as resident while there is
  room for them, but the kernel takes them back when there is not; so the process may have no more than the allowance of
  memory of its own (RLIMIT_DATA), and its largest share is measured too.
A query is a row of the bank with noise on it and the row's label, so that all must be right.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.measuring import Row, machine
from unitsphere.features.knn import knn

GIB = 2**30
ALLOWED = 8 * GIB
CLASSES = 1000
PART = 16384
QUERIES = 200
K = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1_281_167)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/knn-memory.json"))
    parser.add_argument("--search", choices=["memory", "file"], help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.search:
        print(json.dumps(search(asked.search, asked.images, asked.dim, asked.file)))
        return
    sizes = ["--images", str(asked.images), "--dim", str(asked.dim)]
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for form in ("memory", "file"):
            words = ["-m", "benchmarks.knn_memory", "--search", form, "--file", f"{folder}/bank.npy", *sizes]
            found = subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True)
            rows[form] = json.loads(found.stdout)
            print(form, rows[form], flush=True)
    what = f"k-NN, k {K}, of {QUERIES} queries on {asked.images:,} x {asked.dim} generated features, on the CPU"
    result = machine(torch.device("cpu")) | {"what": what, "allowed_gib": ALLOWED / GIB, "rows": rows}
    asked.out.write_text(json.dumps(result, indent=1) + "\n")


def search(form: str, images: int, dim: int, file: Path) -> Row:
    resource.setrlimit(resource.RLIMIT_DATA, (ALLOWED, ALLOWED))
    random = torch.Generator().manual_seed(0)
    base = torch.randn(PART, dim, generator=random)
    chosen = torch.randperm(images, generator=random)[:QUERIES]
    rows = torch.stack([base[i % PART].roll(i // PART) for i in chosen.tolist()])
    queries = rows + 0.5 * torch.randn(QUERIES, dim, generator=random)
    labels = torch.randint(CLASSES, (images,), generator=random)
    bank = in_memory(base, images) if form == "memory" else in_a_file(base, images, file)
    del base, rows
    with own_memory() as own:
        started = time.perf_counter()
        accuracy = knn(bank, labels, queries, labels[chosen], k=(1, K))
        seconds = time.perf_counter() - started
    return {
        "bank": f"{bank.dtype}, {images * dim * bank.itemsize / GIB:.2f} GiB",
        "seconds": round(seconds, 1),
        "percent_right": accuracy,
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 2),
        "peak_own_memory_gib": round(own["peak"] / GIB, 2),
    }


def in_memory(base: Tensor, images: int) -> Tensor:
    bank = torch.empty(images, base.shape[1], dtype=torch.bfloat16)
    for part, rows in enumerate(bank.split(PART)):
        rows.copy_(base[: len(rows)].roll(part, dims=1))  # part p of the bank is the base, p places on
    return bank


def in_a_file(base: Tensor, images: int, file: Path) -> np.ndarray:
    """Written as `numpy.save` would, a part at a time."""
    with open(file, "wb") as out:
        header = {"descr": "<f4", "fortran_order": False, "shape": (images, base.shape[1])}
        np.lib.format.write_array_header_1_0(out, header)
        for start in range(0, images, PART):
            base.roll(start // PART, dims=1)[: images - start].numpy().tofile(out)
    return np.load(file, mmap_mode="r")


@contextmanager
def own_memory(every: float = 0.02) -> Iterator[dict[str, int]]:
    """The peak of the memory that is the process's own (not pages of files), looked at in short intervals."""
    seen, done = {"peak": 0}, threading.Event()

    def look() -> None:
        while not done.wait(every):
            lines = Path("/proc/self/status").read_text().splitlines()
            now = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
            seen["peak"] = max(seen["peak"], now)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    main()
