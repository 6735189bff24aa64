"""What docs/methods-of-your-own.md shows is what runs: a loss that plugs into the contrastive family, and VICReg."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import unitsphere
from unitsphere.common.outside import load_named
from unitsphere.config.layers import Layer
from unitsphere.methods.build import build_learner
from unitsphere.methods.learners.learner import Moment
from unitsphere.methods.resolve import resolve

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/methods-of-your-own.md").read_text(), re.M | re.S)
SMALL = {
    "data": "shapes=64x16", "image_size": 16, "batch_size": 16, "epochs": 1, "device": "cpu", "tensorboard": False,
    "warmup_epochs": 0, "precision": "fp32", "dim": 16,
}  # fmt: skip


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The first example of the page, written as mine.py into the working folder."""
    (tmp_path / "mine.py").write_text(BLOCKS[0])
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("mine", None)
    yield tmp_path
    sys.modules.pop("mine", None)


def test_a_loss_of_the_family_takes_at_most_twenty_lines():
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 20


def test_all_other_examples_are_passages_of_vicreg():
    text = (ROOT / "examples/vicreg.py").read_text()
    assert len(BLOCKS) == 4 and all(block in text for block in BLOCKS[1:])


@pytest.mark.parametrize("fields", [{}, {"alpha": 4096.0}, {"both_views": False}])
def test_the_loss_is_the_papers(mine, fields):
    """Equation 6 of Yeh et al. (2022), term by term in float64; with alpha its negatives weigh as alpha."""
    resolved = resolve(Layer("test", {"method": "mine:DCL", **SMALL, **fields}))
    learner = build_learner(resolved.config, method=resolved.method)
    views = [torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    inputs = learner.inputs(16, Moment(0, 4, 0, 1), torch.Generator().manual_seed(2))
    step = learner(views, inputs)
    first, second = (part.double() for part in learner.online(torch.cat(views)).detach().chunk(2))
    torch.testing.assert_close(first.norm(dim=1), torch.ones(16, dtype=torch.float64))
    expected = []
    for queries, keys in ((first, second), (second, first)):
        for i in range(16):
            others = [keys[j] for j in range(16) if j != i]
            if fields.get("both_views", True):
                others += [queries[j] for j in range(16) if j != i]
            total = sum(torch.exp(queries[i] @ other / resolved.config.temperature) for other in others)
            weight = fields.get("alpha", len(others)) / len(others)
            expected.append(torch.log(weight * total) - queries[i] @ keys[i] / resolved.config.temperature)
    assert step.health["loss"].item() == pytest.approx(float(torch.stack(expected).mean()), rel=1e-5)
    assert step.loss.item() == pytest.approx(2 * float(torch.stack(expected).mean()), rel=1e-5)
    step.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in learner.online.parameters())


def test_it_trains_with_the_familys_parts_and_is_judged_without_its_file(mine):
    unitsphere.pretrain("mine:DCL", out="dcl", verbose=False, **SMALL)
    queue = {"key_encoder": "slow", "negatives_from": "queue", "both_views": False, "queue_size": 32}
    unitsphere.pretrain("mine:DCL", out="mixed", verbose=False, **SMALL, **queue, hardest=8, pairs=4)
    (mine / "mine.py").unlink()
    sys.modules.pop("mine")
    result = unitsphere.evaluate("dcl", protocol="knn", data="shapes=64x16", k=[5], features="embedding", verbose=False)
    assert 0 <= result["value"]["k=5"] <= 100 and "mine" not in sys.modules


def test_infonce_is_never_below_it(mine):
    """Its denominator has one term fewer."""
    objective = load_named("method", "mine:DCLLearner", "unitsphere.methods").objective
    query, key, negatives = (F.normalize(torch.randn(n, 8), dim=1) for n in (5, 5, 40))
    how = {"temperature": 0.2, "alpha": None, "alpha_on": "all", "extra_scores": None, "mask": None}
    decoupled = objective(None, query, key[:, None], negatives, **how)
    assert decoupled < unitsphere.objectives.info_nce(query, key, negatives, temperature=0.2)
