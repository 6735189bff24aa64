"""How fast images of ImageNet's size reach the device, and whether a training step has to wait for them.

    python -m benchmarks.input --json benchmarks/results/input-h200.json
    python -m benchmarks.input --device cpu --images 2000 --json input.json

Photos of about 500x375 and 110 kB are made up, packed, and streamed: by threads and by processes, by 1 to all cores.
Then a ResNet-50 MoCo step, and a device that is merely kept busy as long as a step of 5,000 images/s, are fed from the
pack and compared with themselves on images that are on the device already. `waits` is the share of time lost to the
input; `exhausted` is what it ran out of. Other decoders (torchvision's, nvJPEG) are timed alone, for comparison.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.measuring import Results, Row, wait_for
from benchmarks.steps import on_device, settings
from unitsphere.common.machine import worker_count
from unitsphere.common.randomness import generator
from unitsphere.config.config import Config
from unitsphere.data.images import Images
from unitsphere.data.loader import Loader
from unitsphere.data.pack import pack
from unitsphere.data.packfile import open_pack
from unitsphere.images.canvas import Canvas
from unitsphere.images.decode import decode, open_picture, picture_array
from unitsphere.methods.learners.learner import Moment
from unitsphere.optimisation.optimisers import build_optimizer
from unitsphere.training.make_views import make_views_of
from unitsphere.training.step import PlainStep, RecordedStep, TakeStep

BATCH = 256
ASKED = 5000  # images/s
DISTINCT = 256  # photos; the pack repeats them, as files of their own
REDUCE_TO = 448  # what a run with 224x224 views asks for
# Side of a speck of noise in pixels, and how strong it is: about what photos have, in detail and in bytes.
SPECKS = ((1, 13), (2, 15), (4, 13), (16, 20), (64, 35), (200, 40))
Work = Callable[[Canvas, int], Any]


def photo(seed: int, width: int, height: int) -> bytes:
    """A JPEG of quality 90: noise of all scales, the fine ones grey."""
    rng = np.random.default_rng(seed)
    pixels = np.full((height, width, 3), 128, np.float32)
    for side, strength in SPECKS:
        grid = (max(2, height // side), max(2, width // side))
        for planes in ([0], [1], [2]) if side > 2 else ([0, 1, 2],):
            noise = Image.fromarray(rng.standard_normal(grid, np.float32)).resize((width, height))
            pixels[:, :, planes] += strength * np.asarray(noise)[:, :, None]
    out = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def packed(files: list[bytes], count: int, path: Path) -> Images:
    """`count` images in a pack, which repeat the files."""
    images = Images("made up", [f"{n}.jpg" for n in range(count)], None, None, lambda n: files[n % len(files)])
    pack({"train": images}, path)
    return open_pack(path)["train"]


def in_random_order(count: int) -> Iterator[torch.Tensor]:
    for epoch in itertools.count():
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
        yield from (batch for batch in order.split(BATCH) if len(batch) == BATCH)


def flow(canvases: Iterable[Canvas], work: Work, device: torch.device, seconds: float) -> Row:
    """Images/s through `work`, which never runs more than two batches ahead of the device."""
    running: deque[torch.cuda.Event] = deque()
    images, pixels, started = 0, 0, 0.0
    for number, canvas in enumerate(canvases):
        if number == 3:
            wait_for(device)
            images, pixels, started = 0, 0, time.perf_counter()
        work(canvas, number)
        images, pixels = images + len(canvas), pixels + canvas.nbytes
        if device.type == "cuda":
            running.append(torch.cuda.current_stream(device).record_event())
            if len(running) > 2:
                running.popleft().synchronize()
        if number >= 3 and time.perf_counter() - started > seconds:
            break
    wait_for(device)
    took = time.perf_counter() - started
    return {"images_per_second": round(images / took), "copied_gb_per_second": round(pixels / took / 1e9, 2)}


def time_stream(
    images: Images, work: Work, device: torch.device, seconds: float, *, workers: int, processes: bool
) -> Row:
    """A loader's stream from its start to its end. cores_busy: how many the whole of it kept busy."""
    loader = Loader(images, reduce_to=REDUCE_TO, device=device, resident=False, workers=workers, processes=processes)
    started, cpu = time.perf_counter(), cpu_seconds()
    stream = loader.batches(in_random_order(len(images)))
    row = flow((canvas for _, canvas in stream), work, device, seconds)
    stream.close()  # type: ignore[attr-defined]
    busy = round((cpu_seconds() - cpu) / (time.perf_counter() - started), 1)
    return row | {"workers": workers, "per_worker": round(row["images_per_second"] / workers), "cores_busy": busy}


def cpu_seconds() -> float:
    """Of this process and of those it has waited for."""
    return sum(os.times()[:4])


def fed(images: Images, work: Work, results: Results, section: str, seconds: float) -> None:
    """What the work does with images that are there, and with streams."""
    device, every = results.device, worker_count()
    loader = Loader(images, reduce_to=REDUCE_TO, device=device, resident=False, workers=every)
    _, canvas = next(loader.batches(in_random_order(len(images))))
    results.add(section, "on the device", lambda: flow(itertools.repeat(canvas), work, device, seconds))
    for processes, name in ((False, "threads"), (True, "processes")):
        stream = partial(time_stream, images, work, device, seconds, workers=every, processes=processes)
        results.add(section, f"streamed by {every} {name}", stream)


def judge(results: Results, gb_per_second: float) -> None:
    """Adds to the streams how long they waited, and for what."""
    for section in ("busy device", "resnet50"):
        rows = results.sections.get(section, {}).get("rows", {})
        there = rows.get("on the device", {}).get("images_per_second")
        if rows:
            results.sections[section]["pinned_copy_gb_per_second"] = round(gb_per_second, 1)
        for name, row in rows.items():
            if "workers" not in row or not there:
                continue
            row["waits"] = round(1 - row["images_per_second"] / there, 3)
            if row["waits"] < 0.05:
                row["exhausted"] = "nothing: the device is busy"
            elif row["cores_busy"] > 0.9 * worker_count():
                row["exhausted"] = "the CPU's cores"
            elif row["copied_gb_per_second"] > 0.8 * gb_per_second:
                row["exhausted"] = "the copy to the device"
            else:
                row["exhausted"] = "no resource: workers wait for a lock or for each other"
            print(f"  {section}, {name}: waits {row['waits']:.1%}; exhausted: {row['exhausted']}")
    results.write()


def busy_device(device: torch.device) -> Work:
    """Work that takes as long as a step of ASKED images/s."""
    cycles = 100_000_000
    torch.cuda._sleep(cycles)
    wait_for(device)
    started = time.perf_counter()
    torch.cuda._sleep(cycles)
    wait_for(device)
    step = int(cycles * BATCH / ASKED / (time.perf_counter() - started))
    return lambda canvas, number: torch.cuda._sleep(step)


def training_step(config: Config, device: torch.device, compiled: bool, canvas: Canvas) -> Work:
    """Views and step as in a run."""
    method = on_device(config, device, compiled)
    make_views = make_views_of(config, method.views, None)
    plain = PlainStep(method, build_optimizer(config, method), precision="bf16")
    drawn = method.inputs(config.batch_size, Moment(0, 1, 0, 1), generator(0, "step", 0))
    inputs = {name: tensor.to(device) for name, tensor in drawn.items()}
    take: TakeStep = RecordedStep(plain, make_views(canvas, "views", 0), inputs)
    return lambda canvas, number: take(make_views(canvas, "views", number), inputs, config.learning_rate)


def time_alone(decode_one: Callable[[bytes], Any], files: list[bytes]) -> Row:
    """One thread, CPU time."""
    for file in files[:8]:
        decode_one(file)
    started = time.process_time()
    for file in files:
        decode_one(file)
    took = (time.process_time() - started) / len(files)
    return {"ms": round(1e3 * took, 3), "images_per_second": round(1 / took)}


def by_pillow(file: bytes) -> np.ndarray:
    return picture_array(open_picture(file))


def time_nvjpeg(files: list[bytes], device: torch.device) -> Row:
    """Batches decoded on the device into the pixels of a canvas, by one thread. Rounds differently from libjpeg."""
    from torchvision.io import decode_jpeg

    encoded = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files[:BATCH]]

    def batch() -> list[torch.Tensor]:
        images = [image.permute(1, 2, 0).reshape(-1, 3) for image in decode_jpeg(encoded, device=device)]
        torch.cat(images)
        return images

    first = batch()[0].cpu().numpy().astype(int) - decode(files[0]).reshape(-1, 3)
    wait_for(device)
    started, cpu = time.perf_counter(), cpu_seconds()
    for _ in range(10):
        batch()
    wait_for(device)
    took = time.perf_counter() - started
    return {
        "images_per_second": round(10 * len(encoded) / took),
        "cores_busy": round((cpu_seconds() - cpu) / took, 1),
        "largest_difference": int(np.abs(first).max()),
        "mean_difference": round(float(np.abs(first).mean()), 3),
    }


def time_resident(images: Images, device: torch.device, processes: bool) -> Row:
    started = time.perf_counter()
    Loader(images, device=device, resident=True, processes=processes)
    took = time.perf_counter() - started
    return {"ms": round(1e3 * took), "images_per_second": round(len(images) / took)}


def copy_rate(device: torch.device) -> float:
    """GB/s from pinned memory."""
    pinned = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    pinned.to(device, non_blocking=True)
    wait_for(device)
    started = time.perf_counter()
    for _ in range(4):
        pinned.to(device, non_blocking=True)
    wait_for(device)
    return 4 * pinned.numel() / (time.perf_counter() - started) / 1e9


def measure(results: Results, folder: Path, count: int, small: int, seconds: float, compiled: bool) -> None:
    device = results.device
    with ThreadPoolExecutor(worker_count()) as pool:
        photos = list(pool.map(lambda n: photo(n, 500, 375) if n % 4 else photo(n, 375, 500), range(DISTINCT)))
        thumbnails = list(pool.map(lambda n: photo(n, 32, 32), range(4 * DISTINCT)))
    images = packed(photos, count, folder / "photos.pack")
    size = np.mean([len(file) for file in photos]) / 1e3

    results.section("one core", f"{size:.0f} kB JPEGs of 500x375, one thread, CPU time")
    results.add("one core", "Pillow", lambda: time_alone(by_pillow, photos))
    results.add("one core", "unitsphere", lambda: time_alone(decode, photos))

    results.section("resident", f"{small} JPEGs of 32x32, until all are on the device")
    tiny = packed(thumbnails, small, folder / "thumbnails.pack")
    for processes, name in ((False, "threads"), (True, "processes")):
        results.add("resident", name, partial(time_resident, tiny, device, processes))

    results.section("stream", f"{size:.0f} kB JPEGs of 500x375 from a pack to the device, batch {BATCH}")
    counts = sorted({n for n in (1, 2, 4, 8, 16) if n < worker_count()} | {worker_count()})
    for processes, name in ((False, "threads"), (True, "processes")):
        for workers in counts:
            how = partial(time_stream, workers=workers, processes=processes)
            results.add("stream", f"{workers} {name}", partial(how, images, lambda *_: None, device, seconds / 2))
    if device.type != "cuda":
        return

    results.section("busy device", f"a device busy as long as a step of {ASKED} images/s, fed from the pack")
    fed(images, busy_device(device), results, "busy device", seconds)
    results.section("resnet50", f"MoCo v2 step and views, {'compiled and ' if compiled else ''}recorded")
    config = settings("resnet50", False, bn_groups=1, mean=[0.5] * 3, std=[0.25] * 3)
    _, canvas = next(Loader(images, device=device, resident=False).batches(in_random_order(count)))
    fed(images, training_step(config, device, compiled, canvas), results, "resnet50", seconds)
    judge(results, copy_rate(device))

    results.section("nvJPEG", "torchvision's, alone")  # last: it might take the process with it
    results.add("nvJPEG", "one thread", lambda: time_nvjpeg(photos, device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--images", type=int, default=10_000, help="in the pack")
    parser.add_argument("--small", type=int, default=50_000, help="of 32x32, made resident")
    parser.add_argument("--seconds", type=float, default=4, help="for each stream")
    parser.add_argument("--compile", action="store_true", help="compile the networks first, which takes minutes")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="rows with one of these in SECTION/ROW")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    results = Results(options.json, torch.device(options.device), options.only)
    with tempfile.TemporaryDirectory() as folder:
        measure(results, Path(folder), options.images, options.small, options.seconds, options.compile)


if __name__ == "__main__":
    main()
