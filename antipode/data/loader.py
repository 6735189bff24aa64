"""Batches of whole pictures on the device: kept there decoded if they fit, decoded ahead by threads if not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from antipode.data.broken import BrokenImages
from antipode.data.canvas import Canvas
from antipode.data.decode import BrokenImage, decode
from antipode.data.images import Images
from antipode.data.machine import free_memory, worker_count

AHEAD = 4  # batches in the making while one is used
CHUNK = 512  # images decoded together when everything is made resident
SAMPLE = 64  # images that tell how large all will be
BUDGET = {"cpu": 0.25, "cuda": 0.4}  # share of the free memory that resident images may take


class Loader:
    """Gives the images of any index tensors, in order.

    An image that cannot be read or decoded is counted, named in `broken`, and replaced by the next good one; the
    indices that come out say which image it really is. The same batches come out resident and streaming.
    """

    def __init__(
        self,
        images: Images,
        *,
        channels: int = 3,
        depth: int = 8,
        reduce_to: int | None = None,
        device: torch.device | str = "cpu",
        resident: bool | None = None,
        workers: int | None = None,
        max_broken: float = 0.01,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """resident: None decides by the memory at hand. max_broken: the share of broken images beyond which
        it is an error. progress: called with (images decoded, all images) while they are made resident."""
        self.images = images
        self.channels, self.depth, self.reduce_to = channels, depth, reduce_to
        self.device = torch.device(device)
        self.workers = workers or worker_count()
        self._broken = BrokenImages(images.name, len(images), max_broken)
        self.resident = self._fits() if resident is None else resident
        if self.resident:
            self._canvas, self._delivered, self._place = self._decode_all(progress)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def broken(self) -> dict[str, str]:
        """Name -> reason of the broken images met so far."""
        return self._broken.reasons()

    def batches(self, batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, Canvas]]:
        """For each (n,) tensor of indices: the indices delivered, (n,) int64, and their canvas on the device."""
        return self._select(batches) if self.resident else self._stream(batches)

    def _select(self, batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, Canvas]]:
        for indices in batches:
            indices = indices.cpu().long()
            yield self._delivered[indices], self._canvas.select(self._place[indices])

    def _stream(self, batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, Canvas]]:
        pool = ThreadPoolExecutor(self.workers, "antipode-decode")
        collector = ThreadPoolExecutor(1, "antipode-collect")
        pending: deque[Future[tuple[Tensor, Canvas]]] = deque()
        try:
            for indices in batches:
                parts = np.array_split(indices.cpu().numpy(), min(len(indices), 4 * self.workers))
                pending.append(collector.submit(self._collect, [pool.submit(self._deliver, p) for p in parts]))
                if len(pending) > AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:  # also when the caller stops early: what has not begun is dropped
            pool.shutdown(cancel_futures=True)
            collector.shutdown(cancel_futures=True)

    def _collect(self, parts: list[Future[list[tuple[int, np.ndarray]]]]) -> tuple[Tensor, Canvas]:
        delivered = [pair for part in parts for pair in part.result()]
        canvas = Canvas.of([array for _, array in delivered])
        if self.device.type == "cuda":
            canvas = canvas.pin()
        indices = torch.tensor([index for index, _ in delivered], dtype=torch.int64)
        return indices, canvas.to(self.device, non_blocking=True)

    def _deliver(self, indices: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """For each index, itself or the next good one, and its image."""
        return [self._next_good(int(index)) for index in indices]

    def _next_good(self, index: int) -> tuple[int, np.ndarray]:
        for step in range(len(self.images)):
            candidate = (index + step) % len(self.images)
            array = self._decode(candidate)
            if array is not None:
                return candidate, array
        raise self._broken.error()

    def _decode_each(self, indices: np.ndarray) -> list[np.ndarray | None]:
        return [self._decode(int(index)) for index in indices]

    def _decode(self, index: int) -> np.ndarray | None:
        """(H, W, C), or None if the image is broken, which is noted."""
        if index in self._broken:
            return None
        try:
            item = self.images.read(index)
            return decode(item, channels=self.channels, depth=self.depth, reduce_to=self.reduce_to)
        except (BrokenImage, OSError) as problem:
            self._broken.note(index, self.images.names[index], str(problem))
            return None

    def _fits(self) -> bool:
        """Whether all images, decoded, stay within the budget: judged from a sample."""
        count = len(self.images)
        sample = np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).round().astype(int))
        with ThreadPoolExecutor(self.workers) as pool:
            decoded = [array for array in pool.map(self._decode, sample.tolist()) if array is not None]
        if not decoded:
            return False
        expected = Canvas.of(decoded).nbytes / len(decoded) * count
        places = {torch.device("cpu"), self.device}  # they are gathered on the CPU, wherever they end
        return all(expected <= BUDGET.get(place.type, BUDGET["cpu"]) * free_memory(place) for place in places)

    def _decode_all(self, progress: Callable[[int, int], None] | None) -> tuple[Canvas, Tensor, Tensor]:
        """The good images on the device; for each index the index delivered, and its place on the canvas."""
        count = len(self.images)
        chunks: list[Canvas] = []
        good: list[int] = []
        with ThreadPoolExecutor(self.workers) as pool:
            try:
                for start in range(0, count, CHUNK):
                    chunk = range(start, min(start + CHUNK, count))
                    parts = np.array_split(chunk, self.workers)  # a task for each image would cost more than it does
                    arrays = [array for part in pool.map(self._decode_each, parts) for array in part]
                    found = [i for i, array in zip(chunk, arrays, strict=True) if array is not None]
                    if found:
                        good += found
                        chunks.append(Canvas.of([a for a in arrays if a is not None]))
                    if progress:
                        progress(chunk.stop, count)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        if not good:
            raise self._broken.error()
        place = np.searchsorted(good, np.arange(count)) % len(good)  # past the last good one: the first
        canvas = Canvas.join(chunks).to(self.device)
        return canvas, torch.tensor(good)[place], torch.from_numpy(place)


def channel_statistics(loader: Loader, sample: int = 2000) -> tuple[list[float], list[float]]:
    """Mean and deviation of each channel, in [0, 1], over evenly spaced images, each image counting alike
    whatever its size. The deviation is at least one grey level, since views divide by it."""
    count = len(loader)
    indices = torch.linspace(0, count - 1, min(count, sample), dtype=torch.float64).round().long()
    first, second = [], []
    for _, canvas in loader.batches(indices.split(64)):
        for n in range(len(canvas)):
            start = int(canvas.offsets[n])
            pixels = canvas.pixels[start : start + int(canvas.heights[n] * canvas.widths[n])].double()
            pixels = pixels / canvas.full_scale
            first.append(pixels.mean(0))
            second.append(pixels.square().mean(0))
    mean = torch.stack(first).mean(0)
    variance = torch.stack(second).mean(0) - mean.square()
    deviation = variance.clamp_min(0).sqrt().clamp_min(1 / canvas.full_scale)
    return mean.tolist(), deviation.tolist()
