"""Files that somebody else wrote: their code is never run unless the user names it in this call."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import unitsphere
from unitsphere.cli import main
from unitsphere.common.errors import UsageError
from unitsphere.weights.files import load_tensors, save_tensors

PAYLOAD = """
from pathlib import Path
Path({marker!r}).touch()
from torch import nn
def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8))
"""
SMALL = {"data": "shapes=64x16", "image_size": 16, "batch_size": 16, "epochs": 1, "queue_size": 32, "device": "cpu"}


@pytest.fixture
def payload(tmp_path, monkeypatch):
    """A folder that holds payload.py; whoever imports it leaves a mark. It is the working folder."""
    marker, folder = tmp_path / "marker", tmp_path / "folder"
    folder.mkdir()
    (folder / "payload.py").write_text(PAYLOAD.format(marker=str(marker)))
    monkeypatch.chdir(folder)
    yield marker
    sys.modules.pop("payload", None)


@pytest.fixture
def trained(payload, tmp_path):
    """A run that was really trained with payload:make, and then copied beside another payload.py."""
    run = unitsphere.pretrain("moco-v2", out=tmp_path / "begun", backbone="payload:make", tensorboard=False, **SMALL)
    assert payload.exists()
    shutil.copytree(run.path, "copied")
    payload.unlink()
    sys.modules.pop("payload")
    return Path("copied")


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    out = tmp_path_factory.mktemp("honest") / "run"
    unitsphere.pretrain("moco-v2", out=out, backbone="resnet-tiny", tensorboard=False, **SMALL)
    return out


@pytest.fixture
def changed(honest, payload):
    """A run whose JSON was changed to name payload:make, in every place where it stands."""
    shutil.copytree(honest, "changed")
    for file in (Path("changed/config.json"), Path("changed/record.json")):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"backbone": "payload:make"}))
    (path,) = Path("changed/checkpoints").glob("*.safetensors")
    tensors, meta = load_tensors(path)
    for place in ("config", "record"):
        meta[place]["backbone"] = "payload:make"
    save_tensors(path, tensors, meta)
    return Path("changed")


def ways_in(run):
    """Every command that reads a run, a checkpoint or its configuration."""
    (checkpoint,) = (run / "checkpoints").glob("*.safetensors")
    data = ["--data", "shapes=64x16", "--device", "cpu"]
    return {
        "evaluate a run": ["evaluate", str(run), "--protocol", "knn", *data],
        "evaluate a checkpoint": ["evaluate", str(checkpoint), "--protocol", "knn", *data],
        "embed": ["embed", str(run), "--out", "features.npz", *data],
        "start from its configuration": ["pretrain", "--config", str(run / "config.json"), "--out", "new"],
        "resume, dry": ["pretrain", "--out", str(run), "--resume", "--dry-run"],
        "resume": ["pretrain", "--out", str(run), "--resume", "--epochs", "2"],
    }


WAYS = [
    "evaluate a run", "evaluate a checkpoint", "embed", "start from its configuration", "resume, dry", "resume",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["trained", "changed"])
def test_a_backbone_that_a_file_names_is_not_imported(kind, way, payload, request, capsys):
    run = request.getfixturevalue(kind)
    assert main(ways_in(run)[way]) == 2
    assert not payload.exists()
    told = capsys.readouterr().err
    assert "payload:make" in told and "--backbone payload:make" in told


@pytest.mark.parametrize("way", WAYS)
def test_it_is_imported_once_the_user_names_it(way, trained, payload):
    assert main([*ways_in(trained)[way], "--backbone", "payload:make"]) == 0
    assert payload.exists()


def test_naming_another_backbone_does_not_import_it(trained, payload, capsys):
    assert (
        main(["evaluate", str(trained), "--backbone", "resnet18", "--protocol", "knn", "--data", "shapes=64x16"]) == 2
    )
    assert not payload.exists() and "payload:make" in capsys.readouterr().err


def test_the_python_calls_hold_to_it_too(trained, payload):
    for call in (
        lambda: unitsphere.load_backbone(trained),
        lambda: unitsphere.evaluate(trained, protocol="knn", data="shapes=64x16", device="cpu"),
        lambda: unitsphere.pretrain(out=trained, resume=True, epochs=2),
        lambda: unitsphere.analyse([trained], "similarity", out="analysis", device="cpu"),
    ):
        with pytest.raises(UsageError, match="payload:make"):
            call()
    assert not payload.exists()
    assert unitsphere.load_transform(trained).size == 16  # the record alone is read
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 8))
    filled = unitsphere.load_backbone(trained, into=module)
    assert not payload.exists()
    named = unitsphere.load_backbone(trained, backbone="payload:make")
    assert payload.exists() and torch.equal(named[1].weight, filled[1].weight)


def test_an_installed_package_s_entry_point_counts_as_named(tmp_path, monkeypatch, payload):
    site = tmp_path / "site"
    (site / "mylab-1.0.dist-info").mkdir(parents=True)
    (site / "mylab-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mylab\nVersion: 1.0\n")
    (site / "mylab-1.0.dist-info" / "entry_points.txt").write_text("[unitsphere.backbones]\nmylab-net = mylab:net\n")
    (site / "mylab.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8))\n"
    )
    monkeypatch.syspath_prepend(site)
    run = unitsphere.pretrain("moco-v2", out=tmp_path / "run", backbone="mylab-net", tensorboard=False, **SMALL)
    result = unitsphere.evaluate(run, protocol="knn", data="shapes=64x16", k=5, device="cpu")
    assert 0 <= result["value"]["k=5"] <= 100
    sys.modules.pop("mylab")


def test_a_method_and_a_source_that_a_file_names_are_not_imported(honest, payload, capsys):
    for field, value in (("method", "payload:Method"), ("data", "payload:source=x")):
        file = Path(f"{field}.json")
        file.write_text(json.dumps(json.loads((honest / "config.json").read_text()) | {field: value}))
        assert main(["pretrain", "--config", str(file), "--out", "new"]) == 2
        assert f"--{field} {value}" in capsys.readouterr().err and not payload.exists()


def test_a_folder_s_own_modules_do_not_take_the_place_of_installed_ones(honest, tmp_path):
    """`python -m` would search the working folder first."""
    folder = tmp_path / "downloaded"
    shutil.copytree(honest, folder)
    for name in ("safetensors", "numpy", "PIL", "timm", "sklearn"):
        (folder / f"{name}.py").write_text(f"open('was-run', 'w')\nraise ImportError('{name} of the folder')\n")
    done = subprocess.run(
        [sys.executable, "-m", "unitsphere", "evaluate", ".", "--protocol", "knn", "--data", "shapes=64x16"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(unitsphere.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not (folder / "was-run").exists()


def test_a_file_of_a_later_version_is_refused(honest, tmp_path):
    (path,) = (honest / "checkpoints").glob("*.safetensors")
    tensors, meta = load_tensors(path)
    save_tensors(tmp_path / "later.safetensors", tensors, meta | {"format": 99})
    with pytest.raises(unitsphere.UnitsphereError, match="format 99"):
        unitsphere.load_backbone(tmp_path / "later.safetensors")


def test_a_checkpoint_whose_tensors_are_not_its_own_is_damaged(honest, tmp_path):
    (path,) = (honest / "checkpoints").glob("*.safetensors")
    tensors, meta = load_tensors(path)
    tensors.pop("method.online.backbone.stem.0.weight")
    save_tensors(tmp_path / "part.safetensors", tensors, meta)
    with pytest.raises(UsageError, match="damaged"):
        unitsphere.load_backbone(tmp_path / "part.safetensors")


@pytest.mark.parametrize("meta", ['{"record": 3}', '{"record": {"method": 1}}', "[1]", '{"config": []}', "{"])
def test_metadata_that_is_no_record_is_told(meta, tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "odd.safetensors", metadata={"unitsphere": meta})
    with pytest.raises(unitsphere.UnitsphereError, match=r"odd\.safetensors"):
        unitsphere.load_transform(tmp_path / "odd.safetensors")


def test_a_second_start_is_noticed_under_the_lock(tmp_path, monkeypatch):
    """While the first start builds its backbone another run is begun and finished in the same folder."""
    out = tmp_path / "run"

    def quick_one():
        if not out.exists():
            unitsphere.pretrain("moco-v2", out=out, seed=1, backbone="resnet-tiny", tensorboard=False, **SMALL)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 8))

    module = type(sys)("slow_backbone")
    module.make = quick_one
    monkeypatch.setitem(sys.modules, "slow_backbone", module)
    for resume in (False, True):
        shutil.rmtree(out, ignore_errors=True)
        with pytest.raises(UsageError, match="another process has trained"):
            unitsphere.pretrain(
                "moco-v2", out=out, seed=2, backbone="slow_backbone:make", resume=resume, tensorboard=False, **SMALL
            )
        kept = unitsphere.load_backbone(out)
        assert kept.stem[0].weight.shape == (16, 3, 3, 3)
        assert json.loads((out / "config.json").read_text())["seed"] == 1
        assert [step for step, _ in unitsphere.pretrain(out=out, resume=True, epochs=2).checkpoints()] == [4, 8]


def test_a_backbone_is_loaded_without_queue_slow_copy_or_head(tmp_path, monkeypatch):
    """Its record alone is read: judging a run must not build what only training needs."""
    run = unitsphere.pretrain("moco-v2", out=tmp_path / "run", backbone="resnet-tiny", tensorboard=False, **SMALL)
    built = []
    original = torch.nn.Module.__init__

    def noting(self, *given, **named):
        built.append(type(self).__name__)
        original(self, *given, **named)

    monkeypatch.setattr(torch.nn.Module, "__init__", noting)
    unitsphere.load_backbone(run)
    assert "TinyResNet" in built
    assert not {"KeyQueue", "Encoder", "ContrastiveLearner"} & set(built) and built.count("TinyResNet") == 1


def test_a_run_is_judged_without_importing_its_method(honest):
    code = """
import sys, unitsphere
unitsphere.evaluate(sys.argv[1], protocol="knn", data="shapes=64x16", k=5, device="cpu")
print([name for name in sys.modules if name.startswith(("unitsphere.methods.learners", "unitsphere.training"))])
"""
    done = subprocess.run([sys.executable, "-c", code, str(honest)], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
