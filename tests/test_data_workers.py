"""Decoding processes answer, end with whoever asked, and never leave it waiting."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

from unitsphere.common.errors import UnitsphereError
from unitsphere.data.workers import CAN_FORK, decoding

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="processes are forked, on Linux")


def pixels(index):
    return np.full((2, 3, 1), index, np.uint8)


def take(decode_many, indices):
    return [outcome if isinstance(outcome, str) else outcome.copy() for outcome in decode_many(indices)]


def process_of(decode_many):
    """The first call tells which process has answered."""
    (pid,) = decode_many([0])
    return int(pid)


def name_process(index):
    return str(os.getpid())


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_soon(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_worker_is_a_process_of_its_own_and_all_end_with_the_block():
    with decoding(name_process, 3, processes=True) as submit:
        together = Barrier(3)  # each keeps its worker until all three are taken
        futures = [submit(lambda decode_many: (together.wait(20), process_of(decode_many))[1]) for _ in range(3)]
        pids = {future.result() for future in futures}
        assert len(pids) == 3 and os.getpid() not in pids and all(map(is_running, pids))
    assert not any(map(is_running, pids))


def test_an_early_end_does_not_wait_for_work_that_has_not_begun():
    def slow(index):
        time.sleep(0.05)
        return pixels(index)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), decoding(slow, 2, processes=True) as submit:
        futures = [submit(take, [n] * 10) for n in range(100)]  # half a second each
        raise KeyboardInterrupt
    assert time.monotonic() - started < 5
    assert futures[-1].cancelled()


def test_a_process_that_is_killed_is_an_error_and_not_a_wait():
    def die(index):
        os.kill(os.getpid(), signal.SIGKILL)
        return pixels(index)

    with decoding(die, 1, processes=True) as submit, pytest.raises(UnitsphereError, match=r"has died.*--workers"):
        submit(take, [0]).result(timeout=20)


def test_signals_to_the_whole_group_leave_the_decoding_to_the_parent():
    with decoding(name_process, 1, processes=True) as submit:
        pid = submit(process_of).result()
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        assert submit(process_of).result() == pid


def test_errors_arrive_with_the_place_where_they_arose():
    class Local(Exception):  # cannot be pickled
        pass

    def fail(index):
        raise ZeroDivisionError("in the reader") if index else Local("odd")

    with decoding(fail, 1, processes=True) as submit:
        with pytest.raises(ZeroDivisionError, match="in the reader") as caught:
            submit(take, [1]).result()
        assert "in fail" in caught.value.__notes__[0]
        with pytest.raises(UnitsphereError, match="Local: odd"):
            submit(take, [0]).result()


STREAM = """
import os, sys, threading, time
from unitsphere.data.workers import decoding
with decoding(lambda index: str(os.getpid()), 3, processes=True) as submit:
    together = threading.Barrier(3)
    work = lambda decode_many: (together.wait(20), decode_many([0]))[1]
    print(*{pid for future in [submit(work) for _ in range(3)] for pid in future.result()}, flush=True)
    LEAVE
"""


@pytest.mark.parametrize(
    ("leave", "stop"),
    [
        ("time.sleep(60)", signal.SIGKILL),
        ("time.sleep(60)", signal.SIGTERM),
        ("time.sleep(60)", signal.SIGINT),
        ("sys.exit()", None),
        ("os._exit(1)", None),
    ],
)
def test_processes_end_however_their_parent_ends(leave, stop):
    code = STREAM.replace("LEAVE", leave)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # where a shell runs us in the background, it would be ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 3
        if stop:
            parent.send_signal(stop)
        parent.wait(timeout=20)
    assert_soon(lambda: not any(map(is_running, pids)))


AFTER_OPENMP = """
import io
import numpy as np, torch
from PIL import Image
from unitsphere.data.images import Images
from unitsphere.data.loader import Loader

torch.set_num_threads(4)
torch.randn(2000, 2000).exp().sum()  # the parent's OpenMP threads live from now on

def photo(n):
    exif = Image.Exif()
    exif[0x0112] = 1 + n % 8
    out = io.BytesIO()
    noise = np.random.default_rng(n).integers(0, 256, (300, 400, 3), np.uint8)
    Image.fromarray(noise).save(out, "JPEG", **({"exif": exif} if n % 2 else {}))
    return out.getvalue()

photos = [photo(n) for n in range(16)]

class Parallel:  # a source whose own reading is parallel
    def __call__(self, n):
        torch.randn(1000, 1000).exp().sum()
        return photos[n]

images = Images("photos", [str(n) for n in range(16)], None, None, Parallel())
loader = Loader(images, resident=False, workers=2, processes=True)
print(sum(len(canvas) for _, canvas in loader.batches(torch.arange(16).split(4))))
"""


@pytest.mark.skipif(not CAN_FORK, reason="needs fork")
def test_processes_decode_after_the_parent_has_computed_in_parallel():
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", AFTER_OPENMP], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.stdout.strip() == "16", done.stderr
