"""The corpus: one input for each seed, as a folder of files and the words of a command that reads them.

Each input begins with sound files (`Bases`), and something in them is changed: bytes, or values of their JSON.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ODD_VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, -0.5, 1e308, float("nan"), float("inf"), "", "x", "\x1b[2J", "ü" * 300,
    "../../etc/passwd", "a\0b", ":x", "~nouser/x", [], [[]], {}, {"": {}}, ["a"] * 50, [1, 2], [0.5, 2.0], "1e400",
]  # fmt: skip
ODD_WORDS = [
    ["--lr", "1e308"], ["--lr", "nan"], ["--data", "shapes=99999999999999"], ["--data", "x{0..99999999999}.tar"],
    ["--max-broken", "nan"], ["--out", "~nouser/x"], ["--backbone", ":x"], ["--backbone", "x:"], ["--epochs", "-1"],
    ["--batch-size", "99999999999"], ["--image-size", "10" * 9], ["--temperature", "0"], ["--queue-size", "-5"],
    ["--recipe", "-1"], ["--init", "/dev/zero"], ["--data", "/dev/zero"], ["--config", "/dev/zero"], ["--method", ""],
    ["--views", "x:y"], ["--seed", "9" * 40], ["--workers", "-3"], ["--holdout", "nan"], ["--out", "/dev/null"],
]  # fmt: skip
EXTREMES = (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f")
LINES = (
    "a.png\t1", "a.png\t2", "a.png,3", "# x", "", "/dev/zero\t1", "a\0b\t2", f"a.png\t{'9' * 5000}", "x" * 10**5,
)  # fmt: skip
SMALL = {
    "method": "moco-v2", "backbone": "resnet-tiny", "image_size": 16, "batch_size": 16, "queue_size": 32, "epochs": 1,
    "device": "cpu", "tensorboard": False,
}  # fmt: skip


@dataclass
class Input:
    """What was made: its kind, and the command to run in its folder."""

    kind: str
    words: list[str]


class Bases:
    """Sound files, made once: images of many formats, a pack, shards, a run and weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> None:
        """To be called in a process of its own: training starts threads, and a fork must have none."""
        import torch
        from safetensors.torch import save_file

        import unitsphere
        from unitsphere.data.pack import pack
        from unitsphere.data.shapes import shapes

        images = {"train": shapes(48, 16), "val": shapes(24, 16, split="val")}
        pack(images, self.folder / "base.pack")
        unitsphere.pretrain(out=self.folder / "run", data=str(self.folder / "base.pack"), **SMALL)
        weights = unitsphere.load_backbone(self.folder / "run").state_dict()
        save_file(weights, self.folder / "weights.safetensors")
        torch.save(weights, self.folder / "weights.pt")
        encoded = [Image.fromarray(images["train"].read(number)) for number in range(8)]
        (self.folder / "images").mkdir()
        for number, suffix in enumerate(("png", "jpg", "gif", "webp", "tif", "bmp", "ppm", "ico", "tga", "jp2")):
            encoded[number % 8].save(self.folder / "images" / f"{number}.{suffix}")
        np.save(self.folder / "images" / "11.npy", np.asarray(encoded[0]))
        with tarfile.open(self.folder / "base.tar", "w") as tar:
            for number, picture in enumerate(encoded):
                file = io.BytesIO()
                picture.save(file, "PNG")
                for suffix, data in (("png", file.getvalue()), ("cls", b"%d" % (number % 3))):
                    info = tarfile.TarInfo(f"{number}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            return
        rows = [path.read_bytes() for path in sorted((self.folder / "images").glob("*.png"))] * 8
        table = pyarrow.table({"image": rows, "label": [n % 3 for n in range(len(rows))]})
        parquet.write_table(table, self.folder / "base.parquet", row_group_size=4)


def mutated(content: bytes, chance: random.Random, head: int = 4096) -> bytes:
    """The bytes with something changed, more often than not near their beginning."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        place = chance.randrange(max(1, min(len(data), head) if chance.random() < 0.6 else len(data)))
        what = chance.randrange(6)
        if what == 0:
            data[place : place + 1] = bytes([chance.randrange(256)])
        elif what == 1:
            del data[place:]
        elif what == 2:
            data[place : place + 4] = chance.choice(EXTREMES)
        elif what == 3:
            data[place:place] = data[: chance.randrange(64)] * chance.randrange(1, 4)
        elif what == 4:
            del data[place : place + chance.randrange(1, 64)]
        else:
            data[place : place + 8] = chance.randbytes(8)
    return bytes(data)


def mutated_json(text: str, chance: random.Random) -> str:
    """The JSON with a value replaced somewhere, or with bytes changed, or of great depth."""
    what = chance.random()
    if what < 0.2:
        return mutated(text.encode(), chance).decode("latin-1")
    if what < 0.25:
        return '{"a": ' * 5000
    whole = json.loads(text)
    here: Any = whole
    for _ in range(6):
        if not isinstance(here, dict | list) or not here:
            break
        key = chance.choice(list(here)) if isinstance(here, dict) else chance.randrange(len(here))
        below = here[key]
        if isinstance(below, dict | list) and below and chance.random() < 0.7:
            here = below
            continue
        if isinstance(here, dict) and chance.random() < 0.2:
            del here[key]
        else:
            here[key] = chance.choice(ODD_VALUES)
        break
    return json.dumps(whole)


def _preview(data: str) -> list[str]:
    return [
        "data",
        "preview",
        "--data",
        data,
        "--out",
        "sheet.png",
        "--images",
        "4",
        "--count",
        "1",
        "--image-size",
        "16",
    ]


def image_input(bases: Bases, folder: Path, chance: random.Random) -> list[str]:
    good = sorted((bases.folder / "images").iterdir())
    (folder / "set").mkdir()
    for path in good[:3]:
        shutil.copy(path, folder / "set")
    bad = chance.choice(good)
    (folder / "set" / f"bad{bad.suffix}").write_bytes(mutated(bad.read_bytes(), chance, 256))
    odd = chance.random()
    if odd < 0.05:
        os.mkfifo(folder / "set" / "fifo.png")
    elif odd < 0.1:
        (folder / "set" / "zero.png").symlink_to("/dev/zero")
    elif odd < 0.15:
        with open(folder / "set" / "sparse.png", "wb") as file:
            file.truncate(60 * 2**30)
    return chance.choice((_preview("set"), ["pack", "--data", "set", "--out", "out.pack", "--max-broken", "0.9"]))


def pack_input(bases: Bases, folder: Path, chance: random.Random) -> list[str]:
    content = (bases.folder / "base.pack").read_bytes()
    if chance.random() < 0.5:
        header = mutated_json(content[8:4096].decode(), chance).encode("utf-8", "replace")[:4088].ljust(4088)
        content = content[:8] + header + content[4096:]
    else:
        content = mutated(content, chance)
    (folder / "bad.pack").write_bytes(content)
    return chance.choice(
        (_preview("bad.pack"), ["pack", "--check", "bad.pack"], ["pack", "--data", "bad.pack", "--out", "out.pack"])
    )


def shard_input(bases: Bases, folder: Path, chance: random.Random) -> list[str]:
    kind = chance.choice(("tar", "parquet", "list"))
    (folder / "set").mkdir()
    if kind == "list":
        shutil.copy(next((bases.folder / "images").glob("*.png")), folder / "a.png")
        text = "\n".join(chance.choices(LINES, [9, 9, 1, 1, 1, 1, 1, 1, 1], k=6)).encode()
        (folder / "list.txt").write_bytes(mutated(text, chance) if chance.random() < 0.5 else text)
        return _preview("list.txt")
    base = bases.folder / f"base.{kind}"
    if not base.exists():
        return pack_input(bases, folder, chance)
    (folder / "set" / f"bad.{kind}").write_bytes(mutated(base.read_bytes(), chance, 1024))
    if chance.random() < 0.5:
        shutil.copy(base, folder / "set" / f"good.{kind}")
    return _preview("set")


def configuration_input(bases: Bases, folder: Path, chance: random.Random) -> list[str]:
    if chance.random() < 0.3:
        given = {name: value for name, value in SMALL.items() if name not in ("method", "tensorboard")}
        small = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        data = ["--data", str(bases.folder / "base.pack")]
        return ["pretrain", "moco-v2", "--out", "new", "--dry-run", *data, *small, *chance.choice(ODD_WORDS)]
    text = mutated_json((bases.folder / "run" / "config.json").read_text(), chance)
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    return ["pretrain", "--out", "new", "--dry-run", "--config", "config.json"]


def run_input(bases: Bases, folder: Path, chance: random.Random) -> list[str]:
    shutil.copytree(bases.folder / "run", folder / "run")
    (checkpoint,) = (folder / "run" / "checkpoints").glob("*.safetensors")
    texts = [path for path in (folder / "run").iterdir() if path.suffix in (".json", ".jsonl")]
    path = chance.choice([checkpoint, checkpoint, *texts])
    content = path.read_bytes()
    if path.suffix == ".json":
        path.write_bytes(mutated_json(content.decode(), chance).encode("utf-8", "surrogatepass"))
    else:
        path.write_bytes(mutated(content, chance))
    data = ["--data", str(bases.folder / "base.pack"), "--device", "cpu"]
    return chance.choice((
        ["evaluate", "run", "--protocol", "knn", "--k", "5", *data],
        ["embed", "run", "--out", "features.npz", *data],
        ["pretrain", "--out", "run", "--resume", "--epochs", "2", "--dry-run"],
        ["evaluate", str(checkpoint), "--protocol", "knn", "--k", "5", *data],
    ))  # fmt: skip


def weights_input(bases: Bases, folder: Path, chance: random.Random) -> list[str]:
    base = bases.folder / chance.choice(("weights.pt", "weights.safetensors"))
    path = folder / base.name
    path.write_bytes(mutated(base.read_bytes(), chance, 2048))
    small = ["--backbone", "resnet-tiny", "--image-size", "16", "--device", "cpu"]
    return ["embed", path.name, "--out", "features.npz", "--data", str(bases.folder / "base.pack"), *small]


KINDS: dict[str, Callable[[Bases, Path, random.Random], list[str]]] = {
    "image": image_input,
    "pack": pack_input,
    "shard": shard_input,
    "configuration": configuration_input,
    "run": run_input,
    "weights": weights_input,
}


def make_input(bases: Bases, folder: Path, seed: int, kinds: list[str] | None = None) -> Input:
    """The input of this seed, always the same one."""
    chance = random.Random(seed)
    kind = (kinds or list(KINDS))[seed % len(kinds or KINDS)]
    return Input(kind, KINDS[kind](bases, folder, chance))
