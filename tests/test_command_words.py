"""The same word means the same in every command; the forms that commands had before still work, with a notice."""

import argparse

import numpy as np
import pytest
from PIL import Image

from unitsphere.cli import build_parser, main


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A folder of three images, in the working folder."""
    (tmp_path / "photos").mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands(parser=None, name="unitsphere"):
    """Every command and its parser, those of `data` and `study` included."""
    parser = parser or build_parser()
    if getattr(parser, "before_parsing", None) is not None:
        parser.before_parsing(["moco-v2"])  # options that depend on what is asked
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, part in action.choices.items():
                yield from commands(part, f"{name} {word}")


def test_pack_takes_data_and_out(photos, capsys):
    assert main(["pack", "--data", "photos", "--out", "photos.pack", "--quiet"]) == 0
    told = capsys.readouterr()
    assert "wrote photos.pack: 3 images" in told.out and told.err == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["pack", "photos", "photos.pack", "--size", "8"], "Write --data photos --out photos.pack"),
        (["pack", "--size", "8", "photos", "photos.pack"], "Write --data photos --out photos.pack"),
        (["pack", "photos", "--out", "photos.pack"], "Write --data photos"),
        (["data", "preview", "photos", "--out", "photos.png", "--count", "2"], "Write --data photos"),
        (["data", "index", "photos"], "Write --data photos"),
    ],
)
def test_words_without_their_options_still_work_and_say_so(photos, capsys, old, new):
    assert main(old) == 0
    said = capsys.readouterr().err
    assert "the old form" in said and new in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pack"], "--data, --out: it must be given"),
        (["pack", "--data", "photos"], "--out: it must be given"),
        (["pack", "photos"], "--out: it must be given"),
        (["pack", "photos", "--data", "photos", "--out", "photos.pack"], "'photos': nothing takes this word"),
        (["pack", "photos", "photos.pack", "more"], "'more': nothing takes this word"),
        (["pack", "photos", "photos.pack", "--siz", "8"], "Did you mean --size"),
        (["data", "index"], "--data: it must be given"),
    ],
)
def test_what_is_missing_or_too_much_is_named(photos, capsys, words, said):
    assert main(words) == 2
    told = capsys.readouterr().err
    assert said in told and "old form" not in told and not (photos / "photos.pack").exists()


def test_options_of_one_name_are_of_one_kind():
    """A switch is a switch everywhere, and --data, --out, --device, --seed and --quiet explain themselves alike."""
    found = {}
    for name, parser in commands():
        for action in parser._actions:
            for option in action.option_strings:
                found.setdefault(option, {})[name] = action
    kinds = {option: {action.nargs == 0 for action in takers.values()} for option, takers in found.items()}
    assert {option: kind for option, kind in kinds.items() if len(kind) > 1} == {}
    for name, action in found["--device"].items():
        assert action.help.startswith("auto, cpu, cuda or cuda:N"), name
    for name, action in found["--data"].items():
        assert "images" in action.help or "train on" in action.help, name
    assert {"unitsphere pack", "unitsphere study run", "unitsphere embed"} <= found["--quiet"].keys()
    assert {"unitsphere pretrain", "unitsphere study run", "unitsphere data preview"} <= found["--seed"].keys()
    assert all(action.help for takers in found.values() for action in takers.values())
