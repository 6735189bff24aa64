from __future__ import annotations

import json
import os
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.data.loader import Loader
from unitsphere.data.source import Images
from unitsphere.evaluation.embedding import check_path, near_duplicates, neighbour_sheet, save_features

NAMES = ["a/ä.jpg", "b/2.jpg", "b/with space.png"]
FEATURES = torch.arange(12.0).reshape(3, 4) / 7
LABELS = np.array([0, 1, 1])
CLASSES = ("ant", "bee")
META = {"backbone": "resnet18", "epoch": 3}


def test_npz_gives_back_what_was_saved_without_pickle(tmp_path: Path) -> None:
    path = tmp_path / "new" / "features.npz"
    save_features(path, FEATURES, NAMES, LABELS, CLASSES, META)
    with np.load(path, allow_pickle=False) as saved:
        assert saved["names"].tolist() == NAMES
        assert saved["features"].dtype == np.float32
        assert np.array_equal(saved["features"], FEATURES.numpy())
        assert saved["labels"].tolist() == [0, 1, 1]
        assert saved["classes"].tolist() == ["ant", "bee"]
        assert json.loads(str(saved["meta"])) == META


def test_parquet_gives_back_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "features.parquet"
    save_features(path, FEATURES, NAMES, LABELS, CLASSES, META)
    table = pq.read_table(path)
    assert table.column("name").to_pylist() == NAMES
    assert np.array_equal(np.array(table.column("features").to_pylist(), np.float32), FEATURES.numpy())
    assert table.column("label").to_pylist() == [0, 1, 1]
    assert table.column("class").to_pylist() == ["ant", "bee", "bee"]
    assert json.loads(table.schema.metadata[b"unitsphere"]) == META


def test_several_labels_an_image_are_saved_as_a_row_of_flags(tmp_path: Path) -> None:
    flags = np.array([[1, 0], [1, 1], [0, 0]], np.int8)
    for name in ("features.npz", "features.parquet"):
        save_features(tmp_path / name, FEATURES, NAMES, flags, CLASSES, META)
    assert pq.read_table(tmp_path / "features.parquet").column("label").to_pylist() == flags.tolist()
    with np.load(tmp_path / "features.npz") as saved:
        assert np.array_equal(saved["labels"], flags)


def test_unlabelled_images_have_no_label_column(tmp_path: Path) -> None:
    save_features(tmp_path / "f.npz", FEATURES, NAMES)
    save_features(tmp_path / "f.parquet", FEATURES, NAMES)
    with np.load(tmp_path / "f.npz") as saved:
        assert set(saved.files) == {"names", "features", "meta"}
    assert pq.read_table(tmp_path / "f.parquet").column_names == ["name", "features"]


@pytest.mark.parametrize("name", ["features.csv", "features", "features.npz.gz"])
def test_another_suffix_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"\.npz or \.parquet"):
        save_features(tmp_path / name, FEATURES, NAMES)
    assert not list(tmp_path.iterdir())


def test_without_pyarrow_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # how Python itself marks a module as missing
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match=r"pip install -e '\.\[parquet\]'"):
        check_path("features.parquet")
    check_path("features.npz")


def test_a_failure_leaves_the_old_file_and_no_remains(tmp_path: Path) -> None:
    path = tmp_path / "features.npz"
    save_features(path, FEATURES, NAMES)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        save_features(path, FEATURES, NAMES, meta={"not json": object()})
    assert path.read_bytes() == before
    (tmp_path / "folder.npz").mkdir()  # cannot be replaced by a file: fails after all is written
    with pytest.raises(UnitsphereError, match="could not be written"):
        save_features(tmp_path / "folder.npz", FEATURES, NAMES)
    assert sorted(os.listdir(tmp_path)) == ["features.npz", "folder.npz"]


def test_the_sheet_shows_each_query_and_then_its_neighbours() -> None:
    """Image n is evenly coloured and its feature turns with n, so the nearest of n is n - 1 or n + 1."""
    levels = [20 * n for n in range(12)]
    arrays = [np.full((20, 20, 3), level, np.uint8) for level in levels]
    images = Images("grey", [str(n) for n in range(12)], None, None, arrays.__getitem__)
    angles = torch.arange(12) * 0.1
    features = torch.stack([angles.cos(), angles.sin()], 1)
    features[5] = torch.nan  # a broken image
    sheet = neighbour_sheet(Loader(images), features, images.names, count=30, k=2, seed=1)
    shown = []
    for top in range(12, sheet.height - 50, 100):  # tiles of 96 with gaps of 4
        row = [sheet.getpixel((sheet.width - 12 - 48 - 100 * back, top + 48)) for back in (2, 1, 0)]
        shown.append([int(pixel[0]) // 20 for pixel in row])  # type: ignore[index]
    assert sorted(row[0] for row in shown) == [n for n in range(12) if n != 5]
    for query, first, second in shown:
        others = [n for n in range(12) if n not in (5, query)]
        distances = sorted(abs(n - query) for n in others)
        assert [abs(first - query), abs(second - query)] == distances[:2]
        assert first != second


@pytest.mark.parametrize(("channels", "dtype"), [(1, np.uint8), (2, np.uint8), (6, np.uint8), (3, np.uint16)])
def test_the_sheet_can_show_any_kind_of_image(channels: int, dtype: type) -> None:
    white: np.ndarray = np.full((9, 9, channels), np.iinfo(dtype).max, dtype)
    images = Images("white", ["a", "b"], None, None, lambda n: white)
    loader = Loader(images, channels=channels, depth=16 if dtype is np.uint16 else 8)
    sheet = neighbour_sheet(loader, torch.eye(2), images.names, k=8)
    assert sheet.getpixel((sheet.width - 60, 60)) == (255, 255, 255)


def test_one_image_has_no_neighbours() -> None:
    images = Images("one", ["a"], None, None, lambda n: np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(UsageError, match="at least 2"):
        neighbour_sheet(Loader(images), torch.ones(1, 3), images.names)


@pytest.mark.parametrize("chunk", [1, 3, 16, 100])
def test_near_duplicates_are_all_pairs_above_the_threshold(chunk: int) -> None:
    features = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    features[44] = 2 * features[7]
    features[20] = torch.nan
    unit = features.double().numpy() / np.linalg.norm(features.double().numpy(), axis=1, keepdims=True)
    cosine = unit @ unit.T
    expected = {(i, j) for i in range(50) for j in range(i + 1, 50) if cosine[i, j] >= 0.95}
    found = near_duplicates(features, 0.95, chunk=chunk)
    assert {(i, j) for i, j, _ in found} == expected
    assert found[0][:2] == (7, 44) and found[0][2] == pytest.approx(1, abs=1e-6)
    scores = [score for _, _, score in found]
    assert scores == sorted(scores, reverse=True)
    assert near_duplicates(features, 0.95, limit=4, chunk=chunk) == found[:4]


def test_a_collapsed_backbone_does_not_fill_the_memory() -> None:
    assert len(near_duplicates(torch.ones(300, 4), limit=1000, chunk=64)) == 1000


def test_parquet_says_nothing_of_classes_that_are_not_known_and_escapes_names_that_are_no_text(tmp_path: Path) -> None:
    names = ["caf\udce9.png", "b.png", "c.png"]
    save_features(tmp_path / "f.parquet", FEATURES, names, np.array([-1, 0, 1]), CLASSES)
    table = pq.read_table(tmp_path / "f.parquet")
    assert table.column("class").to_pylist() == [None, "ant", "bee"]
    assert table.column("name").to_pylist() == ["caf\\udce9.png", "b.png", "c.png"]
    save_features(tmp_path / "f.npz", FEATURES, names)
    assert np.load(tmp_path / "f.npz")["names"].tolist() == names
    images = Images("x", names, None, None, lambda index: np.zeros((4, 4, 3), np.uint8))
    assert neighbour_sheet(Loader(images), FEATURES, names).width > 0


def test_a_long_name_costs_a_parquet_file_its_own_length_alone(tmp_path: Path) -> None:
    names = ["x" * 100_000, *(str(n) for n in range(500))]  # 200 MB where each takes the room of the longest
    tracemalloc.start()
    save_features(tmp_path / "f.parquet", torch.zeros(501, 2), names, np.arange(501) % 3 - 1, ["ant", "bee"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    table = pq.read_table(tmp_path / "f.parquet")
    assert peak < 20e6 and table["name"].to_pylist() == names
    assert table["class"].to_pylist() == [None, "ant", "bee"] * 167
