"""Many images in few files: Parquet as Hugging Face writes it, tar as WebDataset reads it."""

import io
import json
import os
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from unitsphere.common.errors import UsageError
from unitsphere.data import index, parquet, tars
from unitsphere.data.loader import Loader
from unitsphere.data.shards import expand, split_shards
from unitsphere.data.source import open_images, open_splits
from unitsphere.images.decode import BrokenImage, decode


def encoded(shade, kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (6, 4), (shade % 256, shade // 256, 0)).save(file, kind)
    return file.getvalue()


def shade(images, index):
    red, green, _ = decode(images.read(index))[0, 0].tolist()
    return red + 256 * green


def write_parquet(path, shades, labels=None, *, names=None, rows=3, column="image", plain=False):
    """Row groups of few rows, and the metadata that Hugging Face's library writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = [encoded(shade) for shade in shades]
    pictures = (
        pa.array(data) if plain else pa.array([{"bytes": item, "path": f"{n}.png"} for n, item in enumerate(data)])
    )
    columns = {column: pictures}
    features = {column: {"_type": "Image"}}
    if labels is not None:
        columns["label"] = pa.array(labels)
        features["label"] = {"_type": "ClassLabel", "names": names} if names else {"_type": "Value", "dtype": "int64"}
    table = pa.table(columns)
    if names:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=rows)


def test_parquet_as_hugging_face_writes_it(tmp_path):
    for part in range(2):
        shards = range(10 * part, 10 * part + 5)
        labels = [n % 2 for n in range(5)]
        write_parquet(tmp_path / "data" / f"train-0000{part}-of-00002.parquet", shards, labels, names=["cat", "dog"])
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", [77, 78], [1, 0], names=["cat", "dog"])
    (tmp_path / "README.md").write_text("a card")
    for data in (str(tmp_path), f"parquet={tmp_path}"):
        train, val = open_images(data, "train"), open_images(data, "val")
        assert train.classes == val.classes == ("cat", "dog")
        assert train.labels.tolist() == [0, 1, 0, 1, 0] * 2 and val.labels.tolist() == [1, 0]
        assert [shade(train, n) for n in (9, 0, 4, 5, 2, 7)] == [14, 0, 4, 10, 2, 12]
        assert shade(val, 1) == 78
        assert train.names[6] == "data/train-00001-of-00002.parquet/1" and len(set(train.names)) == 10


@pytest.mark.parametrize("plain", [True, False])
def test_a_single_parquet_file_with_or_without_labels(tmp_path, plain):
    write_parquet(tmp_path / "a.parquet", range(7), plain=plain)
    images = open_images(tmp_path / "a.parquet", holdout=0)
    assert images.labels is None and [shade(images, n) for n in range(7)] == list(range(7))
    write_parquet(tmp_path / "b.parquet", range(4), ["eel", "ant", None, "eel"], plain=plain, column="img")
    images = open_images(tmp_path / "b.parquet", holdout=0)
    assert images.classes == ("ant", "eel") and images.labels.tolist() == [1, 0, -1, 1]
    write_parquet(tmp_path / "c.parquet", range(3), [4, None, 0], plain=plain)
    images = open_images(tmp_path / "c.parquet", holdout=0)
    assert images.classes == ("0", "1", "2", "3", "4") and images.labels.tolist() == [4, -1, 0]
    write_parquet(tmp_path / "d.parquet", range(3), [-1, -1, -1], plain=plain)
    assert open_images(tmp_path / "d.parquet", holdout=0).labels is None


def test_row_groups_are_kept_up_to_a_limit(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", range(60), rows=10)
    images = open_images(f"parquet={tmp_path / 'a.parquet'}", holdout=0)
    rows = parquet.RowGroups([parquet._Table(tmp_path / "a.parquet")], "image")
    one_group = sum(len(encoded(n)) for n in range(10))
    monkeypatch.setattr(parquet, "KEPT", int(3.5 * one_group))
    for row in torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist():
        assert rows.read(row) == images.read(row) == encoded(row)
        assert len(rows.kept) <= 3 and row // 10 in rows.kept
    monkeypatch.setattr(parquet, "KEPT", 1)  # what is being read is always kept
    assert rows.read(0) == encoded(0) and len(rows.kept) == 1


def test_threads_may_share_the_row_groups_that_are_kept(tmp_path, monkeypatch):
    """With room for one group and threads that change places all the time, each read meets another's changes."""
    write_parquet(tmp_path / "a.parquet", range(64), rows=1)
    rows = parquet.RowGroups([parquet._Table(tmp_path / "a.parquet")], "image")
    monkeypatch.setattr(parquet, "KEPT", 1)
    expected = [encoded(n) for n in range(64)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(rows.read, [n % 64 for n in range(3000)]))
    finally:
        sys.setswitchinterval(interval)
    assert found == [expected[n % 64] for n in range(3000)]


@pytest.mark.parametrize("unlabelled", [False, True])
def test_a_word_has_the_same_number_in_every_split(tmp_path, unlabelled):
    """Though neither split has all the words, and one may have none."""
    write_parquet(tmp_path / "train-0.parquet", range(3), ["bee", "cow", "bee"])
    write_parquet(tmp_path / "train-1.parquet", range(2), ["dog", None])
    write_parquet(tmp_path / "test-0.parquet", range(3), None if unlabelled else ["cow", "ant", "bee"])
    train, val = open_images(tmp_path, "train"), open_images(tmp_path, "val")
    words = [train.classes[label] if label >= 0 else None for label in train.labels]
    assert words == ["bee", "cow", "bee", "dog", None]
    if unlabelled:
        assert val.labels is None and train.classes == ("bee", "cow", "dog")
    else:
        assert train.classes == val.classes == ("ant", "bee", "cow", "dog") and val.labels.tolist() == [2, 0, 1]


@pytest.mark.parametrize("processes", [True, False])
@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_the_loader_reads_shards_in_any_order_from_threads_and_processes(tmp_path, kind, processes):
    for part in range(2):
        shades = range(20 * part, 20 * part + 20)
        if kind == "parquet":
            write_parquet(tmp_path / f"{part}.parquet", shades, rows=4)
        else:
            write_tar(tmp_path / f"{part}.tar", {f"{n}.png": encoded(n) for n in shades})
    loader = Loader(open_images(tmp_path, holdout=0), resident=False, workers=2, processes=processes)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    for indices, canvas in loader.batches(order.split(16)):
        assert [int(canvas.image(n)[0, 0, 0]) for n in range(len(canvas))] == indices.tolist()
    assert not loader.broken


def test_bad_parquet_says_what_is_wrong(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"picture": [b"x", b"y"], "label": [0, 1]}), path)
    with pytest.raises(UsageError, match=r"no column 'image'; it has 'picture', 'label'"):
        open_images(path)
    pq.write_table(pa.table({"image": ["a.png", "b.png"]}), path)
    with pytest.raises(UsageError, match="column 'image' is string; it must be bytes"):
        open_images(path)
    pq.write_table(pa.table({"image": [b"x", b"y"], "label": [0.5, 1.0]}), path)
    with pytest.raises(UsageError, match="column 'label' is double; labels are whole numbers or text"):
        open_images(path)
    write_parquet(path, range(3), [0, 1, 2])
    write_parquet(tmp_path / "b.parquet", range(3))
    with pytest.raises(UsageError, match=r"b.parquet has no column 'label', which .*a.parquet has"):
        open_images(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UsageError, match="no Parquet file, or a cut-off one"):
        open_images(path)
    table = pa.table({"image": pa.array([{"bytes": encoded(0), "path": "a"}, {"bytes": None, "path": "b"}])})
    pq.write_table(table, path)
    with pytest.raises(BrokenImage, match="a path and no image"):
        open_images(path, holdout=0).read(1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no \*.parquet files in .*empty"):
        open_images(f"parquet={tmp_path}/empty")
    with pytest.raises(UsageError, match=r"There is no file .*none"):
        open_images(f"parquet={tmp_path}/none")


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", range(3))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install -e '\.\[parquet\]'"):
        open_images(tmp_path / "a.parquet")


def write_tar(path, members, kind="w"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, kind) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def samples(first, count, label):
    """label: (suffix, text) of image n."""
    members = {}
    for n in range(first, first + count):
        suffix, text = label(n)
        members |= {f"{n:06d}.jpg": encoded(n, "JPEG"), f"{n:06d}.{suffix}": text.encode()}
    return members


@pytest.mark.parametrize(
    "label",
    [
        lambda n: ("cls", f"{n % 3}\n"),
        lambda n: ("json", json.dumps({"label": n % 3, "caption": "words"})),
        lambda n: ("txt", f"{n % 3}"),
    ],
)
def test_tar_shards_with_labels_of_every_kind(tmp_path, label):
    for part in range(3):
        write_tar(tmp_path / f"set-{part:03d}.tar", samples(5 * part, 5, label))
    for data in (
        tmp_path,
        f"tar={tmp_path}",
        f"{tmp_path}/set-{{000..002}}.tar",
        f"tar={tmp_path}/set-{{000..002}}.tar",
    ):
        images = open_images(data, holdout=0)
        assert images.labels.tolist() == [n % 3 for n in range(15)] and images.classes == ("0", "1", "2")
        assert images.names[6] == "set-001.tar/000006.jpg"
        for n in (14, 0, 7):
            assert images.read(n) == encoded(n, "JPEG")
    assert len(open_images(f"{tmp_path}/set-{{001..002}}.tar", holdout=0)) == 10
    (tmp_path / "classnames.txt").write_text("ant\nbee\ncow\n")
    assert open_images(tmp_path, holdout=0).classes == ("ant", "bee", "cow")


def test_tars_by_split_with_folders_captions_and_long_names(tmp_path):
    long = "folder/" + "x" * 200
    members = {f"{long}.seg.txt": b"ignored", f"{long}.png": encoded(1), "b.v2.png": encoded(2), "b.txt": b"a caption"}
    write_tar(tmp_path / "train" / "0.tar", members | {".hidden.png": b"", "c.json": b"{}"})
    write_tar(tmp_path / "val" / "0.tar", {"d.webp": encoded(3, "WEBP"), "d.cls": b"4"})
    train, val = (splits() for splits in open_splits(tmp_path).values())
    assert list(open_splits(tmp_path)) == ["train", "val"]
    assert train.names == [f"train/0.tar/{long}.png", "train/0.tar/b.v2.png"] and train.labels is None
    assert shade(train, 0) == 1 and shade(train, 1) == 2 and val.labels.tolist() == [4]


def test_the_index_of_shards_is_remembered_until_one_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "MANY", 1)
    path = tmp_path / "set" / "0.tar"
    write_tar(path, samples(0, 4, lambda n: ("cls", f"{n}")))
    os.utime(path, (1e9, 1e9))
    before = open_images(path.parent, holdout=0)
    with monkeypatch.context() as patched:
        patched.setattr(tars, "_samples", None)  # the shards are not gone through again
        again = open_images(path.parent, holdout=0)
    assert again.names == before.names and again.labels.tolist() == [0, 1, 2, 3] and again.read(3) == before.read(3)
    write_tar(path, samples(5, 2, lambda n: ("cls", f"{n}")))
    assert open_images(path.parent, holdout=0).labels.tolist() == [5, 6]


def test_bad_tars_say_what_is_wrong(tmp_path):
    path = tmp_path / "a.tar"
    write_tar(path, samples(0, 2, lambda n: ("cls", "tench")))
    with pytest.raises(UsageError, match=r"000000.cls holds no class number but b'tench'"):
        open_images(path)
    write_tar(path, {"a.txt": b"1", "b.cls": b"2"})
    with pytest.raises(UsageError, match=r"no images in 1 \*.tar files"):
        open_images(path)
    write_tar(path, samples(0, 2, lambda n: ("cls", "1")), "w:gz")
    with pytest.raises(UsageError, match=r"a.tar is no tar file that can be read in any order.*gunzip"):
        open_images(path)
    with pytest.raises(UsageError, match=r"There is no file .*a1.tar \(and 1 more of .*\)"):
        open_images(f"{tmp_path}/a{{1..2}}.tar")
    with pytest.raises(UsageError, match=r"\{2\.\.1\} counts down\. Write \{1\.\.2\}"):
        open_images(f"tar={tmp_path}/a{{2..1}}.tar")
    with pytest.raises(UsageError, match=r"There is no file .*none.tar"):
        open_images(f"tar={tmp_path}/none.tar")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no \*.tar files"):
        open_images(f"tar={tmp_path}/empty")


def test_a_folder_of_images_is_not_taken_for_shards(tmp_path):
    for number in range(3):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / f"{number}.png").write_bytes(encoded(number))
    write_tar(tmp_path / "a.tar", samples(0, 9, lambda n: ("cls", "1")))
    assert len(open_images(tmp_path, holdout=0)) == 3


def test_patterns_and_splits(tmp_path):
    assert expand("a{8..10}.tar") == ["a8.tar", "a9.tar", "a10.tar"]
    assert expand("{0..1}-{00..01}") == ["0-00", "0-01", "1-00", "1-01"]
    files = [tmp_path / name for name in ("x-test-0.tar", "x-train-0.tar", "x-train-1.tar", "x-validation-0.tar")]
    assert split_shards(files, tmp_path) == {"train": files[1:3], "val": files[3:]}
    assert split_shards(files[:3], tmp_path) == {"train": files[1:3], "val": files[:1]}
    assert split_shards(files[1:3], tmp_path) == {"all": files[1:3]}
    other = [tmp_path / "0.tar", tmp_path / "1.tar"]
    assert split_shards(other, tmp_path) == {"all": other}
