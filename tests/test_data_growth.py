"""What a start does for each name, list line, class and row: counted in calls and bytes, not in seconds."""

import os
import tracemalloc

import numpy as np
import pytest

from unitsphere.data import index, lists, subsets, walk
from unitsphere.data.folder import list_images
from unitsphere.data.images import Images
from unitsphere.data.index import index_folder
from unitsphere.data.names import StoredNames, joined, picked
from unitsphere.data.pack import pack
from unitsphere.data.packfile import open_pack
from unitsphere.data.source import open_images
from unitsphere.data.subsets import hold_out, keep_fraction, order_by_name


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def images_of(count: int, classes: int = 7) -> Images:
    names = StoredNames.of(f"folder/{number:06d}.jpg" for number in range(count))
    return Images("x", names, np.arange(count) * 31 % classes, tuple(map(str, range(classes))), lambda n: b"")


def test_names_are_hashed_once_for_train_and_val_and_for_later_starts(monkeypatch):
    monkeypatch.setattr(index, "MANY", 100)
    calls = []
    stream = subsets.stream
    monkeypatch.setattr(subsets, "stream", lambda *given: calls.append(given) or stream(*given))
    images = images_of(500)
    train = hold_out(images, "train", 0.1, 0)
    assert len(calls) == 500
    val, again = hold_out(images, "val", 0.1, 0), hold_out(images_of(500), "train", 0.1, 0)
    assert len(calls) == 500 and again.names == train.names
    assert sorted([*train.names, *val.names]) == list(images.names) and len(val) == 50
    hold_out(images, "train", 0.1, 1), hold_out(images_of(501), "train", 0.1, 0)
    assert len(calls) == 500 + 500 + 501  # another seed, other names


def test_a_damaged_order_is_made_again(monkeypatch):
    images = images_of(200)
    fresh = order_by_name(images, "holdout", 0)
    monkeypatch.setattr(index, "MANY", 100)
    assert np.array_equal(order_by_name(images, "holdout", 0), fresh)
    (file,) = index_folder().iterdir()
    content = file.read_bytes()
    for place in range(0, len(content), 11):
        file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        assert np.array_equal(order_by_name(images, "holdout", 0), fresh)


def test_joined_names_are_those_of_python_without_a_string_for_each(monkeypatch, tmp_path):
    words = [f"{'ü' * (n % 5)}caf\udce9/{n}.jpg" for n in range(10_000)]
    chosen = np.random.default_rng(0).permutation(10_000)[:9_000]
    image = np.zeros((1, 1), np.uint8)
    parts = {part: Images("x", words[a:b], None, None, lambda n: image) for part, a, b in (("a", 0, 30), ("b", 30, 70))}
    pack(parts, tmp_path / "p")
    expected = [(words, words), (picked(words, chosen), [words[n] for n in chosen])]
    decoded = []
    decode = StoredNames._decode
    monkeypatch.setattr(StoredNames, "_decode", lambda self, n: decoded.append(n) or decode(self, n))
    stored = StoredNames.of(words)
    twice = picked(picked(stored, chosen), chosen[chosen < 9_000])
    expected += [(twice, [words[chosen[n]] for n in chosen if n < 9_000])]
    expected += [(stored, words), (picked(stored, chosen), [words[n] for n in chosen])]
    expected += [(open_pack(tmp_path / "p")["b"].names, words[30:70]), (stored[:0], []), (words[:1], words[:1])]
    for names, plain in expected:
        assert b"".join(joined(names)) == "\n".join(plain).encode(errors="surrogateescape")
    assert not decoded


def test_some_of_a_long_list_s_files_are_looked_for(tmp_path, monkeypatch):
    (tmp_path / "a.jpg").touch()
    looked = []
    there = lists._is_there
    monkeypatch.setattr(lists, "_is_there", lambda path: looked.append(path) or there(path))
    taken = []
    for count in (20_000, 40_000):
        (tmp_path / "list.txt").write_text("\n".join(f"./a.jpg\tclass {n % 10}" for n in range(count)))
        tracemalloc.start()
        images = lists.read_list(tmp_path / "list.txt", "x")
        taken.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert len(images) == 40_000 and len(looked) == 2 * lists.LOOKED_FOR
    assert (taken[1] - taken[0]) / 20_000 < 60  # 194 with a string for each line
    lines = (tmp_path / "list.txt").read_text().splitlines()
    (tmp_path / "list.txt").write_text("\n".join([*lines[:-1], "gone.jpg\tclass 1"]))
    with pytest.raises(lists.UsageError, match=r"line 40000: no file 'gone\.jpg'"):
        lists.read_list(tmp_path / "list.txt", "x")


class Counting(np.ndarray):
    """Labels that count how often all of them are compared."""

    compared = 0

    def __array_ufunc__(self, ufunc, method, *inputs, **more):
        Counting.compared += ufunc is np.equal
        plain = [np.asarray(item) if isinstance(item, Counting) else item for item in inputs]
        return getattr(ufunc, method)(*plain, **more)


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.25, 0.5, 0.999])
def test_a_fraction_is_taken_of_all_classes_at_once(fraction):
    images = images_of(3000, 1000)
    labels = np.random.default_rng(0).integers(-1, 900, 3000)
    Counting.compared = 0
    kept = keep_fraction(Images("x", images.names, labels.view(Counting), images.classes, images.read), fraction, 3)
    assert Counting.compared < 10
    order, expected = order_by_name(images, "fraction", 3), []
    for label in range(-1, 900):
        members = [n for n in order.tolist() if labels[n] == label]
        expected += members[: max(1, round(fraction * len(members)))]
    assert list(kept.names) == [images.names[n] for n in sorted(expected)] if expected else not len(kept)


def test_a_parquet_file_is_opened_once_a_thread(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    from unitsphere.data import parquet as reading

    for file in "abcdef":
        rows = [f"{file}{n}".encode() for n in range(40)]
        parquet.write_table(pa.table({"image": rows}), tmp_path / f"{file}.parquet", row_group_size=4)
    opened = []
    whole = parquet.ParquetFile
    monkeypatch.setattr(parquet, "ParquetFile", lambda *given, **more: opened.append(given) or whole(*given, **more))
    monkeypatch.setattr(reading, "KEPT", 0)
    images = open_images(tmp_path, holdout=0)
    first = len(opened)
    for n in np.random.default_rng(0).permutation(40):
        assert images.read(int(n)) == f"a{n}".encode() and images.read(40 + int(n)) == f"b{n}".encode()
    assert len(opened) - first == 2
    before = len(os.listdir("/proc/self/fd"))
    for n in range(len(images)):
        images.read(n)
    assert len(os.listdir("/proc/self/fd")) - before <= reading.READERS


def test_one_touched_folder_is_listed_again_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "MANY", 5)
    root = tmp_path / "photos"
    folders = ["a", "a/b", "a-b", "ab", "ü", "a/b/c", "z"]
    for folder in folders:
        (root / folder).mkdir(parents=True)
        for name in ("1.png", "2.png", "0"):
            (root / folder / name).touch()

    def settle() -> None:
        for folder in ["", *folders]:
            os.utime(root / folder, (1e9, 1e9))

    settle()
    listed = []
    scandir = os.scandir

    def noted(path: str | os.PathLike[str]):
        if os.path.commonpath([path, root]) == str(root):
            listed.append(os.path.relpath(path, root))
        return scandir(path)

    monkeypatch.setattr(walk.os, "scandir", noted)

    def names() -> list[str]:
        listed.clear()
        return list(list_images(root).names)

    first = names()
    assert sorted(listed) == sorted([".", *folders]) and len(first) == 2 * len(folders)
    assert names() == first and not listed
    (root / "a" / "b" / "3.png").touch()
    (root / "a" / "b" / "1.png").unlink()
    expected = sorted({*first, "a/b/3.png"} - {"a/b/1.png"})
    assert names() == expected
    assert "a/b" in listed
    assert not {"a/b/c", "z", "ab", "a-b", "ü"} & set(listed)
    settle()
    os.utime(root / "a" / "b", (1.1e9, 1.1e9))
    for name in ("0", "1.png", "2.png"):
        (root / "ab" / name).unlink()
    (root / "ab").rmdir()
    os.utime(root, (1.1e9, 1.1e9))
    assert names() == [name for name in expected if not name.startswith("ab/")]
    assert not {"a/b/c", "z", "a-b", "ü"} & set(listed)
    again = list_images(root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    fresh = list_images(root)
    assert again.names == fresh.names and again.facts == fresh.facts and list(again.facts) == list(fresh.facts)
    assert again.watched == fresh.watched and again.stamps.tolist() == fresh.stamps.tolist()
