"""Policies and the tables drawn from them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms import RandomResizedCrop

from unitsphere.common.randomness import generator
from unitsphere.views.apply import crop_boxes
from unitsphere.views.draw import HUE, Table, draw
from unitsphere.views.policies import POLICIES, Policy

# Fixed seeds make every draw here the same each time. A p-value under 1e-4 is a one in ten thousand
# accident for a right rule and certain for a wrong one at these sample sizes.
SIGNIFICANCE = 1e-4


def columns(table: Table) -> dict[str, torch.Tensor]:
    return {f.name: getattr(table, f.name) for f in fields(table) if f.name != "policy"}


def boxes_of(policy: Policy, height: int, width: int, n: int, seed: int = 0) -> torch.Tensor:
    table = draw(policy, n, generator(seed, "views"))
    return crop_boxes(table, torch.full((n,), height), torch.full((n,), width))


@pytest.mark.parametrize("size", [(32, 32), (60, 80), (300, 70), (9, 14)])
def test_crops_follow_the_distribution_of_torchvision(size: tuple[int, int]) -> None:
    n = 3000
    found = boxes_of(POLICIES["moco-v2"], *size, n).numpy()
    picture = torch.empty(1, *size)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = np.array([RandomResizedCrop.get_params(picture, [0.2, 1.0], [3 / 4, 4 / 3]) for _ in range(n)])
    found, expected = (np.c_[b, b[:, 2] * b[:, 3], b[:, 3] / b[:, 2]] for b in (found, expected))
    for column in range(found.shape[1]):
        assert stats.ks_2samp(found[:, column], expected[:, column]).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("size", [(500, 20), (20, 500), (1, 1), (1, 3), (7, 1), (41, 43), (43, 41)])
def test_crops_that_never_fit_fall_back_to_the_centre_as_in_torchvision(size: tuple[int, int]) -> None:
    # Nothing fits: the whole area is asked for, in a ratio that neither the image nor torchvision's
    # fall-back can have.
    for ratio in ((3 / 4, 4 / 3), (0.5, 0.9), (1.1, 1.7)):
        table = draw(Policy(crop_scale=(1.0, 1.0), crop_ratio=ratio), 1, generator(0, "views"))
        table = replace(table, ratio=torch.full_like(table.ratio, 1e6))
        found = crop_boxes(table, torch.tensor([size[0]]), torch.tensor([size[1]]))[0]
        # With an area above 1 torchvision's proposals never fit either.
        expected = RandomResizedCrop.get_params(torch.empty(1, *size), [4.0, 4.0], list(ratio))
        assert found.tolist() == list(expected)


def test_the_first_proposal_that_fits_is_taken() -> None:
    table = draw(POLICIES["moco-v2"], 1, generator(0, "views"))
    area, ratio = torch.full_like(table.area, 1.0), torch.full_like(table.ratio, 4 / 3)
    area[0, 3], area[0, 5] = 0.25, 0.5
    table = replace(table, area=area, ratio=ratio, place=torch.tensor([[0.0, 0.999999]]).double())
    height, width = round(math.sqrt(2500 * 3 / 4)), round(math.sqrt(2500 * 4 / 3))
    found = crop_boxes(table, torch.tensor([100]), torch.tensor([100]))[0]
    assert found.tolist() == [0, 100 - width, height, width]


def test_boxes_lie_inside_the_image_and_reach_its_borders() -> None:
    for height, width in [(5, 5), (3, 17), (40, 31), (1, 1)]:
        top, left, h, w = boxes_of(POLICIES["moco-v2"], height, width, 4000).unbind(1)
        assert (top >= 0).all() and (left >= 0).all() and (h >= 1).all() and (w >= 1).all()
        assert (top + h <= height).all() and (left + w <= width).all()
        assert (top == 0).any() and (left + w == width).any()


def test_without_a_crop_the_whole_picture_is_kept() -> None:
    assert boxes_of(POLICIES["none"], 9, 300, 3).tolist() == [[0, 0, 9, 300]] * 3


def test_operations_happen_as_often_as_the_policy_says() -> None:
    n = 20000
    policy = Policy(jitter=0.8, grey=0.2, blur=0.5, solarise=0.1, flip=0.35)
    table = draw(policy, n, generator(1, "views"))
    for name in ("jitter", "grey", "blur", "solarise", "flip"):
        happened = int(getattr(table, name).sum())
        assert stats.binomtest(happened, n, getattr(policy, name)).pvalue > SIGNIFICANCE
    sure = draw(Policy(jitter=1.0, flip=0.0), n, generator(1, "views"))
    assert sure.jitter.all() and not sure.flip.any()


def test_factors_are_uniform_in_torchvision_s_ranges() -> None:
    policy = Policy(brightness=0.4, contrast=1.5, saturation=0.1, hue=0.2, blur_sigma=(0.3, 1.2))
    table = draw(policy, 20000, generator(2, "views"))
    ranges = [(0.6, 1.4), (0.0, 2.5), (0.9, 1.1), (-0.2, 0.2)]
    drawn = [*table.factors.double().unbind(1), table.sigma.double()]
    for values, (low, high) in zip(drawn, [*ranges, (0.3, 1.2)], strict=True):
        assert low - 1e-6 <= values.min() and values.max() <= high + 1e-6  # float32's own rounding
        assert stats.kstest(values.numpy(), stats.uniform(low, high - low).cdf).pvalue > SIGNIFICANCE


def test_all_orders_are_equally_likely() -> None:
    table = draw(Policy(), 24000, generator(3, "views"))
    counts = Counter(map(tuple, table.order.tolist()))
    assert len(counts) == 24 and all(sorted(order) == [0, 1, 2, 3] for order in counts)
    assert stats.chisquare(list(counts.values())).pvalue > SIGNIFICANCE


def test_a_draw_is_a_function_of_its_seed() -> None:
    first, again, other = (draw(POLICIES["moco-v2"], 9, generator(0, "views", step)) for step in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(*(columns(t).values() for t in (first, again)), strict=True))
    assert not torch.equal(first.area, other.area)


def test_boxes_of_a_slice_are_the_slice_of_the_boxes() -> None:
    table = draw(POLICIES["moco-v2"], 12, generator(4, "views"))
    heights, widths = torch.randint(1, 90, (2, 12), generator=generator(4, "sizes"))
    part = table.slice(4, 9)
    assert len(part) == 5 and part.policy == table.policy
    assert all(
        torch.equal(part_, whole[4:9])
        for part_, whole in zip(*(columns(t).values() for t in (part, table)), strict=True)
    )
    assert torch.equal(crop_boxes(part, heights[4:9], widths[4:9]), crop_boxes(table, heights, widths)[4:9])


def test_switching_one_operation_off_moves_no_other_draw() -> None:
    full, small = (draw(POLICIES[name], 50, generator(5, "views")) for name in ("moco-v2", "moco-v2-small"))
    different = {n for n, column in columns(full).items() if not torch.equal(column, columns(small)[n])}
    assert different == {"blur"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("crop_scale", (0.0, 1.0)),
        ("crop_scale", (0.5, 0.2)),
        ("crop_scale", (0.5, 1.1)),
        ("crop_scale", (0.5,)),
        ("crop_ratio", (-1.0, 1.0)),
        ("brightness", -0.1),
        ("contrast", float("nan")),
        ("saturation", float("inf")),
        ("hue", 0.6),
        ("jitter", 1.5),
        ("grey", -0.5),
        ("blur", 2),
        ("blur_sigma", (0.0, 1.0)),
        ("solarise", 1.01),
        ("solarise_threshold", 2.0),
        ("flip", float("nan")),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} is "):
        Policy(**{field: value})  # type: ignore[arg-type]


def test_named_policies_are_those_of_the_papers() -> None:
    lines = {name: policy.describe() for name, policy in POLICIES.items()}
    assert lines["moco-v1"] == "crop 0.2-1, grey p 0.2, jitter 0.4/0.4/0.4/0.4 p 1, flip p 0.5"
    assert lines["moco-v2"] == ("crop 0.2-1, jitter 0.4/0.4/0.4/0.1 p 0.8, grey p 0.2, blur 0.1-2 p 0.5, flip p 0.5")
    assert lines["moco-v2-small"] == "crop 0.2-1, jitter 0.4/0.4/0.4/0.1 p 0.8, grey p 0.2, flip p 0.5"
    assert lines["none"] == "whole picture"


def test_a_policy_survives_a_list_from_a_saved_configuration() -> None:
    assert Policy(crop_scale=[0.2, 1.0]) == Policy(crop_scale=(0.2, 1.0))  # type: ignore[arg-type]


def test_hue_of_zero_strength_draws_no_shift() -> None:
    assert (draw(Policy(jitter=1.0), 10, generator(0, "views")).factors[:, HUE] == 0).all()
