"""Other people's data: no odd file stops a job, damage is found and named, names are shown and not obeyed."""

import io
import os
import resource
import socket
import tarfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_images
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import save_file

from unitsphere.cli import main
from unitsphere.common.errors import UsageError
from unitsphere.common.text import printable
from unitsphere.data.broken import BrokenImages, describe
from unitsphere.data.images import Images
from unitsphere.data.index import index_folder
from unitsphere.data.loader import Loader
from unitsphere.data.source import open_images, open_parts
from unitsphere.images.decode import BrokenImage, decode

ODD = ("fifo", "device", "socket", "zero", "sparse", "npy", "huge")


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@contextmanager
def little_memory(more: int = 3 * 2**30):
    """Within, this process cannot map much more than it has: an allocation of terabytes, or of 60 GiB, fails."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def npy_header(shape: tuple[int, ...]) -> bytes:
    """A .npy file whose header promises this, with eight bytes behind it."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue() + bytes(8)


def large_picture(side: int = 13_000, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("L", (side, side)).save(file, kind)
    return file.getvalue()


def make_odd(folder: Path, kind: str) -> str:
    """An odd file, by its name."""
    name = f"odd-{kind}.{'npy' if kind == 'npy' else 'png'}"
    path = folder / name
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/tty")
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(folder)  # the path of a socket is short
        try:
            socket.socket(socket.AF_UNIX).bind(name)
        finally:
            os.chdir(here)
    elif kind == "sparse":
        with open(path, "wb") as file:
            file.truncate(60 * 2**30)
    else:
        path.write_bytes(npy_header((10**6, 10**6, 3)) if kind == "npy" else large_picture())
    return name


def broken_of(images: Images) -> dict[str, str]:
    """Go through all images, as training would."""
    loader = Loader(images, resident=False, workers=2, max_broken=0.5)
    for _ in loader.batches(torch.arange(len(images)).split(8)):
        pass
    return loader.broken


@pytest.mark.parametrize("kind", ODD)
def test_one_odd_file_in_a_folder_is_a_broken_image(kind, tmp_path):
    write_images(tmp_path, 20)
    name = make_odd(tmp_path, kind)
    with little_memory():
        broken = broken_of(open_images(tmp_path, holdout=0))
    assert list(broken) == [name] and broken[name]


@pytest.mark.parametrize("kind", ODD)
def test_one_odd_file_in_a_list_is_a_broken_image(kind, tmp_path):
    paths = write_images(tmp_path, 20)
    name = make_odd(tmp_path, kind)
    (tmp_path / "list.txt").write_text("\n".join([name, *(path.name for path in paths)]))
    with little_memory():
        assert list(broken_of(open_images(tmp_path / "list.txt", holdout=0))) == [name]


def tar_of(path: Path, files: dict[str, bytes | tarfile.TarInfo]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name) if isinstance(data, bytes) else data
            if isinstance(data, bytes):
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data) if isinstance(data, bytes) else None)
    return path


def samples(labels: list[int]) -> dict[str, bytes]:
    parts = [("png", lambda label: large_picture(8)), ("cls", lambda label: b"%d" % label)]
    return {f"{n}.{suffix}": content(label) for n, label in enumerate(labels) for suffix, content in parts}


def test_odd_members_of_a_tar_are_broken_images_or_none(tmp_path):
    good = {path.name: path.read_bytes() for path in write_images(tmp_path / "photos", 20)}
    fifo, link = tarfile.TarInfo("fifo.png"), tarfile.TarInfo("link.png")
    fifo.type, link.type, link.linkname = tarfile.FIFOTYPE, tarfile.SYMTYPE, "/dev/zero"
    odd = {"odd.npy": npy_header((10**6, 10**6)), "wide.png": large_picture(), "fifo.png": fifo, "link.png": link}
    with little_memory():
        images = open_images(tar_of(tmp_path / "a.tar", good | odd), holdout=0)
        assert list(broken_of(images)) == ["a.tar/odd.npy", "a.tar/wide.png"] and len(images) == 22


@pytest.mark.parametrize("kind", ["fifo", "zero", "garbage", "cut off", "no end"])
def test_one_odd_tar_among_others_is_a_broken_image(kind, tmp_path):
    good = {path.name: path.read_bytes() for path in write_images(tmp_path / "photos", 20)}
    tar_of(tmp_path / "set" / "a.tar", good)
    odd = tmp_path / "set" / "b.tar"
    if kind == "fifo":
        os.mkfifo(odd)
    elif kind == "zero":
        odd.symlink_to("/dev/zero")
    elif kind == "garbage":
        odd.write_bytes(b"not a tar file" * 1000)
    elif kind == "cut off":
        whole = tar_of(odd, good).read_bytes()
        odd.write_bytes(whole[:3000])
    else:
        info = tarfile.TarInfo("huge.png")
        info.size = 10**13
        odd.write_bytes(info.tobuf() + bytes(1024))
    images = open_images(tmp_path / "set", holdout=0)
    broken = broken_of(images)
    assert "b.tar" in list(broken) and len(images) - len(broken) >= 20
    assert "tar file" in broken["b.tar"]
    if kind != "cut off":  # of which the first images are there
        with pytest.raises(UsageError, match=r"b\.tar"):
            open_images(odd, holdout=0)


def test_odd_images_and_files_of_parquet_are_broken_images(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    good = [path.read_bytes() for path in write_images(tmp_path / "photos", 20)]
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [*good, npy_header((10**6, 10**6)), large_picture()]
    parquet.write_table(pa.table({"image": rows, "label": list(range(22))}), folder / "a.parquet")
    os.mkfifo(folder / "b.parquet")
    (folder / "c.parquet").write_bytes(b"PAR1 nothing PAR1")
    with open(folder / "d.parquet", "wb") as file:
        file.truncate(60 * 2**30)
    with little_memory():
        images = open_images(folder, holdout=0)
        broken = broken_of(images)
    assert list(broken) == ["a.parquet/20", "a.parquet/21", "b.parquet", "c.parquet", "d.parquet"]
    assert images.labels.tolist() == [*range(22), -1, -1, -1]


def test_a_damaged_row_group_breaks_its_images_alone(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    good = [path.read_bytes() for path in write_images(tmp_path / "photos", 20)]
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"image": good}), path, row_group_size=5, use_dictionary=False)
    column = parquet.read_metadata(path).row_group(2).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset : column.data_page_offset + 40] = b"\xff" * 40
    path.write_bytes(content)
    broken = broken_of(open_images(path, holdout=0))
    assert list(broken) == [f"a.parquet/{row}" for row in range(10, 15)]


@pytest.mark.parametrize("given", [b"{", b"3", b'{"info": []}', b'{"info": {"features": 7}}', b"[" * 100_000])
def test_damaged_metadata_of_parquet_leaves_the_columns(given, tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    good = [path.read_bytes() for path in write_images(tmp_path / "photos", 4)]
    table = pa.table({"image": good, "label": [0, 1, 0, 1]}).replace_schema_metadata({b"huggingface": given})
    parquet.write_table(table, tmp_path / "a.parquet")
    images = open_images(tmp_path / "a.parquet", holdout=0)
    assert images.labels.tolist() == [0, 1, 0, 1] and images.classes == ("0", "1")


@pytest.mark.parametrize("data", ["fifo", "zero"])
def test_data_that_is_no_file_is_refused_at_once(data, tmp_path):
    for name in ("data", "data.pack", "data.txt", "data.tar", "data.parquet"):
        path = tmp_path / name
        os.mkfifo(path) if data == "fifo" else path.symlink_to("/dev/zero")
        with pytest.raises(UsageError, match=name):
            open_images(path)


def test_an_image_above_the_limit_of_pixels_is_broken_before_it_is_decoded():
    given = [large_picture(), npy_header((13_000, 13_000, 1)) + bytes(13_000**2)]
    for data in given:
        with (
            little_memory(2**28),
            pytest.raises(BrokenImage, match=r"13,000 x 13,000 pixels.*--max-pixels"),
        ):
            decode(data, reduce_to=64)
    small = large_picture(100)
    assert decode(small, max_pixels=100 * 100).shape == (100, 100, 3)
    with pytest.raises(BrokenImage, match="100 x 100"):
        decode(small, max_pixels=100 * 100 - 1)


def test_a_large_jpeg_is_decoded_at_a_reduced_scale_unless_it_is_progressive():
    plain = large_picture(4000, "JPEG")
    assert decode(plain, reduce_to=500, max_pixels=10**6).shape[:2] == (500, 500)
    with pytest.raises(BrokenImage, match="4,000 x 4,000"):
        decode(plain, max_pixels=10**6)
    file = io.BytesIO()
    Image.new("L", (4000, 4000)).save(file, "JPEG", progressive=True)
    with pytest.raises(BrokenImage, match="4,000 x 4,000"):
        decode(file.getvalue(), reduce_to=500, max_pixels=10**6)


def test_max_pixels_reaches_pack_and_training(tmp_path, capsys):
    write_images(tmp_path / "photos", 20)
    Image.new("RGB", (60, 60)).save(tmp_path / "photos" / "large.png")
    words = [
        "pack",
        "--data",
        str(tmp_path / "photos"),
        "--out",
        str(tmp_path / "p"),
        "--max-pixels",
        "3000",
        "--max-broken",
        "0.1",
    ]
    assert main(words) == 0
    told = capsys.readouterr()
    assert "large.png" in told.err and "20 images" in told.out
    train = ["pretrain", "moco-v2", "--data", str(tmp_path / "photos"), "--out", str(tmp_path / "run")]
    small = ["--image-size", "8", "--batch-size", "8", "--queue-size", "16", "--backbone", "resnet-tiny", "--device"]
    more = ["cpu", "--epochs", "1", "--max-pixels", "3000", "--holdout", "0"]
    assert main([*train, *small, *more]) == 0
    assert "60 x 60" in capsys.readouterr().err


def test_ids_as_labels_become_the_classes_that_occur(tmp_path):
    """By memory too: a class for each number up to the highest would be gigabytes."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    image = large_picture(8)
    ids = {"train": [10**9 + 7, 5, 10**12, 5], "val": [77, 5]}
    for split, numbers in ids.items():
        table = pa.table({"image": [image] * len(numbers), "label": numbers})
        parquet.write_table(table, tmp_path / f"{split}.parquet")
        tar_of(tmp_path / "tars" / f"{split}.tar", samples(numbers))
    for data in (f"parquet={tmp_path}", tmp_path / "tars"):
        with little_memory(2**28):
            train, val = open_parts(data)
        assert train.classes == val.classes == ("5", "77", str(10**9 + 7), str(10**12))
        assert train.labels.tolist() == [2, 0, 3, 0] and val.labels.tolist() == [1, 0]


def test_class_numbers_with_few_gaps_stay_as_they_are(tmp_path):
    images = open_images(tar_of(tmp_path / "a.tar", samples([5, 6])), holdout=0)
    assert images.labels.tolist() == [5, 6] and images.classes == tuple(map(str, range(7)))


def test_ids_of_a_torch_dataset_become_the_classes_that_occur():
    class Few(torch.utils.data.Dataset):
        targets = (10**9, 4, 10**9)

        def __len__(self):
            return 3

        def __getitem__(self, index):
            return np.zeros((8, 8), np.uint8), self.targets[index]

    with little_memory(2**28):
        images = open_images(Few(), holdout=0)
    assert images.labels.tolist() == [1, 0, 1] and images.classes == ("4", "1000000000")


@pytest.mark.parametrize("label", [b"9" * 30, b"1e400", b'{"label": 1e400}', b"[" * 100_000])
def test_labels_that_are_no_class_numbers_are_told(label, tmp_path):
    suffix = "json" if label[:1] in b"[{" else "cls"
    path = tar_of(tmp_path / "a.tar", {"0.png": large_picture(8), f"0.{suffix}": label})
    with pytest.raises(UsageError, match="no class number"):
        open_images(path, holdout=0)


def test_a_damaged_index_is_made_again(tmp_path, monkeypatch):
    from unitsphere.data import index

    monkeypatch.setattr(index, "MANY", 5)
    write_images(tmp_path / "photos", 12)
    os.utime(tmp_path / "photos", (1e9, 1e9))
    whole = list(open_images(tmp_path / "photos", holdout=0).names)
    (file,) = index_folder().glob("*.safetensors")
    content = file.read_bytes()
    for place in range(0, len(content), 7):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert list(open_images(tmp_path / "photos", holdout=0).names) == whole
        index.indexes_of(tmp_path)
    with safe_open(file, "np") as opened:
        tensors, about = {key: opened.get_tensor(key) for key in opened.keys()}, opened.metadata()  # noqa: SIM118
    for damage in ({"facts": "{"}, {"facts": "[" * 100_000}, {"listed": "soon"}, {"about": "3"}):
        save_file(tensors, file, about | damage)
        assert list(open_images(tmp_path / "photos", holdout=0).names) == whole
        index.indexes_of(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        "x{0..99999999999}.tar", "x{0..9999}{0..9999}.tar", f"x{{0..{'9' * 5000}}}.tar", "shapes=99999999999999",
        "shapes=100x99999999", f"shapes={'9' * 5000}", "~nouser/x", f"{'x' * 5000}.tar", "a\0b", "folder=",
    ],
)  # fmt: skip
def test_numbers_that_nobody_has_memory_for_are_refused(data, capsys):
    with little_memory(2**28):
        assert main(["data", "preview", "--data", data, "--out", "none.png"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("unitsphere: ") and "(--debug shows where)" not in told


@pytest.mark.parametrize("share", [float("nan"), float("inf"), -0.1, 1.5])
def test_a_share_that_is_none_is_refused(share, labelled, tmp_path, capsys):
    with pytest.raises(UsageError, match=r"max_broken: given .* from 0 to 1"):
        BrokenImages("x", 10, share)
    assert main(["pack", "--data", str(labelled), "--out", str(tmp_path / "p"), f"--max-broken={share}"]) == 2
    assert "max_broken" in capsys.readouterr().err and not (tmp_path / "p").exists()


NASTY = "a\x1b[2J\x1b]0;owned\x07\r\nb\u202egnp\x9b31m.png"


def test_control_characters_are_escaped():
    shown = printable(NASTY)
    assert shown == r"a\x1b[2J\x1b]0;owned\x07\r\nb\u202egnp\x9b31m.png" and shown.isprintable()
    assert printable("two\nlines\x07", lines=True) == "two\nlines\\x07"
    assert printable("Grüße, 漢字 é") == "Grüße, 漢字 é" and printable("caf\udce9") == r"caf\udce9"


def test_names_from_data_are_escaped_wherever_they_are_printed(tmp_path, capsys):
    write_images(tmp_path / "photos", 20)
    (tmp_path / "photos" / NASTY).write_bytes(b"no picture")
    lines = describe({NASTY: "no picture"})
    assert all(line.isprintable() for line in lines)
    photos, out = str(tmp_path / "photos"), str(tmp_path / "p")
    for words, status in (
        (["pack", "--data", photos, "--out", out, "--max-broken", "0.2"], 0),
        (["pack", "--data", photos, "--out", out, "--max-broken", "0"], 1),
        (["data", "preview", "--data", photos, "--out", str(tmp_path / "sheet.png"), "--images", "21"], 0),
        (["data", "preview", "--data", str(tmp_path / NASTY), "--out", str(tmp_path / "sheet.png")], 2),
    ):
        assert main(words) == status
        told = capsys.readouterr()
        shown = told.out + told.err
        assert r"\x1b[2J" in shown and not {"\x07", "\x9b", "\u202e"} & set(shown) and "\x1b[2J" not in shown


def test_max_pixels_reaches_evaluation(tmp_path, capsys):
    for label in "ab":
        write_images(tmp_path / "photos" / label, 20)
    Image.new("RGB", (60, 60)).save(tmp_path / "photos" / "a" / "large.png")
    words = [
        "pixels",
        "--data",
        str(tmp_path / "photos"),
        "--image-size",
        "8",
        "--device",
        "cpu",
        "--max-pixels",
        "3000",
    ]
    assert main(["evaluate", *words, "--protocol", "knn", "--k", "5"]) == 0
    assert "60 x 60" in capsys.readouterr().err
    assert main(["embed", *words, "--out", str(tmp_path / "features.npz")]) == 0
    assert "60 x 60" in capsys.readouterr().err
