"""Workers that decode images: in threads, or each in a process of its own.

Threads share one interpreter, whose lock they hold between the long calls into libjpeg: many of them, or images that
take no time, wait for each other and for the training loop. Processes do not wait. Their pixels come back through
memory that both sides map, so that nothing but sizes is pickled.
"""

from __future__ import annotations

import gc
import math
import mmap
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np

from unitsphere.common.errors import UnitsphereError
from unitsphere.common.stopping import SIGNALS

CAN_FORK = sys.platform == "linux"  # elsewhere there is no fork, or system libraries do not survive it
ANSWER = 64 * 2**20  # bytes mapped for the pixels of one answer; pages are taken only as they are written

Outcome = np.ndarray | str  # an image (H, W, C), or why it is broken
DecodeOne = Callable[[int], Outcome]
DecodeMany = Callable[[Sequence[int]], list[Outcome]]
Submit = Callable[..., Future[Any]]


@contextmanager
def decoding(decode: DecodeOne, workers: int, processes: bool) -> Iterator[Submit]:
    """Gives submit(work, *arguments), which has a worker run work(decode_many, *arguments) and returns the future.

    The arrays of decode_many are valid until it is called again, or the work returns. `decode` must be safe to call
    from several threads, or after a fork. At the end, also an early one, what has not begun is dropped.
    """

    def here(indices: Sequence[int]) -> list[Outcome]:
        return [decode(index) for index in indices]

    idle: SimpleQueue[DecodeMany] = SimpleQueue()

    def run(work: Callable[..., Any], *arguments: Any) -> Any:
        decode_many = idle.get()
        try:
            return work(decode_many, *arguments)
        finally:
            idle.put(decode_many)

    with ExitStack() as ending:  # from the last line to the first
        threads = ThreadPoolExecutor(workers, "unitsphere-decode")
        ending.callback(threads.shutdown)
        for _ in range(workers):
            idle.put(ending.enter_context(closing(DecodingProcess(decode))) if processes else here)
        ending.callback(threads.shutdown, wait=False, cancel_futures=True)
        yield lambda work, *arguments: threads.submit(run, work, *arguments)


class DecodingProcess:
    """A forked process that decodes for one thread at a time. It must not touch CUDA.

    It ends when its pipe closes, and however this process ends, its pipes close: a process forked later holds copies
    of the ends of earlier ones, but the last has only its own, so they end one after another.
    """

    def __init__(self, decode: DecodeOne) -> None:
        self.shared = mmap.mmap(-1, ANSWER)
        self.pipe, theirs = Pipe()
        with warnings.catch_warnings():
            # Python warns that another thread may hold a lock that nobody in the fork would ever release. The fork
            # takes none but those of malloc and of Python itself, and these are made anew.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            self.pipe.close()
            _serve(theirs, self.shared, decode)
        theirs.close()

    def __call__(self, indices: Sequence[int]) -> list[Outcome]:
        try:
            self.pipe.send(indices)
            answer = self.pipe.recv()
        except (EOFError, OSError):
            raise UnitsphereError(
                "A process that decodes images has died; the system may have run out of memory. "
                "Fewer workers (--workers) need less."
            ) from None
        if isinstance(answer, BaseException):
            raise answer
        return [entry if isinstance(entry, str | np.ndarray) else self._array(*entry) for entry in answer]

    def _array(self, start: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.frombuffer(self.shared, dtype, math.prod(shape), start).reshape(shape)

    def close(self) -> None:
        """The thread that waits for an answer, if there is one, gets an error."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _serve(pipe: Connection, shared: mmap.mmap, decode: DecodeOne) -> NoReturn:
    """Answers until the pipe closes. Leaves without any of the clearing up that belongs to the parent."""
    try:
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # the parent's OpenMP threads are not here, and would be waited for
        gc.freeze()  # the parent's garbage is not for the child to clear up: some of it may lie on a GPU
        # A signal to the whole group is for the parent to follow: it may still need images for its last step.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        while True:
            indices = pipe.recv()
            try:
                answer: Any = _place(shared, map(decode, indices))
            except BaseException as problem:
                answer = _picklable(problem)
            pipe.send(answer)
    except (EOFError, OSError):
        pass  # the parent is gone
    finally:
        os._exit(0)


def _place(shared: mmap.mmap, outcomes: Iterator[Outcome]) -> list[Any]:
    """For each image where it lies in the shared memory: (start, shape, dtype). One that finds no room there travels
    through the pipe, as do reasons."""
    entries: list[Any] = []
    start = 0
    for outcome in outcomes:
        if isinstance(outcome, str) or start + outcome.nbytes > len(shared):
            entries.append(outcome)
            continue
        np.frombuffer(shared, outcome.dtype, outcome.size, start)[:] = outcome.reshape(-1)
        entries.append((start, outcome.shape, outcome.dtype.str))
        start += outcome.nbytes
    return entries


def _picklable(problem: BaseException) -> BaseException:
    problem.add_note(f"in a process that decodes images:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(problem))
    except Exception:
        return UnitsphereError(f"{type(problem).__name__}: {problem}")
    return problem
