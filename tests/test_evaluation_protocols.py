"""A protocol is one declaration: options, checks, help and names in studies come from it, also from outside."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import command, write_labelled
from torch.nn.functional import normalize

import unitsphere
from unitsphere.analysis.request import quiet
from unitsphere.cli import main
from unitsphere.common.errors import UsageError
from unitsphere.data.source import open_parts
from unitsphere.evaluation.backbone import JudgedBackbone, Judgement, LabelledImages
from unitsphere.evaluation.options import Architecture, Options
from unitsphere.evaluation.protocols import PROTOCOLS
from unitsphere.evaluation.settings import checked
from unitsphere.runs.loading import ARCHITECTURE, load
from unitsphere.studies.judging import settings_of

DOCS = Path(__file__).parents[1] / "docs" / "evaluation.md"
RANDOM = {"backbone": "resnet-tiny", "image_size": 16, "device": "cpu"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_labelled(tmp_path_factory.mktemp("declared") / "data")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the file that the documentation shows."""
    (tmp_path / "mine.py").write_text(re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("words", [["evaluate", "--help"], ["embed", "--help"], ["evaluate", "x", "--protocol", "kn"]])
def test_help_and_mistakes_load_no_torch(words):
    code = (
        "import sys\nfrom unitsphere.cli import main\nmain(sys.argv[1:])\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "False False"


def test_every_setting_of_every_protocol_is_an_option_with_its_description():
    told = " ".join(command("evaluate", "--help").stdout.split())
    for protocol in PROTOCOLS.values():
        for name, field in protocol.settings.model_fields.items():
            assert f"--{name.replace('_', '-')} " in told
            assert field.description and field.description.replace(" ", "") in told.replace(" ", "")
        assert protocol.summary in told


def test_options_that_all_share_are_the_keywords_of_both_python_calls():
    apart = {"what", "protocol", "data", "seed", "verbose", "settings"}
    assert set(inspect.signature(unitsphere.evaluate).parameters) - apart == set(Options.model_fields)
    assert set(Options.model_fields) < set(inspect.signature(unitsphere.embed).parameters)
    assert list(Architecture.model_fields) == list(ARCHITECTURE)


def test_studies_take_the_settings_of_the_protocol():
    assert {"temperature", "k", "holdout", "seed", "epoch"} < set(settings_of("knn"))
    assert "lr" not in settings_of("knn") and {"recipe", "augment"} < set(settings_of("linear"))
    with pytest.raises(UsageError, match="Did you mean linear"):
        settings_of("liner")


@pytest.mark.parametrize(
    ("protocol", "given", "said"),
    [
        ("linear", {"recipe": "byl"}, r"recipe: 'byl' is not known\. Did you mean byol\?"),
        ("linear", {"epochs": 0}, r"epochs: given 0; it must be greater than or equal to 1"),
        ("linear", {"lr": []}, "lr: given .*; rates must be numbers greater than 0"),
        ("knn", {"k": "a,b"}, "k: given 'a'; it must be a valid integer"),
        ("knn", {"temperature": 0}, "temperature: given 0; it must be greater than 0"),
        ("semi", {"fraction": 1.5}, r"fraction: given 1\.5; it must be less than or equal to 1"),
        ("semi", {}, r"^semi: give one of --fraction SHARE .* and --labelled FILE\.$"),
        ("knn", {"features": "head"}, r"features: 'head' is not known\..* Allowed: backbone, embedding\."),
        ("knn", {"holdout": 1}, "holdout: given 1; it must be less than 1"),
    ],
)
def test_wrong_values_are_refused_before_the_backbone_is_loaded(protocol, given, said):
    with pytest.raises(UsageError, match=said):
        unitsphere.evaluate("nothing", protocol=protocol, data="nothing", **given)


def test_a_list_may_be_given_as_text_as_a_study_does(data):
    result = unitsphere.evaluate("pixels", protocol="knn", data=data, k="3,5", image_size=8, device="cpu")
    assert result["constants"]["k"] == [3, 5]


@pytest.mark.parametrize("rates", [0.5, [0.5], (0.5,), "0.5", np.array([0.5]), torch.tensor([0.5]), np.float32(0.5), 1])
def test_rates_may_be_given_in_every_form_that_python_has(rates):
    assert checked(PROTOCOLS["linear"].settings, {"lr": rates}).lr in ((0.5,), (1.0,))


def test_a_list_of_labelled_images_may_be_a_path(tmp_path):
    for path in (tmp_path / "few.txt", str(tmp_path / "few.txt")):
        assert checked(PROTOCOLS["semi"].settings, {"labelled": path}).labelled == tmp_path / "few.txt"


def test_as_is_another_spelling_of_recipe(data, capsys):
    words = ["evaluate", "pixels", "--image-size", "4", "--data", str(data), "--protocol", "linear", "--epochs", "1"]
    told = []
    for option in ("--as", "--recipe"):
        assert main([*words, option, "byol"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] and "learning rate of 0.8" in told[0]


def test_a_protocol_from_outside_has_options_checks_and_help(folder, data, capsys):
    words = ["evaluate", "pixels", "--image-size", "8", "--data", str(data), "--protocol", "mine:centroids"]
    assert main([*words, "--norm", "1"]) == 0
    assert "mine:centroids on" in (told := capsys.readouterr().out) and "top1     100.00 %" in told  # red or blue
    assert main([*words, "--norm", "0"]) == 2
    assert "norm: given 0.0; it must be greater than 0" in capsys.readouterr().err
    assert main([*words, "--k", "3"]) == 2
    assert "k: protocol mine:centroids does not take it; it takes norm." in capsys.readouterr().err
    assert main([*words, "--nrom", "1"]) == 2
    assert "--nrom: there is no such option. Did you mean --norm?" in capsys.readouterr().err
    assert main(["evaluate", "--protocol=mine:centroids", "--help"]) == 0
    assert "distances are measured in this norm (default: 2.0)" in " ".join(capsys.readouterr().out.split())
    assert main([*words[:-1], "mine:centroid"]) == 2
    assert "--protocol: mine has no 'centroid'. Did you mean centroids?" in capsys.readouterr().err


def test_a_protocol_from_outside_has_keywords_and_names_in_studies(folder, data):
    about = {"protocol": "mine:centroids", "data": data, "image_size": 8, "device": "cpu"}
    result = unitsphere.evaluate("pixels", norm=1, **about)
    assert result["constants"]["norm"] == 1 and result["value"] == {"top1": 100.0}
    assert "norm" in settings_of("mine:centroids")
    with pytest.raises(UsageError, match="Did you mean norm"):
        unitsphere.evaluate("pixels", nrm=1, **about)
    with pytest.raises(UsageError, match=r"mine:judge is of type function\. It must be .*Protocol"):
        unitsphere.evaluate("pixels", **about | {"protocol": "mine:judge"})


def test_quiet_shows_no_progress(data, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich a screen
    about = {"protocol": "linear", "epochs": 1, "image_size": 4, "device": "cpu", "data": data}
    unitsphere.evaluate("pixels", **about)
    assert "linear" in capsys.readouterr().err
    unitsphere.evaluate("pixels", verbose=False, **about)
    assert capsys.readouterr().err == ""
    words = ["evaluate", "pixels", "--image-size", "4", "--data", str(data), "--protocol", "knn", "--k", "3", "--quiet"]
    assert main(words) == 0 and "features" not in capsys.readouterr().err


def judged(protocol: str, data: Path, **settings: object) -> tuple[Judgement, np.ndarray, np.ndarray]:
    """What the protocol gives, and features and labels of the test images."""
    loaded = load("random", backbone="resnet-tiny", image_size=16)
    backbone = JudgedBackbone(loaded, torch.device("cpu"), "fp32", None, quiet, 0.01)
    images = LabelledImages(*open_parts(data))
    chosen = PROTOCOLS[protocol]
    found = chosen.run(backbone, images, checked(chosen.settings, settings))
    features, labels = backbone.frozen_features(backbone.open(images.test), "again")
    return found, features.numpy(), labels


@pytest.mark.parametrize(("protocol", "settings"), [("linear", {"lr": [0.1, 1.0], "epochs": 3}), ("svm", {})])
def test_the_layer_that_comes_with_a_judgement_gives_its_accuracy(protocol, settings, data):
    found, features, labels = judged(protocol, data, **settings)
    x = normalize(torch.from_numpy(features).double(), dim=1).numpy() if found.model.unit_length else features
    scores = x @ found.model.weight.numpy().T + found.model.bias.numpy()
    assert found.value["top1"] == pytest.approx(100 * np.mean(scores.argmax(1) == labels), abs=1e-4)
    assert found.model.classes == ("blue", "red") and found.model.weight.shape == (2, features.shape[1])


def test_the_network_that_comes_with_fine_tuning_gives_its_accuracy(data):
    found, _, labels = judged("semi", data, fraction=0.5, epochs=2)
    loaded = load("random", backbone="resnet-tiny", image_size=16)
    tuned = replace(loaded, backbone=found.model.backbone)
    backbone = JudgedBackbone(tuned, torch.device("cpu"), "fp32", None, quiet, 0.01)
    features = backbone.features(backbone.open(open_parts(data)[1]), "tuned")
    scores = found.model.classifier(features)
    assert found.value["top1"] == pytest.approx(100 * np.mean(scores.argmax(1).numpy() == labels), abs=1e-4)


def test_the_voters_that_come_with_neighbours_are_the_training_images(data):
    found, features, labels = judged("knn", data, k=1)
    bank, votes = normalize(found.model.bank, dim=1).numpy(), found.model.labels
    nearest = (features @ bank.T).argmax(1)
    assert found.value["k=1"] == pytest.approx(100 * np.mean(votes[nearest] == labels))
