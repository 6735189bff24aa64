"""The benchmark of speed: that it measures the same thing in every contender, and writes what it promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unitsphere.config.layers import Layer
from unitsphere.methods.build import build_learner
from unitsphere.methods.resolve import resolve
from unitsphere.optimisation.optimisers import build_optimizer
from unitsphere.training.step import PlainStep

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.measuring import Results, milliseconds  # noqa: E402
from benchmarks.peers.official import OfficialMoCo, OfficialStep  # noqa: E402


def test_official_style_code_and_unitsphere_take_the_same_steps():
    """Two independent programs, equal weights, queue and views: the losses agree while training moves them."""
    settings = {"method": "moco-v2", "data": "shapes", "batch_size": 16, "queue_size": 32, "bn_groups": 1}
    config = resolve(Layer("test", settings | {"image_size": 16, "lr": 0.05, "weight_decay": 0.01})).config
    ours, other = build_learner(config), build_learner(config)
    peer = OfficialMoCo(
        torch.nn.Sequential(other.online.backbone, other.online.head),
        other.queue.keys,
        momentum=config.key_momentum,
        temperature=config.temperature,
    )
    take = PlainStep(ours, build_optimizer(config, ours))
    take_official = OfficialStep(
        peer, lr=config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay, amp=False
    )
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(5):  # the queue wraps around after two
        views = [torch.randn(16, 3, 16, 16, generator=generator) for _ in range(2)]
        losses.append((take(views, None, config.learning_rate).loss.item(), take_official(views)))
    mine, theirs = zip(*losses, strict=True)
    assert mine == pytest.approx(theirs, rel=1e-4)  # float32: the sums run in another order
    assert max(mine) - min(mine) > 0.1
    torch.testing.assert_close(ours.queue.keys, peer.queue.T, rtol=1e-3, atol=1e-4)
    for key, slow in zip(peer.encoder_k.parameters(), ours.slow.parameters(), strict=True):
        torch.testing.assert_close(key, slow, rtol=1e-3, atol=1e-5)


def test_the_command_writes_the_promised_fields_and_the_first_losses_agree(tmp_path):
    file = tmp_path / "speed.json"
    only = ["resnet18/official", "resnet18/unitsphere plain, no BN groups"]
    words = ["--device", "cpu", "--tiny", "--json", str(file), "--only", *only]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.speed", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert {"date", "gpu", "torch", "unitsphere", "command", "seconds", "sections"} <= found.keys()
    assert list(found["sections"]) == ["step resnet18"]
    rows = found["sections"]["step resnet18"]["rows"]
    official, plain = rows["official-style float32"], rows["unitsphere plain, no BN groups"]
    assert official["times_the_first"] == 1.0
    assert plain["times_the_first"] == pytest.approx(
        plain["images_per_second"] / official["images_per_second"], abs=0.01
    )
    assert plain["images_per_second"] == pytest.approx(1e3 * 16 / plain["ms"], rel=1e-3)
    assert plain["first_losses"] == pytest.approx(official["first_losses"], rel=1e-4, abs=1e-4)
    assert f"{plain['images_per_second']:,} images/s" in done.stdout


def test_a_row_that_fails_is_told_and_the_others_are_measured(tmp_path, capsys):
    results = Results(tmp_path / "out.json", torch.device("cpu"))
    results.section("s", "what")
    results.add("s", "works", lambda: {"images_per_second": 10})
    results.add("s", "fails", lambda: {"images_per_second": 1 / 0})
    assert "fails" in json.loads(results.file.read_text())["sections"]["s"]["rows"]  # written before the next
    results.add("s", "works too", lambda: {"images_per_second": 25})
    rows = json.loads(results.file.read_text())["sections"]["s"]["rows"]
    assert rows["fails"] == {"error": "ZeroDivisionError: division by zero"}
    assert rows["works too"]["times_the_first"] == 2.5
    assert "division by zero" in capsys.readouterr().out


def test_only_the_rows_asked_for_are_measured(tmp_path):
    results = Results(tmp_path / "out.json", torch.device("cpu"), only=["b/two"])
    for section in "ab":
        results.section(section, "what")
        for name in ("one", "two"):
            results.add(section, name, lambda: {"ms": 1.0})
    sections = json.loads(results.file.read_text())["sections"]
    assert {name: list(section["rows"]) for name, section in sections.items()} == {"b": ["two"]}


def test_milliseconds_are_those_of_one_call():
    import time

    assert milliseconds(lambda: time.sleep(0.02), torch.device("cpu"), warm_up=1, rounds=3) == pytest.approx(
        20, rel=0.5
    )
