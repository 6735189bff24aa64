"""Batches of whole pictures on the device: kept there decoded if they fit, decoded ahead by workers if not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from unitsphere.common.machine import free_memory, worker_count
from unitsphere.data.broken import BrokenImages
from unitsphere.data.images import Images, evenly
from unitsphere.data.workers import CAN_FORK, DecodeMany, Outcome, Submit, decoding
from unitsphere.images.canvas import Canvas
from unitsphere.images.decode import BrokenImage, decode, formats, jpeg_decoder

__all__ = ["Loader", "channel_statistics"]

AHEAD = 4  # batches in the making while one is used
PART = 16  # images of a batch that a worker decodes at a time
CHUNK = 64  # the same when everything is made resident
SAMPLE = 64  # images that tell how large all will be
MANY = 1000  # images that are worth processes to decode them
BUDGET = {"cpu": 0.25, "cuda": 0.4}  # share of the free memory that resident images may take

Part = tuple[list[int], Canvas | None]  # which images, and their pixels; None for none


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
        processes: bool | None = None,
        max_broken: float = 0.01,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """resident: None decides by the memory at hand. processes: whether the workers are processes (on Linux) or
        threads; None takes processes for many encoded images, and threads for what Python code gives as arrays,
        since that code need not survive a fork. max_broken: the share of broken images beyond which it is an error.
        progress: called with (images decoded, all images) while they are made resident."""
        self.images = images
        self.channels, self.depth, self.reduce_to = channels, depth, reduce_to
        self.device = torch.device(device)
        self.count = len(images.names)
        self.workers = workers or worker_count()
        self.processes = CAN_FORK and (self._are_encoded() if processes is None else processes)
        self._broken = BrokenImages(images.name, self.count, max_broken)
        self.resident = self._fits() if resident is None else resident
        if self.resident:
            self._canvas, self._delivered, self._place = self._decode_all(progress)

    def __len__(self) -> int:
        return self.count

    @property
    def broken(self) -> dict[str, str]:
        """Name -> reason of the broken images met so far."""
        return self._broken.reasons()

    @property
    def one_size(self) -> bool:
        """Whether all images are known to be of one size."""
        sides = (self._canvas.heights, self._canvas.widths) if self.resident else ()
        return self.resident and all(bool((side == side[0]).all()) for side in sides)

    def batches(self, batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, Canvas]]:
        """For each (n,) tensor of indices: the indices delivered, (n,) int64, and their canvas on the device."""
        return self._select(batches) if self.resident else self._stream(batches)

    def _select(self, batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, Canvas]]:
        for indices in batches:
            indices = indices.cpu().long()
            place, whole = self._place[indices], self._canvas
            where = (whole.offsets[place], whole.heights[place], whole.widths[place])
            yield self._delivered[indices], Canvas(whole.pixels, *where, whole.full_scale)

    def _stream(self, batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, Canvas]]:
        """Pixels reach the device on a stream of their own, while it works on earlier ones."""
        copying = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        pending: deque[list[Future[Part]]] = deque()
        with self._decoding() as submit:
            for indices in batches:
                parts = indices.cpu().split(max(1, min(PART, len(indices) // self.workers)))
                pending.append([submit(self._deliver, part.tolist(), copying) for part in parts])
                if len(pending) > AHEAD:
                    yield self._join(pending.popleft(), copying)
            while pending:
                yield self._join(pending.popleft(), copying)

    def _deliver(self, decode_many: DecodeMany, indices: list[int], copying: torch.cuda.Stream | None) -> Part:
        """For each index, itself or the next good one, on the way to the device."""
        wanted = [self._good(index) for index in indices]
        outcomes = decode_many(wanted)
        while bad := self._note_broken(wanted, outcomes):
            for n in bad:
                wanted[n] = self._good(wanted[n])
            # The next call reuses the memory in which these may lie.
            outcomes = [outcome if isinstance(outcome, str) else outcome.copy() for outcome in outcomes]
            for n, outcome in zip(bad, decode_many([wanted[n] for n in bad]), strict=True):
                outcomes[n] = outcome
        canvas = _canvas(outcomes, pin=copying is not None)
        if canvas is not None and copying is not None:
            with torch.cuda.stream(copying):
                canvas = canvas.to(self.device, non_blocking=True)
        return wanted, canvas

    def _join(self, futures: list[Future[Part]], copying: torch.cuda.Stream | None) -> tuple[Tensor, Canvas]:
        parts = [future.result() for future in futures]
        delivered = torch.tensor([index for indices, _ in parts for index in indices], dtype=torch.int64)
        canvases = [canvas for _, canvas in parts if canvas is not None]
        if copying is None:
            return delivered, Canvas.join(canvases)
        with torch.cuda.stream(copying):
            canvas = Canvas.join(canvases)
        user = torch.cuda.current_stream(self.device)
        user.wait_stream(copying)
        canvas.pixels.record_stream(user)  # its memory is not written again before the user is done with it
        return delivered, canvas

    def _good(self, index: int) -> int:
        """The first image from this one on that is not known to be broken."""
        for step in range(self.count):
            candidate = (index + step) % self.count
            if candidate not in self._broken:
                return candidate
        raise self._broken.error()

    def _note_broken(self, indices: list[int], outcomes: list[Outcome]) -> list[int]:
        """The places of the broken ones, which are noted."""
        bad = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, str)]
        for n in bad:
            self._broken.note(indices[n], self.images.names[indices[n]], str(outcomes[n]))
        return bad

    def _decode(self, index: int) -> Outcome:
        """Changes nothing, for it may run in another process."""
        try:
            item = self.images.read(index)
            limit = self.images.max_pixels
            return decode(item, channels=self.channels, depth=self.depth, reduce_to=self.reduce_to, max_pixels=limit)
        except (BrokenImage, OSError) as problem:
            return str(problem)

    def _decoding(self) -> AbstractContextManager[Submit]:
        formats(), jpeg_decoder()  # loads what decodes: done before a fork, it is done once
        return decoding(self._decode, self.workers, self.processes)

    def _are_encoded(self) -> bool:
        """Whether there are many images and they are files' contents: judged from the first that can be read."""
        if self.count < MANY:
            return False
        for index in range(SAMPLE):
            try:
                return isinstance(self.images.read(index), bytes)
            except (BrokenImage, OSError):
                continue
        return False

    def _fits(self) -> bool:
        """Whether all images, decoded, stay within the budget: judged from a sample."""
        count = self.count
        sample = evenly(count, SAMPLE).tolist()
        with decoding(self._decode, self.workers, processes=False) as submit:
            parts = [future.result() for future in [submit(self._decode_part, [index]) for index in sample]]
            sizes = [canvas.pixels.nbytes for _, canvas in parts if canvas is not None]
        if not sizes:
            return False
        expected = sum(sizes) / len(sizes) * count
        return fits(expected, self.device)

    def _decode_all(self, progress: Callable[[int, int], None] | None) -> tuple[Canvas, Tensor, Tensor]:
        """The good images on the device; for each index the index delivered, and its place on the canvas."""
        count = self.count
        good: list[int] = []

        def decoded(submit: Submit) -> Iterator[Canvas]:
            """The chunks one after another, with few in the making: what is decoded and not yet gathered is memory."""
            ranges = [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
            waiting = iter(ranges)
            begun = islice(waiting, self.workers + AHEAD)
            futures = deque(submit(self._decode_part, list(chunk)) for chunk in begun)
            for chunk in ranges:
                found, canvas = futures.popleft().result()
                futures.extend(submit(self._decode_part, list(later)) for later in islice(waiting, 1))
                good.extend(found)
                if canvas is not None:
                    yield canvas
                if progress:
                    progress(chunk.stop, count)
            if not good:
                raise self._broken.error()

        with self._decoding() as submit:
            canvas = gathered(decoded(submit), count)
        if self.device.type != "cpu":
            canvas = canvas.to(self.device)
        place = np.searchsorted(good, np.arange(count)) % len(good)  # past the last good one: the first
        return canvas, torch.tensor(good)[place], torch.from_numpy(place)

    def _decode_part(self, decode_many: DecodeMany, indices: list[int]) -> Part:
        """The good ones among the images."""
        outcomes = decode_many(indices)
        bad = set(self._note_broken(indices, outcomes))
        return [index for n, index in enumerate(indices) if n not in bad], _canvas(outcomes)


def _canvas(outcomes: list[Outcome], *, pin: bool = False) -> Canvas | None:
    good = [outcome for outcome in outcomes if isinstance(outcome, np.ndarray)]
    return Canvas.of(good, pin=pin) if good else None


def gathered(parts: Iterable[Canvas], count: int) -> Canvas:
    """All images of the parts, in order, on the CPU, in hardly more memory than they take once.

    Each part is copied when it comes, and may be freed before the next. parts: at least one image.
    count: how many images to expect at most.
    """
    # Nothing small may be kept of a part: between the freed parts it would keep malloc from joining them, and the
    # next parts would take fresh memory.
    offsets, heights, widths = torch.empty((3, count), dtype=torch.int64)
    whole: Tensor | None = None
    filled = seen = 0
    for part in parts:
        before, end = seen, filled + len(part.pixels)
        seen += len(part.offsets)
        # Room for as many pixels as the images seen so far suggest. Pages are only taken when they are written, so
        # an eighth too much costs nothing; too little shows early, while there is little to copy.
        expected = max(end, end * count // seen)
        if whole is None or expected > len(whole):
            larger = part.pixels.new_empty((expected + expected // 8, part.pixels.shape[1]))
            if whole is not None:
                larger[:filled] = whole[:filled]
            whole = larger
        whole[filled:end] = part.pixels
        offsets[before:seen] = part.offsets + filled
        heights[before:seen], widths[before:seen] = part.heights, part.widths
        filled, full_scale = end, part.full_scale
    if whole is None:
        raise ValueError("no images were given; at least one is needed")
    return Canvas(whole[:filled], offsets[:seen], heights[:seen], widths[:seen], full_scale)


def fits(nbytes: float, device: torch.device) -> bool:
    """Whether decoded images of so many bytes stay within the budget, on the device and on the CPU, where they are
    gathered."""
    places = {torch.device("cpu"), device}
    return all(nbytes <= BUDGET.get(place.type, BUDGET["cpu"]) * free_memory(place) for place in places)


def channel_statistics(loader: Loader, sample: int = 2000) -> tuple[list[float], list[float]]:
    """Mean and deviation of each channel, in [0, 1], over evenly spaced images, each image counting alike
    whatever its size. The deviation is at least one grey level, since views divide by it."""
    indices = torch.from_numpy(evenly(len(loader), sample))
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
