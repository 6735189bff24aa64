"""Shared by the tests: small real images on the disk, and the command in a process of its own."""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from unitsphere.common.allocator import fast_cpu
from unitsphere.data.pack import pack
from unitsphere.data.shapes import shapes
from unitsphere.studies.study import Table
from unitsphere.views.policies import Policy

fast_cpu()  # as the command does

SMALL = "--backbone resnet-tiny --image-size 16 --batch-size 16 --queue-size 64 --bn-groups 2 --device cpu".split()
# Every operation of the views, each for some images and not for others.
EVERYTHING = Policy(
    crop_scale=(0.08, 1.0),
    brightness=0.8,
    contrast=0.8,
    saturation=0.8,
    hue=0.5,
    jitter=0.7,
    grey=0.3,
    blur=0.5,
    solarise=0.3,
    flip=0.5,
)


def pytest_collection_modifyitems(items):
    """Tests of a card are skipped where there is none, unless Triton's interpreter is to do its work."""
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET"):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def command(*words, cwd=None, env=None, preexec_fn=None) -> subprocess.CompletedProcess:
    """`unitsphere ...` in a process of its own, with one thread: a fork of one that has imported torch already
    (warm_command.py), or with a preexec_fn one that begins from nothing."""
    if preexec_fn is None:
        return Started(*words, cwd=cwd, env=env).completed()
    return subprocess.run(
        [sys.executable, "-m", "unitsphere", *map(str, words)],
        capture_output=True,
        text=True,
        env=surroundings(env),
        cwd=cwd,
        timeout=240,
        preexec_fn=preexec_fn,
    )


def surroundings(env: dict[str, str] | None) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"} | (env or {})


class Started:
    """`unitsphere ...` as it runs: what tests need of subprocess.Popen, of a fork (warm_command.py)."""

    def __init__(self, *words, cwd=None, env=None) -> None:
        self.words = [str(word) for word in words]
        self.folder = tempfile.TemporaryDirectory()
        self.outputs = {name: os.path.join(self.folder.name, name) for name in ("stdout", "stderr")}
        for output in self.outputs.values():
            Path(output).touch()
        asked = {"words": self.words, "env": surroundings(env), "cwd": os.fspath(cwd or os.getcwd())}
        self.pid = ask_forks(**asked, **self.outputs)
        self.returncode = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = ask_forks(pid=self.pid)
        return self.returncode

    def wait(self, seconds: float = 240) -> int:
        """The exit status. What takes longer is killed, and fails the test."""
        late = time.monotonic() + seconds
        while (status := self.poll()) is None:
            if time.monotonic() > late:
                self.send_signal(signal.SIGKILL)
                raise TimeoutError(f"{' '.join(self.words)} has not ended after {seconds} s")
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def completed(self) -> subprocess.CompletedProcess:
        status = self.wait()
        found = (Path(output).read_text() for output in self.outputs.values())
        return subprocess.CompletedProcess(self.words, status, *found)


def ask_forks(**asked):
    forks = warm_command()
    print(json.dumps(asked), file=forks.stdin, flush=True)
    return json.loads(forks.stdout.readline())


@cache
def warm_command() -> subprocess.Popen:
    """What runs the command in forks of one process, which ends with the tests: its input is closed then."""
    return subprocess.Popen(
        [sys.executable, Path(__file__).with_name("warm_command.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@cache
def packed_shapes(count: int = 160) -> Path:
    """Drawn shapes of 16 pixels, and 40 to judge by, in a pack. `shapes=160x16` would draw 660 in every process, which
    takes as long as training on them."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    parts = {"train": shapes(count, 16), "val": shapes(40, 16, split="val")}
    return pack(parts, os.path.join(folder, "shapes.pack")).path


def interpret_kernels(file: str) -> None:
    """The tests of a file that run Triton's kernels, by its interpreter on the CPU: in a process of their own, since
    Triton reads TRITON_INTERPRET when it is imported."""
    triton = pytest.importorskip("triton")
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", file]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=240)
    broken = "TypeError: only 0-dimensional arrays can be converted to Python scalars"
    if triton.__version__.startswith("3.6.") and broken in done.stdout:  # its own __index__ of a tensor
        pytest.skip("the interpreter of Triton 3.6 cannot do with this numpy; on a card the kernels are compared")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def table_of(cells, values) -> Table:
    """One seed."""
    return Table(cells, [{} if value is None else {"0": value} for value in values])


def write_images(folder: Path, count: int, size=(24, 20), seed: int = 0, suffix: str = ".png") -> list[Path]:
    """Smooth random pictures: a few coloured waves, different in each."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0 : size[1], 0 : size[0]] / max(size)
    paths = []
    for number in range(count):
        waves = [np.sin(rng.uniform(2, 12) * (x * np.cos(a) + y * np.sin(a))) for a in rng.uniform(0, 6, 3)]
        paths.append(folder / f"{number:04d}{suffix}")
        Image.fromarray(np.uint8(127 + 120 * np.stack(waves, -1))).save(paths[-1])
    return paths


@pytest.fixture
def photos(tmp_path) -> Path:
    """A flat folder of 60 unlabelled pictures."""
    write_images(tmp_path / "photos", 60)
    return tmp_path / "photos"


def write_labelled(folder: Path) -> Path:
    """Two sub-folders of 40 pictures each: reddish and bluish."""
    for number, (name, tint) in enumerate((("red", (1, 0.3, 0.2)), ("blue", (0.2, 0.3, 1)))):
        for path in write_images(folder / name, 40, seed=number):
            Image.fromarray(np.uint8(np.asarray(Image.open(path)) * tint)).save(path)
    return folder


@pytest.fixture
def labelled(tmp_path) -> Path:
    return write_labelled(tmp_path / "labelled")
