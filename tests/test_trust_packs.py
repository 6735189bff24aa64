"""A pack that is damaged is found out, by what describes it when it is opened, and byte for byte on request."""

import json
import tracemalloc
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from unitsphere.cli import main
from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.data.images import Images
from unitsphere.data.names import Names
from unitsphere.data.pack import pack
from unitsphere.data.packfile import BLOCK, check_pack, open_pack
from unitsphere.data.shapes import shapes
from unitsphere.data.source import open_splits


@pytest.fixture
def packed(tmp_path):
    return pack({"train": shapes(40, 16), "val": shapes(20, 16, split="val")}, tmp_path / "shapes.pack").path


def places(path: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor lies in the file."""
    content = path.read_bytes()
    header = json.loads(content[8:4096])
    found = {key: item["data_offsets"] for key, item in header.items() if key != "__metadata__"}
    return {key: (4096 + begin, 4096 + end) for key, (begin, end) in found.items()}


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("tensor", ["offsets", "labels", "classes"])
def test_a_flipped_bit_in_what_describes_a_pack_is_found_when_it_is_opened(tensor, packed):
    begin, end = places(packed)[tensor]
    for place in (begin, (begin + end) // 2, end - 1):
        flip(packed, place)
        with pytest.raises(UnitsphereError, match=r"shapes\.pack is a damaged pack"):
            open_pack(packed)
        flip(packed, place)
    assert len(open_pack(packed)["train"]) == 40


def test_check_compares_every_byte_and_names_the_images(packed, capsys):
    assert main(["pack", "--check", str(packed)]) == 0
    assert "40 train, 20 val images" in capsys.readouterr().out
    for tensor in ("encoded", "names", "name_offsets", "blocks"):
        flip(packed, places(packed)[tensor][1] - 9)
        with suppress(UnitsphereError):
            open_pack(packed)  # names and images are looked at when they are asked for
        assert main(["pack", "--check", str(packed)]) == 1
        told = capsys.readouterr().err
        assert "damaged pack" in told and "Traceback" not in told
        assert tensor != "encoded" or "train/0" in told
        flip(packed, places(packed)[tensor][1] - 9)


def test_blocks_have_hashes_of_their_own(tmp_path, monkeypatch):
    noise = np.random.default_rng(0).integers(0, 256, (8, 600, 600, 3), np.uint8)
    path = pack({"all": next(iter(open_splits(noise).values()))()}, tmp_path / "p").path
    assert places(path)["blocks"][1] - places(path)["blocks"][0] == 16 * 9  # 8.6 MB of incompressible images
    check_pack(path)
    flip(path, 4096 + 5 * BLOCK + 3)
    with pytest.raises(UnitsphereError, match=r"1 of 9 blocks differ.* [12] images lie in them, such as [45]"):
        check_pack(path)


def damaged_packs(path: Path):
    """Packs whose header says what cannot be, with right hashes or without any."""
    content = path.read_bytes()
    header = json.loads(content[8:4096])
    about = header["__metadata__"]
    yield "splits", header | {"__metadata__": about | {"splits": '{"train": [0, 999]}'}}
    yield "splits", header | {"__metadata__": about | {"splits": "[[1]]"}}
    yield "splits", header | {"__metadata__": about | {"splits": "[" * 1000}}
    yield "hashes", header | {"__metadata__": about | {"hashes": "7"}}
    yield "labels", header | {"labels": header["labels"] | {"data_offsets": [0, 16]}}
    yield "offsets", header | {"offsets": header["offsets"] | {"data_offsets": [-4000, 10**15]}}
    yield "offsets", header | {"offsets": header["offsets"] | {"dtype": "F99"}}
    yield "offsets", {key: item for key, item in header.items() if key != "offsets"}


def test_a_pack_that_says_what_cannot_be_is_damaged(packed):
    content = packed.read_bytes()
    for what, header in damaged_packs(packed):
        for written in ("unitsphere-pack-2", "unitsphere-pack-1"):
            if what == "hashes" and written.endswith("1"):
                continue
            header["__metadata__"]["format"] = written
            packed.write_bytes(content[:8] + json.dumps(header).encode().ljust(4088) + content[4096:])
            with pytest.raises(UnitsphereError, match=r"shapes\.pack is a damaged pack"):
                open_pack(packed)


def test_labels_of_no_class_and_falling_offsets_are_found_without_hashes(packed):
    tensors = load_file(packed)
    with safe_open(packed, "np") as file:
        about = file.metadata()
    where = places(packed)
    content = packed.read_bytes()
    header = json.loads(content[8:4096])
    header["__metadata__"] = {"format": "unitsphere-pack-1", "splits": about["splits"]}
    old = content[:8] + json.dumps(header).encode().ljust(4088) + content[4096:]
    packed.write_bytes(old)
    assert open_pack(packed)["train"].labels.tolist() == tensors["labels"][:40].tolist()
    for tensor, place, number in (("labels", 3, 99), ("labels", 3, -2), ("offsets", 3, 10**12), ("offsets", 0, 5)):
        begin = where[tensor][0] + 8 * place
        packed.write_bytes(old[:begin] + number.to_bytes(8, "little", signed=True) + old[begin + 8 :])
        with pytest.raises(UnitsphereError, match="damaged pack"):
            open_pack(packed)


def test_packs_without_checksums_open_with_a_notice_and_later_ones_do_not(packed, capsys):
    content = packed.read_bytes()
    header = json.loads(content[8:4096])
    for written in ("unitsphere-pack-1", "unitsphere-pack-3"):
        header["__metadata__"]["format"] = written
        packed.write_bytes(content[:8] + json.dumps(header).encode().ljust(4088) + content[4096:])
        if written.endswith("1"):
            open_pack(packed), open_pack(packed)
            assert "".join(capsys.readouterr().err.split()).count("nochecksums") == 1
        with pytest.raises(UsageError, match=r"without checksums|of format 3.*Update unitsphere"):
            check_pack(packed)


def test_packing_keeps_few_bytes_an_image(tmp_path):
    """24 and the name, where Python's lists of numbers and names took 283."""
    image, taken = np.zeros((1, 1), np.uint8), []

    def note(done: int, total: int) -> None:
        if done == total:
            taken.append(tracemalloc.get_traced_memory()[0])

    for count in (400, 4000, 8000):  # the first also imports what encodes
        images = Images("x", Names(count, lambda n: f"{n:020d}"), np.arange(count), None, lambda index: image)
        tracemalloc.start()
        pack({"all": images}, tmp_path / "p", progress=note)
        tracemalloc.stop()
    assert (taken[2] - taken[1]) / 4000 < (24 + 20) * 1.3  # arrays grow in steps
