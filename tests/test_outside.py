"""Code from outside the package: found by `module:Name` or as an entry point, imported only when it is chosen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from unitsphere.common.errors import UsageError
from unitsphere.common.outside import installed_names, load_named, names_code

GROUP = "unitsphere.protocols"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that is not on sys.path. Modules that a test imports from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", ".")])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def install(site: Path, package: str, entries: str) -> None:
    """What an installed package leaves behind, as far as its entry points go."""
    about = site / f"{package}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")


def test_a_class_in_a_file_of_the_working_folder_is_found_by_module_and_name(folder):
    (folder / "outsider_a.py").write_text("from outsider_helper import BASE\nclass Mine(BASE): pass\n")
    (folder / "outsider_helper.py").write_text("BASE = dict\n")
    path = list(sys.path)
    assert load_named("protocol", "outsider_a:Mine", GROUP, expected=dict).__name__ == "Mine"
    assert sys.path == path  # searched for this name alone


def test_a_class_in_a_package_is_found_and_an_object_too(folder):
    (folder / "outsider_pack").mkdir()
    (folder / "outsider_pack" / "inner.py").write_text("VALUE = {1: 2}\n")
    assert load_named("protocol", "outsider_pack.inner:VALUE", GROUP, expected=dict) == {1: 2}


def test_what_is_only_listed_is_not_imported(folder, monkeypatch):
    install(folder / "site", "somebody", "theirs = outsider_b:Theirs\nbroken = outsider_missing:X")
    (folder / "site" / "outsider_b.py").write_text("class Theirs: pass\n")
    monkeypatch.syspath_prepend(folder / "site")
    assert list(installed_names(GROUP)) == ["broken", "theirs"]
    assert "outsider_b" not in sys.modules
    assert load_named("protocol", "theirs", GROUP).__name__ == "Theirs"
    with pytest.raises(UsageError, match=r"protocol: broken cannot be imported, .* no module 'outsider_missing'"):
        load_named("protocol", "broken", GROUP)


def test_an_entry_point_is_not_looked_for_in_the_working_folder(folder, monkeypatch):
    install(folder / "site", "somebody", "theirs = outsider_c:Theirs")
    (folder / "outsider_c.py").write_text("raise SystemExit('the wrong file')\n")
    monkeypatch.syspath_prepend(folder / "site")
    with pytest.raises(UsageError, match="no module 'outsider_c'"):
        load_named("protocol", "theirs", GROUP)


def test_a_name_that_two_packages_declare_is_refused_with_both(folder, monkeypatch):
    install(folder / "site", "one", "theirs = outsider_d:A")
    install(folder / "site", "two", "theirs = outsider_e:B")
    monkeypatch.syspath_prepend(folder / "site")
    with pytest.raises(UsageError, match=r"outsider_d:A and outsider_e:B\. Give one of these"):
        load_named("protocol", "theirs", GROUP)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("outsider_f:Mine", r"no module 'outsider_f', neither installed nor in .*\. Install it, or go to the folder"),
        ("outsider_good.deeper:Mine", "outsider_good.deeper:Mine cannot be imported"),
        ("outsider_good:Mien", r"outsider_good has no 'Mien'\. Did you mean Mine\?"),
        ("outsider_good:mine", "outsider_good:mine is of type int. It must be a subclass or an instance of"),
        ("outsider_good:Mine", "outsider_good:Mine is the class Mine. It must be .* builtins.dict"),
        ("outsider_needy:Mine", "No module named 'outsider_g'. Install what it needs"),
        ("outsider_wrong:Mine", "outsider_wrong:Mine cannot be imported: SyntaxError"),
        ("outsider_leaves:Mine", "cannot be imported: SystemExit: 3"),
        ("knm", "protocol: 'knm' is not known. Did you mean knn"),
        ("a b:C", r"given 'a b:C'\. Code from outside is named package\.module:Name"),
        ("outsider_good:", "package.module:Name"),
        (":Mine", "package.module:Name"),
    ],
)
def test_every_mistake_is_told_with_what_to_do(folder, name, said):
    (folder / "outsider_good.py").write_text("class Mine: pass\nmine = 3\n")
    (folder / "outsider_needy.py").write_text("import outsider_g\n")
    (folder / "outsider_wrong.py").write_text("class Mine\n")
    (folder / "outsider_leaves.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(UsageError, match=said):
        load_named("protocol", name, GROUP, expected=dict, known=("knn", "linear"))


def test_names_of_the_package_and_of_data_are_not_taken_for_code():
    assert names_code("mine:VICReg") and names_code("lab.methods.new:VICReg")
    assert not any(map(names_code, ("moco-v2", "torchvision:resnet50=", "timm:a.b", "C:\\photos", "./mine:X")))
