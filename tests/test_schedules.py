"""Learning rates against closed forms and torch's own schedulers."""

import math

import pytest
import torch

from unitsphere.optimisation.schedules import learning_rate

COMMON = {"peak": 0.03, "epochs": 20, "steps_per_epoch": 7}


def rates(**options):
    return [learning_rate(step, **COMMON, **options) for step in range(20 * 7)]


def torch_rates(make, every):
    """The same from torch's scheduler, advanced each `every` steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.03)
    scheduler = make(optimizer)
    found = []
    for step in range(20 * 7):
        if step and step % every == 0:
            optimizer.step()
            scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_cosine_per_epoch_is_mocos():
    expected = [0.03 * 0.5 * (1 + math.cos(math.pi * (step // 7) / 20)) for step in range(140)]
    assert rates() == pytest.approx(expected, rel=1e-12)
    assert rates() == pytest.approx(
        torch_rates(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20), 7), rel=1e-9
    )


def test_cosine_per_step():
    scheduler = torch_rates(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 140), 1)
    assert rates(update="step") == pytest.approx(scheduler, rel=1e-9)


def test_step_drops_at_epochs_or_at_shares_of_the_run():
    expected = torch_rates(lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [12, 16]), 7)
    assert rates(schedule="step", drops=(12, 16)) == pytest.approx(expected, rel=1e-12)
    assert rates(schedule="step", drops=(0.6, 0.8)) == pytest.approx(expected, rel=1e-12)


def test_warmup_is_linear_to_the_peak_and_the_cosine_takes_the_rest():
    found = rates(update="step", warmup_epochs=5)
    assert found[:35] == pytest.approx([0.03 * (step + 1) / 35 for step in range(35)], rel=1e-12)
    assert found[35:] == pytest.approx([0.03 * 0.5 * (1 + math.cos(math.pi * s / 105)) for s in range(105)], rel=1e-12)


def test_constant_is_constant():
    assert set(rates(schedule="constant")) == {0.03}


@pytest.mark.parametrize("epochs", [0.001, 0.1, 0.5, 1.5, 3.3])
def test_a_warmup_of_part_of_an_epoch_never_passes_the_peak(epochs):
    found = rates(update="step", warmup_epochs=epochs)
    assert max(found) <= 0.03 + 1e-15
    whole = math.ceil(epochs * 7)
    assert found[:whole] == pytest.approx(
        [0.03 * min(1, (step + 1) / (7 * epochs)) for step in range(whole)], rel=1e-12
    )


def test_a_warmup_that_multiplies_is_simos():
    """From a thousandth, times a cosine that begins with the run."""
    cosine = torch_rates(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 140), 1)
    factors = [min(1.0, 1e-3 + (1 - 1e-3) * step / 35) for step in range(140)]
    expected = [factor * rate for factor, rate in zip(factors, cosine, strict=True)]
    assert rates(update="step", warmup_epochs=5, warmup_kind="times") == pytest.approx(expected, rel=1e-9)
    assert rates(update="step", warmup_kind="times") == rates(update="step")
