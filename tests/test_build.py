"""What is built from the checkout holds what it needs, and what is said of dependencies is so. `make wheel` builds."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import unitsphere

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NEEDS = PROJECT["project"]["dependencies"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
IMPORTED_AS = {"pillow": "PIL", "scikit-learn": "sklearn"}


def test_nothing_of_the_package_is_ignored_and_so_left_out_of_the_wheel(tmp_path):
    """The build leaves out what git ignores: a rule such as `runs/` would take unitsphere/runs with it."""
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["unitsphere"]}
    files = [path for path in (ROOT / "unitsphere").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    names = [str(path.relative_to(ROOT)) for path in files]
    assert "unitsphere/py.typed" in names and len(names) > 150
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    found = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"],
        cwd=tmp_path, input="\n".join(names), capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 1 and found.stdout == ""


def test_every_package_that_is_imported_is_declared():
    declared = {re.split("[>=<]", need)[0] for need in (*NEEDS, *EXTRAS["timm"], *EXTRAS["parquet"], *EXTRAS["plots"])}
    allowed = {IMPORTED_AS.get(name, name) for name in declared} | {"unitsphere", "triton"} | sys.stdlib_module_names
    found = {}
    for path in (ROOT / "unitsphere").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            found |= {str(name).split(".")[0]: path.name for name in names}
    assert found.keys() - allowed <= {"scipy"}  # ImageNet's devkit alone needs it, and says so


def test_dependencies_have_no_upper_bounds_and_each_is_explained():
    page = (ROOT / "docs" / "dependencies.md").read_text()
    for need in (*NEEDS, *EXTRAS["timm"], *EXTRAS["parquet"], *EXTRAS["plots"]):
        name, version = re.fullmatch(r"([a-z-]+)>=([\d.]+)", need).groups()
        assert re.search(rf"\| {name} \| {re.escape(version)} \|", page), need


def test_the_workflow_tests_the_oldest_versions_that_are_allowed():
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    pinned = dict(re.findall(r"([a-z-]+)==([\d.]+)", workflow))
    oldest = dict(need.split(">=") for need in NEEDS)
    for name, version in oldest.items():
        assert pinned[name] == ".".join([*version.split("."), "0", "0"][:3]), name
    assert f'python: "{PROJECT["project"]["requires-python"].removeprefix(">=")}"' in workflow


def test_the_hooks_and_the_workflow_use_the_tools_of_the_project():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"entry: \.venv/bin/(\S+)", hooks) == ["ruff", "ruff", "mypy", "pytest"]
    assert "rev:" not in hooks  # a second version of a tool beside that of pyproject.toml


def test_the_version_is_one():
    assert f"version: {unitsphere.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {unitsphere.__version__}" in (ROOT / "CHANGELOG.md").read_text()
