"""A method from outside the package has all that the named ones have; examples/vicreg.py is one."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_ranks import on_two_ranks

import unitsphere
from unitsphere.cli import main
from unitsphere.common.distributed import averaging_gradients
from unitsphere.common.distributed import mine as my_part
from unitsphere.common.errors import UsageError
from unitsphere.common.outside import load_named
from unitsphere.common.randomness import generator
from unitsphere.config.layers import Layer
from unitsphere.methods.build import build_learner
from unitsphere.methods.resolve import resolve
from unitsphere.runs.run import Run

EXAMPLE = Path(__file__).parents[1] / "examples" / "vicreg.py"
NAME = "mine:VICReg"
SMALL = {
    "data": "shapes=80x16", "image_size": 16, "batch_size": 16, "epochs": 2, "expander": 32, "device": "cpu",
    "tensorboard": False, "warmup_epochs": 0, "precision": "fp32",
}  # fmt: skip


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The example, copied as mine.py into the working folder."""
    shutil.copy(EXAMPLE, tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("mine", None)
    yield tmp_path
    sys.modules.pop("mine", None)


def as_words(fields):
    return [word for name, value in fields.items() for word in (f"--{name.replace('_', '-')}", str(value).lower())]


def test_the_example_is_short_and_stands_alone():
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 100
    assert "examples" not in text


def test_help_lists_its_fields_and_a_dry_run_its_settings(mine, capsys):
    assert main(["pretrain", NAME, "--help"]) == 0
    told = capsys.readouterr().out
    assert "--expander N" in told and "VICReg:" in told and "--queue-size" not in told
    assert main(["pretrain", NAME, "--out", "run", "--dry-run", *as_words(SMALL)]) == 0
    told = capsys.readouterr().out
    assert "expander" in told and f"method {NAME}" in told and "memory: about" in told
    assert not Path("run").exists()


def test_the_command_trains_it_and_a_run_is_used_without_it(mine, capsys):
    assert main(["pretrain", NAME, "--out", "run", "--quiet", *as_words(SMALL)]) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert {"loss", "invariance", "deviation", "covariance", "effective_rank"} <= lines[-1].keys()
    assert lines[-1]["loss"] == pytest.approx(
        25 * lines[-1]["invariance"] + 25 * lines[-1]["deviation"] + lines[-1]["covariance"], rel=1e-5
    )
    (mine / "mine.py").unlink()
    sys.modules.pop("mine")
    capsys.readouterr()
    assert main(["evaluate", "run", "--protocol", "knn", "--k", "5", "--data", "shapes=80x16", "--device", "cpu"]) == 0
    assert main(["embed", "run", "--data", "shapes=80x16", "--out", "features.npz", "--device", "cpu"]) == 0
    assert unitsphere.load_transform("run").size == 16 and "mine" not in sys.modules
    assert main(["evaluate", "run", "--protocol", "knn", "--features", "embedding", "--data", "shapes=80x16"]) == 2
    assert "no head that can be built again" in capsys.readouterr().err


def test_a_run_of_it_goes_on_exactly_when_it_is_named_again(mine):
    whole = unitsphere.pretrain(NAME, out="whole", **SMALL)

    def stop(record):
        if record["step"] == 3:
            raise unitsphere.StopTraining

    with pytest.raises(unitsphere.UnitsphereError, match="--resume"):
        unitsphere.pretrain(NAME, out="run", on_step=stop, **SMALL)
    with pytest.raises(UsageError, match=f"--method {NAME}"):
        unitsphere.pretrain(out="run", resume=True)
    unitsphere.pretrain(NAME, out="run", resume=True)
    ours, theirs = (Run(Path(name)).latest()[0] for name in ("run", "whole"))
    assert ours.keys() == theirs.keys() and whole.path == Path("whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_its_fields_are_checked_as_all_others(mine):
    for fields, told in (
        ({"expander": 0}, "expander: given 0"),
        ({"expandr": 8}, "Did you mean expander"),
        ({"queue_size": 8}, "queue_size"),
        ({"accumulate": 2}, "accumulate: the covariance"),
    ):
        with pytest.raises(UsageError, match=told):
            unitsphere.pretrain(NAME, out="run", **(SMALL | fields))
    for name in ("mine:Nothing", "nowhere:VICReg", "mine:VICRegConfig", "mine:vicreg_terms"):
        with pytest.raises(UsageError, match="method: "):
            unitsphere.pretrain(name, out="run", **SMALL)


def test_its_terms_are_the_papers(mine):
    """Equations 1, 4 and 5, written with numpy's own variance and covariance in float64."""
    example = load_named("method", "mine:vicreg_terms", "unitsphere.methods")
    first, second = (np.random.default_rng(seed).normal(size=(12, 5)) * [0.3, 1, 2, 0.1, 1.5] for seed in (0, 1))
    invariance, deviation, covariance = example(torch.from_numpy(first), torch.from_numpy(second))
    assert float(invariance) == pytest.approx(((first - second) ** 2).mean())
    hinges = [np.maximum(0, 1 - np.sqrt(z.var(axis=0, ddof=1) + 1e-4)).mean() for z in (first, second)]
    assert float(deviation) == pytest.approx(sum(hinges) / 2)
    matrices = [np.cov(z.T) for z in (first, second)]
    off = [(c**2).sum() - (np.diag(c) ** 2).sum() for c in matrices]
    assert float(covariance) == pytest.approx(sum(off) / 5)


def steps_of_it(folder):
    """Three steps of this process's share of a batch, in float64."""
    os.chdir(folder)
    resolved = resolve(Layer("test", {"method": NAME, **SMALL}))
    learner = build_learner(resolved.config, method=resolved.method).double()
    forward = averaging_gradients(learner)
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.03, momentum=0.9)
    for number in range(3):
        random = generator(0, "test", number)
        views = [my_part(torch.randn(16, 3, 16, 16, generator=random)).double() for _ in range(2)]
        optimizer.zero_grad()
        forward(views).loss.backward()
        optimizer.step()
    return {name: tensor for name, tensor in learner.state_dict().items() if "running" not in name}


def test_two_ranks_are_one(mine):
    two, one = on_two_ranks(mine, steps_of_it, mine), steps_of_it(mine)
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-8, atol=1e-10)


def test_an_entry_point_of_an_installed_package_is_found_by_its_name(mine, monkeypatch):
    info = mine / "site" / "mylab-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mylab\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[unitsphere.methods]\nvicreg = mylab_vicreg:VICReg\n")
    shutil.copy(EXAMPLE, mine / "site" / "mylab_vicreg.py")
    monkeypatch.syspath_prepend(mine / "site")
    assert main(["pretrain", "vicreg", "--out", "run", "--quiet", *as_words(SMALL | {"epochs": 1})]) == 0
    run = unitsphere.pretrain(out="run", resume=True, epochs=2)  # installed: it need not be named again
    assert len(run.checkpoints()) == 2
    sys.modules.pop("mylab_vicreg")


def test_a_source_from_outside_gives_images(mine):
    (mine / "pictures.py").write_text(
        "import numpy as np\n"
        "def noise(text):\n"
        "    size = int(text or 24)\n"
        "    draw = np.random.default_rng(0).integers\n"
        "    return {'train': draw(0, 255, (40, size, size, 3), dtype=np.uint8),\n"
        "            'val': draw(0, 255, (10, size, size, 3), dtype=np.uint8)}\n"
    )
    fields = {name: value for name, value in SMALL.items() if name != "expander"}
    fields |= {"data": "pictures:noise=20", "epochs": 1, "queue_size": 32, "backbone": "resnet-tiny"}
    run = unitsphere.pretrain("moco-v2", out="run", **fields)
    assert json.loads((run.path / "results.json").read_text())[0]["images"] == {"held out": 10}
    with pytest.raises(UsageError, match="--data pictures:noise=20"):
        unitsphere.pretrain(out="run", resume=True, epochs=2)
    assert unitsphere.pretrain(out="run", resume=True, epochs=2, data="pictures:noise=20").checkpoints()
    sys.modules.pop("pictures")
