"""Imports point one way: from a room to itself or to the rooms below it. No modules import each other in a circle."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.room_graph import HERE, ORDER, circles, edges, read_graph, room_of, upward

LOADED = "import sys; sys.argv[0] = 'unitsphere'; from unitsphere.cli import main; main(sys.argv[1:])\n"
LOADED += "print('torch' in sys.modules)"


@pytest.fixture(scope="module")
def graph():
    return read_graph(HERE)


@pytest.fixture
def copy(tmp_path):
    """A copy of the package whose files a test may change."""
    return shutil.copytree(HERE, tmp_path / "unitsphere", ignore=shutil.ignore_patterns("__pycache__"))


def plant(package: Path, module: str, text: str) -> list[str]:
    """Append text to a file of the copy and return the imports that point upwards."""
    path = package / module
    path.write_text(f"{path.read_text()}\n{text}\n")
    return upward(read_graph(package))


def test_imports_point_to_the_same_room_or_to_a_lower_one(graph):
    assert upward(graph) == []


def test_no_modules_import_each_other_in_a_circle(graph):
    assert circles(graph) == []


def test_evaluation_knows_neither_training_nor_methods(graph):
    assert not {("evaluation", "training"), ("evaluation", "methods"), ("features", "methods")} & set(edges(graph))


def test_every_module_has_a_place_in_the_order(graph):
    folders = {path.name for path in HERE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders <= set(ORDER)
    assert {room_of(module) for module in graph} == folders | {"top"}


@pytest.mark.parametrize(
    "text",
    [
        "from unitsphere.training.loop import train",
        "from unitsphere.training import loop",
        "import unitsphere.training.loop as loop",
        "from ..training import loop",
        "from ..training.loop import train",
        "def late():\n    from unitsphere.training import loop",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from unitsphere.training.loop import train",
        "def late():\n    import importlib\n    return importlib.import_module('unitsphere.training.loop')",
        "TABLE = {'train': 'unitsphere.training.loop:train'}",
    ],
)
def test_a_planted_import_upwards_is_found(copy, text):
    assert plant(copy, "data/walk.py", text) == ["unitsphere.data.walk -> unitsphere.training.loop"]


def test_a_planted_import_of_the_package_itself_is_found(copy):
    assert plant(copy, "runs/run.py", "import unitsphere") == ["unitsphere.runs.run -> unitsphere"]


def test_a_room_without_a_place_is_named(copy):
    (copy / "attic").mkdir()
    (copy / "attic" / "__init__.py").write_text("")
    with pytest.raises(ValueError, match="no place in ORDER for attic"):
        upward(read_graph(copy))


def test_a_planted_circle_is_found(copy):
    plant(copy, "common/text.py", "def late():\n    from unitsphere.common.errors import UsageError")
    plant(copy, "common/errors.py", "from unitsphere.common import text")
    assert circles(read_graph(copy)) == [{"unitsphere.common.text", "unitsphere.common.errors"}]


def test_what_runs_is_among_what_is_read(graph):
    """Python's own record of what importing the command's modules loads: the reader must have seen each way there."""
    asked = "import sys, unitsphere.cli; print(*sorted(m for m in sys.modules if m.split('.')[0] == 'unitsphere'))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    known, waiting = set(), ["unitsphere.cli"]
    while waiting:
        module = waiting.pop()
        parents = {module.rpartition(".")[0]} - {""}  # Python runs a package's own file first
        new = (graph[module] | parents) - known
        known |= new
        waiting += new
    assert set(done.stdout.split()) <= known | {"unitsphere.cli"}


@pytest.mark.parametrize("words", ["--help", "pretrain --help", "pretrain mochi --help", "evaluate --help", "methods"])
def test_help_loads_no_torch(words):
    done = subprocess.run([sys.executable, "-c", LOADED, *words.split()], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_version_stands_at_the_bottom():
    tree = ast.parse((HERE / "common" / "version.py").read_text())
    assert not any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(tree))
