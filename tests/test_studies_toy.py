"""EqCo's Table 5, its numbers against closed forms and plain networks, and the command of studies."""

import json
import math

import pytest
import torch
from conftest import command, table_of
from torch import nn

from unitsphere.cli import main
from unitsphere.common.errors import UnitsphereError
from unitsphere.common.randomness import generator
from unitsphere.objectives import info_nce
from unitsphere.studies import STUDIES, find
from unitsphere.studies.critics import Encoders, batch_losses, bound, correlation, estimate
from unitsphere.studies.pair_settings import PairSettings
from unitsphere.studies.run import run_study

CPU = torch.device("cpu")
TINY = {"dimensions": 3, "hidden": 8, "embedding": 5, "steps": 30, "evaluations": 20}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


# The formula


def optimal_embeddings(mutual_information, k, batches):
    """Gaussian pairs, embedded so that the score is log p(y|x)/p(y) up to a constant: the best critic there is."""
    rho = correlation(mutual_information, 20)
    x, noise = torch.randn(2, batches, k, 20, generator=generator(0, "test"), dtype=torch.float64)
    y = rho * x + math.sqrt(1 - rho**2) * noise
    norm = [-(rho**2) * v.square().sum(2, keepdim=True) / (2 * (1 - rho**2)) for v in (x, y)]
    one = torch.ones_like(norm[0])
    return torch.cat([rho / (1 - rho**2) * x, norm[0], one], 2), torch.cat([y, one, norm[1]], 2)


def test_the_optimal_critic_gives_the_known_bound_of_a_gaussian_pair():
    query, keys = optimal_embeddings(2.0, k=64, batches=2000)
    plain = float(batch_losses(query, keys, None).mean())
    # 128,000 queries whose losses deviate by about 1: a standard error of 0.003
    assert bound(plain, 64, None) == pytest.approx(1.813, abs=0.01)
    at_63 = float(batch_losses(query, keys, 63.0).mean())
    assert bound(at_63, 64, 63.0) == pytest.approx(bound(plain, 64, None), abs=1e-12)
    # With K - 1 < alpha it is no bound any more: it lies above the 2 nats that there are.
    beyond = bound(float(batch_losses(query, keys, 512.0).mean()), 64, 512.0)
    assert beyond == pytest.approx(2.075, abs=0.012) and beyond > 2.04


@pytest.mark.parametrize("alpha", [None, 512.0])
def test_the_batched_loss_is_info_nce_with_the_other_pairs_as_negatives(alpha):
    query, keys = torch.randn(2, 3, 6, 4, generator=generator(1, "test"), dtype=torch.float64)
    for cell in range(3):
        others = torch.stack([torch.cat([keys[cell, :i], keys[cell, i + 1 :]]) for i in range(6)])
        expected = info_nce(query[cell], keys[cell], others, temperature=1.0, alpha=alpha)
        assert float(batch_losses(query, keys, alpha)[cell]) == pytest.approx(float(expected), abs=1e-12)


def test_the_correlation_has_the_mutual_information_it_was_asked_for():
    for mutual_information in (0.01, 2.0, 10.0):
        rho = correlation(mutual_information, 20)
        assert -10 * math.log(1 - rho**2) == pytest.approx(mutual_information, rel=1e-9)


# The training


def trained_alone(cell: PairSettings) -> float:
    """The same recipe with plain modules, one cell, one query at a time."""
    draw = generator(cell.seed, "critics")
    networks = []
    for stacked in [Encoders(1, (cell.dimensions, cell.hidden, cell.embedding), draw) for _ in range(2)]:
        plain = nn.Sequential(
            nn.Linear(cell.dimensions, cell.hidden), nn.ReLU(), nn.Linear(cell.hidden, cell.embedding)
        )
        state = zip(plain.state_dict(), [p[0] for p in stacked.state_dict().values()], strict=True)
        plain.load_state_dict(dict(state))
        networks.append(plain)
    of_x, of_y = networks
    rho = correlation(cell.mutual_information, cell.dimensions)

    def loss(purpose, step):
        x, noise = torch.randn(2, cell.k, cell.dimensions, generator=generator(cell.seed, purpose, cell.k, step))
        query, keys = of_x(x), of_y(rho * x + math.sqrt(1 - rho**2) * noise)
        others = torch.stack([torch.cat([keys[:i], keys[i + 1 :]]) for i in range(cell.k)])
        return info_nce(query, keys, others, temperature=1.0, alpha=cell.alpha)

    optimizer = torch.optim.Adam([*of_x.parameters(), *of_y.parameters()], lr=cell.lr, foreach=False)
    for step in range(cell.steps):
        optimizer.zero_grad()
        loss("pairs to train on", step).backward()
        optimizer.step()
    with torch.no_grad():
        mean = sum(float(loss("pairs to judge on", step)) for step in range(cell.evaluations)) / cell.evaluations
    return math.log(cell.k if cell.alpha is None else 1 + cell.alpha) - mean


@pytest.mark.parametrize("alpha", [None, 512.0])
def test_training_cells_together_equals_training_each_alone(alpha):
    cells = [PairSettings(mutual_information=mi, k=6, alpha=alpha, lr=0.01, **TINY) for mi in (0.5, 3.0)]
    together = estimate(cells, CPU, lambda done: None)
    # float32 products summed in another order, carried through 30 steps
    assert together == pytest.approx([trained_alone(cell) for cell in cells], abs=1e-4)
    assert estimate(cells[1:], CPU, lambda done: None)[0] == pytest.approx(together[1], abs=1e-4)
    assert together[1] - estimate([cells[1].model_copy(update={"steps": 1})], CPU, print)[0] > 0.1  # and it learns


def test_a_seed_decides_everything():
    def once(seed):
        return estimate([PairSettings(mutual_information=2.0, k=6, seed=seed, **TINY)], CPU, lambda done: None)

    assert once(0) == once(0) != once(1)


def test_critics_that_diverge_are_said_to():
    with pytest.raises(UnitsphereError, match="diverged"):
        estimate([PairSettings(mutual_information=2.0, k=6, lr=1e30, **TINY)], CPU, lambda done: None)


@pytest.mark.gpu
def test_a_card_gives_the_same_numbers():
    cells = [PairSettings(mutual_information=mi, k=64, alpha=512.0, steps=50, evaluations=20) for mi in (2.0, 6.0)]
    on_card = estimate(cells, torch.device("cuda"), lambda done: None)
    # float32 products summed in another order, carried through 50 steps
    assert on_card == pytest.approx(estimate(cells, CPU, lambda done: None), abs=1e-3)


# Table 5 and the command


def test_the_claims_of_table_5_hold_for_the_papers_own_numbers_where_they_are_exact():
    study = find("eqco/table-5")
    assert len(study.cells) == 40
    papers = table_of(study.cells, [cell.paper for cell in study.cells])
    verdicts = [claim.judge(papers)["verdict"] for claim in study.claims]
    # Rounded to one decimal, 1.9 at K = 256 does not rise to 1.9 at K = 512.
    assert verdicts == ["seen once", "not seen", "seen once", "seen once"]
    moved = table_of(study.cells, [cell.paper + 0.2 * (cell.at["k"] == 64) for cell in study.cells])
    assert [claim.judge(moved)["verdict"] for claim in study.claims][0::2] == ["not seen", "not seen"]


def test_the_command_runs_a_part_of_table_5_and_goes_on(tmp_path, capsys):
    quick = "--only k=64 --only mutual_information=2,10 --set steps=4 --set evaluations=2 --device cpu".split()
    done = command("study", "run", "eqco/table-5", "--out", tmp_path, *quick)
    assert done.returncode == 0, done.stderr
    assert "4/4" in done.stderr and "not measured" in done.stdout and "EqCo" in done.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    measured = [cell for cell in results["cells"] if cell["value"] is not None]
    assert len(results["cells"]) == 40 and len(measured) == 4
    assert {"settings", "value", "paper"} <= measured[0].keys() and measured[0]["settings"]["steps"] == 4
    assert all({"statement", "verdict", "evidence"} == claim.keys() for claim in results["claims"])
    assert f"results.json and {tmp_path / 'results.png'}" in done.stdout
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    assert main(["study", "run", "eqco/table-5", "--out", str(tmp_path), *quick]) == 0
    again = capsys.readouterr()
    assert "4 of 4 cells are finished already" in again.err and again.out == done.stdout


def test_of_a_part_of_a_study_the_command_prints_what_there_is_and_counts_the_rest(tmp_path, capsys):
    quick = "--only mutual_information=2 --set steps=2 --set evaluations=2 --device cpu".split()
    assert main(["study", "run", "eqco/table-5", "--out", str(tmp_path), *quick, "--only", "k=64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[:2] for line in lines if line.split()[1:2] in (["InfoNCE"], ["EqCo"])]
    assert rows == [["2", "InfoNCE"], ["2", "EqCo"]]
    assert "8 of 10 rows are left out: nothing of them is computed yet" in lines
    assert [line for line in lines if "measured" in line] == [
        "not measured: 4 of 4 claims, for want of cells (results.json says which)"
    ]
    claims = json.loads((tmp_path / "results.json").read_text())["claims"]
    assert [claim["verdict"] for claim in claims] == ["not measured"] * 4 and "k 128" in claims[0]["evidence"]


def test_the_command_lists_and_shows_studies():
    listed = command("study", "list")
    assert listed.returncode == 0 and all(id in listed.stdout for id in STUDIES) and "arXiv 2010.01929" in listed.stdout
    shown = command("study", "show", "eqco/table-5")
    assert shown.returncode == 0
    row = next(line for line in shown.stdout.splitlines() if line.split()[:2] == ["4", "EqCo"])
    assert row.split()[2:] == ["3.8", "3.7", "3.6", "3.6"] and "rises with K" in shown.stdout
    with_deviations = command("study", "show", "mochi/table-1a")
    assert with_deviations.returncode == 0 and "79.0 ± 0.4" in with_deviations.stdout


@pytest.mark.parametrize(
    "words, said",
    [
        (["show", "eqco/tabel-5"], "Did you mean eqco/table-5?"),
        (["run", "eqco/table-5", "--set", "step=3"], "Did you mean steps?"),
        (["run", "eqco/table-5", "--set", "steps=many"], "steps: given 'many'"),
        (["run", "eqco/table-5", "--set", "steps"], "NAME=VALUE"),
        (["run", "eqco/table-5", "--only", "kk=3"], "Did you mean k?"),
        (["run", "eqco/table-5", "--part", "5/4"], "I/N"),
        (["run", "eqco/table-5", "--device", "gpu"], "Allowed: auto, cpu, cuda"),
    ],
)
def test_a_mistake_is_refused_with_what_to_do(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["study", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_all_claims_of_table_5_hold(tmp_path):
    results = run_study(find("eqco/table-5"), tmp_path)
    assert [claim["verdict"] for claim in results["claims"]] == ["seen once"] * 4, results["claims"]
