"""`unitsphere doctor`: what the machine has, and what is said of it."""

import copy
import io
import json
import tomllib
from pathlib import Path

import PIL.Image
import pytest
import torch
from conftest import command

from unitsphere.cli.doctor import EXTRAS, GIB, PHOTO, advice, describe, picture

GOOD = {
    "unitsphere": "1", "python": "3.12", "system": "Linux", "cuda": "13", "nvidia_driver": True, "fork": True,
    "packages": dict.fromkeys(["torch", "triton", *EXTRAS], "1"),
    "devices": [{"name": "Card", "memory": 80 * GIB, "free": 79 * GIB, "capability": "9.0", "bf16": True}],
    "keeps_memory": True,
    "cores": {"machine": 16, "affinity": 16, "given": 16},
    "memory": 64 * GIB,
    "disks": {"working folder": {"folder": "/work", "free": 100 * GIB, "writable": True}},
    "jpeg": {"turbo": True, "bytes": 80_000, "pixels": [500, 375], "images_per_second": 400.0},
    "nccl": True, "gloo": True,
}  # fmt: skip


def but(**changes):
    """The good machine, with some facts changed: a__b is b of a."""
    facts = copy.deepcopy(GOOD)
    for path, value in changes.items():
        *way, last = path.split("__")
        place = facts
        for step in way:
            place = place[int(step) if step.isdigit() else step.replace("_", " ")]
        place[last.replace("scikit_learn", "scikit-learn")] = value
    return facts


def test_a_good_machine_has_no_warnings_and_its_rate_is_told():
    assert advice(GOOD) == []
    said = dict(describe(GOOD))
    assert "16 cores can decode about 6,400" in said["decoding"]
    assert "Card" in said["cuda:0"] and "bf16" in said["cuda:0"] and "79.0 of 80.0 GiB" in said["cuda:0"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"devices": [], "nvidia_driver": False}, ["no CUDA device"]),
        ({"devices": [], "cuda": None}, ["NVIDIA driver", "without CUDA"]),
        ({"devices__0__bf16": False}, ["--precision fp16"]),
        ({"packages__triton": None}, ["Triton"]),
        ({"devices": GOOD["devices"] * 2, "nccl": False}, ["NCCL"]),
        ({"cores__given": 8}, ["8 of 16 cores"]),
        ({"jpeg__turbo": False}, ["libjpeg-turbo"]),
        ({"jpeg__images_per_second": 50.0}, ["800 photos a second", "unitsphere pack"]),
        ({"fork": False}, ["forked"]),
        ({"memory": GIB}, ["1.0 GiB of memory", "--workers"]),
        ({"disks__working_folder__free": GIB}, ["working folder", "1.0 GiB left"]),
        ({"disks__working_folder__writable": False}, ["may not be written"]),
        ({"packages__scikit_learn": None}, ["scikit-learn", "pip install -e '.[plots]'"]),
    ],
)
def test_what_will_be_slow_is_said_with_what_to_do(changes, said):
    (warning,) = advice(but(**changes))
    for part in said:
        assert part in warning


def test_the_extras_are_those_of_the_package():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = {name: needs for name, needs in project["optional-dependencies"].items() if name not in ("all", "dev")}
    assert {need.partition(">")[0]: name for name, needs in extras.items() for need in needs} == EXTRAS


def test_the_photo_is_one():
    """Of the size that photos have, in bytes too: what decoding takes depends on them."""
    content = picture()
    with PIL.Image.open(io.BytesIO(content)) as image:
        assert image.format == "JPEG" and image.size == PHOTO
    assert 0.25 < len(content) / (PHOTO[0] * PHOTO[1]) < 1  # bytes a pixel; COCO's have 0.5


def test_the_command_tells_this_machine(tmp_path):
    done = command("doctor", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert torch.__version__.startswith(facts["packages"]["torch"])
    assert len(facts["devices"]) == torch.cuda.device_count()
    assert facts["jpeg"]["images_per_second"] > 1 and facts["cores"]["given"] >= 1 and facts["memory"] > 0
    assert facts["disks"]["working folder"] == {**facts["disks"]["working folder"], "folder": str(tmp_path)}
    assert advice(facts) == facts["warnings"]
    said = command("doctor").stdout
    for part in ("Python", "torch", "photos a second", "gloo", "GiB free"):
        assert part in said
