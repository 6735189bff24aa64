"""The package was called antipode until November 2026. That name is somebody else's package on PyPI."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import unitsphere
from unitsphere.common.extras import EXTRAS, how_to_install
from unitsphere.data.packfile import open_pack

PROJECT = Path(__file__).parents[1]
OLD = Path(__file__).parent / "written_by_antipode"  # a run and a pack of commit a394c43
WRITTEN = ("*.py", "*.md", "*.toml", "*.cff", "Makefile", "*.svg", "*.yml", "*.yaml", "*.html")


def texts():
    folders = [PROJECT / name for name in ("unitsphere", "docs", "tests", "examples", "benchmarks")]
    files = [*PROJECT.glob("*"), *(path for folder in folders for path in folder.rglob("*"))]
    return [path for path in files if path.is_file() and any(path.match(pattern) for pattern in WRITTEN)]


def test_nothing_says_how_to_install_or_import_the_old_name():
    found = [
        f"{path.relative_to(PROJECT)}: {line.strip()}"
        for path in texts()
        if path.name != "test_old_name.py"
        for line in path.read_text().splitlines()
        if re.search(r"(install|import|from|python -m)\b.*\bantipode|\bantipode\[|^\s*antipode ", line, re.IGNORECASE)
    ]
    assert found == []


def test_nothing_installs_a_distribution_from_an_index_under_our_own_name():
    """Until it is released there, the name on the index could become anybody's."""
    found = [
        f"{path.relative_to(PROJECT)}: {line.strip()}"
        for path in texts()
        if path.name != "test_old_name.py"
        for line in path.read_text().splitlines()
        if re.search(r"pip install[^.\n]*\bunitsphere\b", line)
    ]
    assert found == []


def test_the_extras_are_those_of_the_project():
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        re.split(r"[>=<]", need)[0]: extra for extra in extras if extra not in ("all", "dev") for need in extras[extra]
    }
    assert named == EXTRAS


def test_outside_a_checkout_the_packages_are_named(monkeypatch, tmp_path):
    assert how_to_install("plots").startswith("pip install -e '.[plots]'")
    monkeypatch.setattr("unitsphere.common.extras.__file__", str(tmp_path / "unitsphere" / "common" / "extras.py"))
    assert how_to_install("plots") == "pip install matplotlib scikit-learn"


@pytest.fixture
def old_run(tmp_path):
    return shutil.copytree(OLD / "run", tmp_path / "run")


def test_a_run_of_the_old_name_loads_and_is_judged(old_run):
    assert unitsphere.load_transform(old_run).size == 16
    with safe_open(old_run / "checkpoints" / "step-00000008.safetensors", framework="pt") as file:
        written = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in unitsphere.load_backbone(old_run).state_dict().items():
        assert torch.equal(tensor, written[f"method.online.backbone.{name}"])
    result = unitsphere.evaluate(old_run, protocol="knn", data="shapes=64x16", k=[5], device="cpu")
    assert result["epoch"] == 2 and result["seed"] == 3 and 0 < result["value"]["k=5"] < 100


def test_a_run_of_the_old_name_goes_on(old_run):
    run = unitsphere.pretrain(out=old_run, resume=True, epochs=3)
    assert [step for step, _ in run.checkpoints()][-1] == 12


def test_a_pack_of_the_old_name_opens():
    images = open_pack(OLD / "photos.pack")["all"]
    assert len(images) == 12 and images.classes == ("a", "b")
