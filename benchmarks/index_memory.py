"""Time and memory to open a folder of as many images as ImageNet has, before and after its listing is remembered.

    python -m benchmarks.index_memory --json benchmarks/results/index-memory.json

The files are empty, their names and folders like ImageNet's. Each opening is a process of its own; its memory is the
peak of the whole process, beside that of a process that only imports what is needed. A second listing, which keeps a
Python string for each path as most programs do, is measured in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CLASSES = 1000
SETTLED = 3  # seconds; a folder modified just before it was listed is listed again


def write_folder(root: Path, count: int) -> None:
    for number in range(CLASSES):
        wnid = f"n{1440764 + 13597 * number:08d}"
        folder = root / wnid
        folder.mkdir(parents=True)
        for image in range(number, count, CLASSES):
            os.close(os.open(folder / f"{wnid}_{image}.JPEG", os.O_CREAT | os.O_WRONLY))


def open_folder(root: str, how: str) -> dict[str, Any]:
    """In a process of its own. how: "imports", "strings", or the share held out."""
    from unitsphere.data.source import open_images

    started = time.perf_counter()
    count = 0
    if how == "strings":
        paths = sorted(os.path.join(at, file) for at, _, files in os.walk(root) for file in files)
        samples = [(path, os.path.dirname(path)) for path in paths]
        count = len(samples)
    elif how != "imports":
        images = open_images(root, holdout=float(how))
        assert images.labels is not None and images.classes is not None
        count = len(images)
        assert images.names[count - 1].startswith(images.classes[images.labels[-1]])
    return {
        "images": count,
        "seconds": round(time.perf_counter() - started, 2),
        "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def measure(count: int, scratch: Path) -> dict[str, Any]:
    root = scratch / "images"
    write_folder(root, count)
    time.sleep(SETTLED)
    environment = os.environ | {"XDG_CACHE_HOME": str(scratch / "cache"), "OMP_NUM_THREADS": "1"}
    steps = {
        "imports alone": "imports",
        "a string for each path": "strings",
        "first opening": "0",
        "later opening": "0",
        "later opening, a tenth held out": "0.1",
    }
    results = {}
    for step, how in steps.items():
        words = [sys.executable, "-m", "benchmarks.index_memory", "--open", str(root), "--how", how]
        answer = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        results[step] = json.loads(answer.stdout)
    alone = results["imports alone"]["peak_memory_mib"]
    for row in results.values():
        row["memory_above_imports_mib"] = row["peak_memory_mib"] - alone
    (index,) = (scratch / "cache").rglob("*.safetensors")
    return {"steps": results, "index_file_mib": round(index.stat().st_size / 2**20, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_281_167, help="images (default: as many as ImageNet has)")
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--open", help=argparse.SUPPRESS)
    parser.add_argument("--how", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open:
        print(json.dumps(open_folder(options.open, options.how)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(options.count, Path(scratch))
    import torch  # only now: a process begins with the memory of the one that starts it

    from benchmarks.measuring import machine

    result |= machine(torch.device("cpu"))
    for step, row in result["steps"].items():
        print(f"{step:<34}{row}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
