"""What evaluate and embed decide by themselves, and what they write down."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import command, write_images, write_labelled

import unitsphere
from unitsphere.analysis.request import quiet
from unitsphere.common.errors import UsageError
from unitsphere.evaluation import backbone
from unitsphere.runs.loading import load

SMALL = {"backbone": "resnet-tiny", "image_size": 16, "batch_size": 8, "queue_size": 32, "bn_groups": 1, "epochs": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("evaluate")
    data = write_labelled(root / "data")
    (data / "red" / "bad.png").write_bytes(b"no image")
    settings = SMALL | {"device": "cpu", "tensorboard": False, "holdout": 0.3, "max_broken": 0.1}
    return unitsphere.pretrain("moco-v2", data=data, out=root / "run", **settings), data


def test_the_runs_own_split_is_judged_and_broken_images_are_told(run):
    trained, data = run
    result = unitsphere.evaluate(trained, protocol="knn", data=data)
    assert result["constants"]["holdout"] == 0.3 and result["constants"]["k"] == [20, 56]  # of 57, one is broken
    assert sum(result["images"].values()) == 80 and list(result["broken"]) == ["red/bad.png"]
    assert result["data"] == str(data) and result["evaluation_seed"] == 0
    done = command("evaluate", trained.path, "--protocol", "knn", "--data", data, "--k", "5", "--max-broken", "0")
    assert done.returncode == 1 and "bad.png" in done.stderr
    done = command("evaluate", trained.path, "--protocol", "knn", "--data", data, "--k", "5")
    assert done.returncode == 0 and "bad.png" in done.stderr


def test_the_classes_that_were_judged_and_the_share_of_the_largest_are_told(tmp_path):
    """Who answers the largest class alone has its share: of 6 readable images 4."""
    for split, counts in (("train", {"a": 4, "b": 4, "c": 4}), ("val", {"a": 4, "b": 2})):
        for name, count in counts.items():
            write_images(tmp_path / split / name, count, seed=count)
    (tmp_path / "val" / "b" / "bad.png").write_bytes(b"no image")
    done = command("evaluate", "pixels", "--image-size", "8", "--data", tmp_path, "--protocol", "knn")
    assert "%\n  2 classes in the test images, the largest with 66.7 %\n" in done.stdout
    result = unitsphere.evaluate("pixels", image_size=8, data=tmp_path, protocol="knn")
    assert (result["classes"], result["largest_class"]) == (2, 66.67)


def test_too_many_neighbours_are_refused_before_anything_is_computed(run):
    trained, data = run
    with pytest.raises(UsageError, match="1 to 57"):
        unitsphere.evaluate(trained, protocol="knn", data=data, k=[500])
    assert command("evaluate", trained.path, "--protocol", "knn", "--data", data, "--k", "2.5").returncode == 2


def test_words_that_mean_nothing_are_refused(run):
    trained, data = run
    with pytest.raises(UsageError, match="Did you mean embedding"):
        unitsphere.evaluate(trained, protocol="knn", data=data, features="embeding")
    with pytest.raises(UsageError, match="has no head"):
        unitsphere.evaluate("random", protocol="knn", data=data, features="embedding")
    with pytest.raises(UsageError, match="Did you mean knn"):
        unitsphere.evaluate(trained, protocol="kn", data=data)


@pytest.mark.parametrize(
    ("what", "settings", "said"),
    [
        ("run", {"bogus": 1}, "bogus: there is no such setting. Of knn: k, temperature. Of weights: backbone, stem"),
        ("run", {"holdut": 0.2}, "no such setting. Did you mean holdout"),
        ("run", {"backbone": "resnet18"}, "backbone: given 'resnet18', but .* has 'resnet-tiny'"),
        ("random", {"image_sise": 32}, "Did you mean image_size"),
        ("random", {"image_size": 0}, "image_size: given 0"),
        ("torchvision:resnet18", {"channels": 1}, "are for 3"),
        ("run", {"batch_size": 0}, "batch_size: given 0"),
        ("run", {"temperature": float("nan")}, "temperature: given nan"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_computed(run, what, settings, said, monkeypatch):
    trained, data = run
    monkeypatch.setattr(backbone, "extract", None)
    with pytest.raises(UsageError, match=said):
        unitsphere.evaluate(trained if what == "run" else what, protocol="knn", data=data, **settings)


def test_classes_that_only_the_test_images_have_are_refused_before_anything_is_computed(run, tmp_path, monkeypatch):
    write_images(tmp_path / "train" / "a", 4)
    write_images(tmp_path / "train" / "b", 4)
    for name in ("a", "b", "c"):
        write_images(tmp_path / "val" / name, 2)
    monkeypatch.setattr(backbone, "extract", None)
    with pytest.raises(UsageError, match="classes that the training images lack"):
        unitsphere.evaluate(run[0], protocol="linear", data=tmp_path)


def test_one_number_is_a_list_of_one(run):
    trained, data = run
    assert unitsphere.evaluate(trained, protocol="knn", data=data, k=5)["constants"]["k"] == [5]
    linear = unitsphere.evaluate(trained, protocol="linear", data=data, lr=1.0, epochs=1)
    assert linear["constants"]["chosen_lr"] == 1.0
    with pytest.raises(UsageError, match=r"recipe: 'moc' is not known\. Did you mean moco\?"):
        unitsphere.evaluate(trained, protocol="linear", data=data, recipe="moc")


def test_a_result_is_returned_also_where_it_cannot_be_kept(run, capsys):
    trained, data = run
    results, kept = trained.path / "results.json", trained.path / "kept.json"
    if results.exists():
        results.rename(kept)
    results.mkdir()
    try:
        result = unitsphere.evaluate(trained, protocol="knn", data=data, k=5)
    finally:
        results.rmdir()
        if kept.exists():
            kept.rename(results)
    assert result["value"]["k=5"] >= 0
    assert "could not be added to" in capsys.readouterr().err


def test_a_module_stays_in_its_mode(run):
    module = load(run[0].path).backbone.train()
    unitsphere.evaluate(module, protocol="knn", data=run[1], k=5, image_size=16)
    assert module.training and all(part.training for part in module.modules())


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ({"neighbours": "sheet.foo"}, "no name of a picture"),
        ({"neighbours": "file/sheet.png"}, "neighbours: .* cannot be written"),
        ({"out": "file/features.npz"}, "out: .* cannot be written"),
    ],
)
def test_places_that_cannot_be_written_are_refused_before_anything_is_computed(run, paths, said, tmp_path, monkeypatch):
    monkeypatch.setattr(backbone, "extract", None)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UsageError, match=said):
        unitsphere.embed(run[0], data=run[1], **{name: tmp_path / path for name, path in paths.items()})


def test_embedding_is_backbone_and_head(run):
    trained, data = run
    assert unitsphere.embed(trained, data=data, features="embedding").features.shape == (80, 128)


def test_images_that_cannot_be_read_are_left_out_of_features_and_named(run, tmp_path):
    trained, data = run
    readable = sorted(str(path.relative_to(data)) for path in data.rglob("*.png") if path.stem != "bad")
    for file in (tmp_path / "f.npz", tmp_path / "f.parquet"):
        done = command("embed", trained.path, "--data", data, "--out", file, "--duplicates", "0.01", "--device", "cpu")
        assert "80 images, 64 features each, 1 left out\n" in done.stdout
        assert "bad.png" not in done.stdout and "red/bad.png: not in a format" in done.stderr
    with np.load(tmp_path / "f.npz") as saved:
        assert sorted(saved["names"]) == readable and np.isfinite(saved["features"]).all()
        assert [str(saved["classes"][label]) for label in saved["labels"]] == [n.split("/")[0] for n in saved["names"]]
    assert pq.read_table(tmp_path / "f.parquet")["name"].to_pylist() == np.load(tmp_path / "f.npz")["names"].tolist()
    found = unitsphere.embed(trained, data=data, duplicates=0.01, device="cpu")
    first, second, cosine = found.duplicates[0]
    assert torch.cosine_similarity(found.features[first], found.features[second], dim=0).item() == pytest.approx(cosine)
    assert len(found.names) == 80 and list(found.broken) == ["red/bad.png"]


class Dazzled(torch.nn.Module):
    def forward(self, images):
        means = images.mean((2, 3))
        return torch.where(means > 1, torch.nan, means)


def test_images_without_finite_features_are_left_out_and_named():
    arrays = np.zeros((9, 16, 16, 3), np.uint8)
    arrays[4] = 255
    found = unitsphere.embed(Dazzled(), data=arrays, image_size=16, device="cpu")
    assert len(found.names) == 8 and found.features.isfinite().all()
    ((name, why),) = found.broken.items()
    assert name not in found.names and "no finite features" in why


def test_one_name_in_two_splits_is_two_images(tmp_path, run):
    for split in ("train", "val"):
        write_images(tmp_path / split / "a", 3)
        write_images(tmp_path / split / "b", 3)
    names = unitsphere.embed(run[0], data=tmp_path, out=tmp_path / "f.npz").names
    assert len(set(names)) == 12 and "val/a/0000.png" in names
    assert list(np.load(tmp_path / "f.npz")["names"]) == list(names)


def test_results_add_up_in_the_runs_folder(run):
    trained, data = run
    before = len(json.loads((trained.path / "results.json").read_text()))
    unitsphere.evaluate(trained, protocol="linear", data=data, epochs=2, lr=[0.1])
    results = json.loads((trained.path / "results.json").read_text())
    assert len(results) == before + 1 and results[-1]["constants"]["chosen_lr"] == 0.1


def test_a_checkpoint_is_judged_by_its_runs_own_division(run):
    trained, data = run
    ((_, checkpoint),) = trained.checkpoints()
    of_run = unitsphere.evaluate(trained, protocol="knn", data=data, k=[5])
    alone = unitsphere.evaluate(checkpoint, protocol="knn", data=data, k=[5])
    for known in ("value", "images", "constants", "broken"):
        assert alone[known] == of_run[known]
    assert alone["constants"]["holdout"] == 0.3
    held_out = unitsphere.embed(trained, data=data, split="val").names
    assert unitsphere.embed(checkpoint, data=data, split="val").names == held_out


def test_splits_whose_labels_mean_other_classes_are_refused(run, tmp_path):
    (path,) = write_images(tmp_path, 1)
    for split, names in (("train", ["ant", "bee"]), ("test", ["bee", "ant"])):
        table = pa.table({"image": [path.read_bytes()] * 4, "label": [0, 1, 0, 1]})
        features = {"label": {"_type": "ClassLabel", "names": names}}
        about = {"huggingface": json.dumps({"info": {"features": features}})}
        pq.write_table(table.replace_schema_metadata(about), tmp_path / f"{split}.parquet")
    with pytest.raises(UsageError, match=r"label 0 .* is 'ant' in the training images and 'bee' in the test"):
        unitsphere.evaluate(run[0], protocol="knn", data=f"parquet={tmp_path}", k=[1])


def test_a_split_may_lack_the_last_classes(run, tmp_path):
    (path,) = write_images(tmp_path, 1)
    for split, labels in (("train", [0, 1, 2, 2]), ("test", [0, 1, 1, 0])):  # of numbers alone, 3 classes and 2
        pq.write_table(pa.table({"image": [path.read_bytes()] * 4, "label": labels}), tmp_path / f"{split}.parquet")
    assert unitsphere.evaluate(run[0], protocol="knn", data=f"parquet={tmp_path}", k=[1])["images"]["test"] == 4


def test_features_that_would_fill_a_device_stay_where_they_are(monkeypatch):
    features = torch.zeros(100, 8)
    judged = backbone.JudgedBackbone(load("pixels", image_size=8), torch.device("meta"), "fp32", None, quiet, 0.01)
    for free, place in ((5 * features.nbytes, "meta"), (3 * features.nbytes, "cpu")):
        monkeypatch.setattr(backbone, "free_memory", lambda device, free=free: free)
        assert judged.where_it_fits(features).device.type == place


@pytest.mark.parametrize("content", [torch.zeros(3), [torch.zeros(3)], 7])
def test_a_file_without_named_tensors_is_refused(content, tmp_path):
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"weights.pt holds a .*save a state_dict\(\)"):
        load(tmp_path / "weights.pt")
