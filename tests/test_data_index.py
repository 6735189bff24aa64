"""Listings of large folders are remembered, as long as nothing changes, and cost little memory."""

import os
import time

import numpy as np
import pytest

from unitsphere.cli import main
from unitsphere.data import folder, index
from unitsphere.data.folder import list_images
from unitsphere.data.index import indexes_of
from unitsphere.data.names import Names, StoredNames, picked
from unitsphere.data.source import open_images


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "unitsphere" / "indexes"


@pytest.fixture
def tree(tmp_path):
    """Few files, in folders that were last modified an hour ago."""
    root = tmp_path / "tree"
    for path in ["b/1.jpg", "b/10.jpg", "b/2.jpg", "b-c/1.jpg", "a/deep/x.png", "a/deep.png", "caf\udce9/1.jpg"]:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    settle(root)
    return root


def settle(root):
    for path, _, _ in os.walk(root, topdown=False):
        os.utime(path, (time.time() - 3600,) * 2)


def walks(monkeypatch):
    """Counts the times that a folder is really listed."""
    listed = []
    walk = folder.walk
    monkeypatch.setattr(folder, "walk", lambda *given: (listed.append(given[0]), walk(*given))[1])
    return listed


def test_names_are_sorted_as_whole_paths_are(tree):
    found = [os.path.relpath(os.path.join(at, file), tree) for at, _, files in os.walk(tree) for file in files]
    assert list_images(tree).names == sorted(found)
    assert list_images(tree, ["b", "b-c"]).names == sorted(name for name in found if name.startswith("b"))


def test_a_large_folder_is_listed_once(tree, cache, monkeypatch):
    monkeypatch.setattr(index, "MANY", 5)
    listed = walks(monkeypatch)
    first, second = (open_images(tree, holdout=0) for _ in range(2))
    assert listed.count(os.path.join(tree, "")) == 1 and len(list(cache.iterdir())) == 1
    assert first.names == second.names and first.classes == second.classes == ("a", "b", "b-c", "caf\udce9")
    assert first.labels.tolist() == second.labels.tolist() == [0, 0, 2, 1, 1, 1, 3]
    assert list(indexes_of(tree.parent).values()) == [7] and not indexes_of(tree / "b")


def test_a_small_folder_is_not_remembered(tree, cache):
    open_images(tree, holdout=0)
    assert not cache.exists()


@pytest.mark.parametrize("change", ["add", "remove", "deep", "folder", "rename"])
def test_a_change_is_seen(tree, cache, monkeypatch, change):
    monkeypatch.setattr(index, "MANY", 1)
    before = list(open_images(tree, holdout=0).names)
    if change == "add":
        (tree / "b" / "3.jpg").touch()
    elif change == "remove":
        (tree / "b" / "2.jpg").unlink()
    elif change == "deep":
        (tree / "a" / "deep" / "y.png").touch()
    elif change == "folder":
        (tree / "z").mkdir()
        (tree / "z" / "1.jpg").touch()
    else:
        (tree / "b" / "2.jpg").rename(tree / "b" / "3.jpg")
    after = list(open_images(tree, holdout=0).names)
    assert after != before
    assert after == sorted(os.path.relpath(os.path.join(at, f), tree) for at, _, files in os.walk(tree) for f in files)


def test_a_folder_that_has_just_been_modified_is_not_trusted(tree, cache, monkeypatch):
    """Its clock may be too coarse to show a second change."""
    monkeypatch.setattr(index, "MANY", 1)
    (tree / "b" / "3.jpg").touch()
    stamp = os.stat(tree / "b").st_mtime_ns
    open_images(tree, holdout=0)
    (tree / "b" / "4.jpg").touch()
    os.utime(tree / "b", ns=(stamp, stamp))
    assert "b/4.jpg" in open_images(tree, holdout=0).names


def test_a_damaged_index_or_a_cache_that_cannot_be_written_only_costs_time(tree, cache, monkeypatch, tmp_path):
    monkeypatch.setattr(index, "MANY", 1)
    whole = open_images(tree, holdout=0).names
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-10])
    assert open_images(tree, holdout=0).names == whole
    file.write_bytes(b"something else")
    assert open_images(tree, holdout=0).names == whole
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert open_images(tree, holdout=0).names == whole


def test_the_command_indexes_and_refreshes(tmp_path, cache, capsys):
    for name in ("a", "b"):
        (tmp_path / "many" / name).mkdir(parents=True)
        for number in range(index.MANY // 2):
            os.close(os.open(tmp_path / "many" / name / f"{number}.jpg", os.O_CREAT))
    settle(tmp_path / "many")
    for more, is_written in (([], True), ([], False), (["--refresh"], True)):
        assert main(["data", "index", "--data", str(tmp_path / "many"), *more]) == 0
        answer = capsys.readouterr().out
        assert "20,000 images in" in answer and "20,000 remembered in" in answer
        (file,) = cache.iterdir()
        assert (os.stat(file).st_mtime > 0) == is_written
        os.utime(file, (0, 0))
    assert main(["data", "index", "--data", str(tmp_path / "many" / "a")]) == 0
    assert "fewer than 20,000" in capsys.readouterr().out


def test_names_behave_as_a_list_does():
    words = ["one", "two\udcff", "", "vier", "fünf"]
    stored = StoredNames.of(words)
    for names in (stored, picked(words, np.arange(5)), Names(5, words.__getitem__)):
        assert names == words and words == names and names != words[:4] and names != [*words[:4], "x"]
        assert list(names) == words and names[-1] == "fünf" and names[1:4] == words[1:4] and names[::-2] == words[::-2]
        assert "vier" in names and "six" not in names and names.index("vier") == 3 and len(names) == 5
        with pytest.raises(IndexError):
            names[5]
    assert picked(stored, np.array([3, 0, 3])) == ["vier", "one", "vier"]
    assert StoredNames.of([]) == []
