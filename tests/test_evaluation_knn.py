from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.features.knn import knn, neighbours


def clusters(n: int, classes: int = 7, dim: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Overlapping classes, so that the vote and its weights decide."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(classes, (n,), generator=generator)
    return centres[labels] + 1.7 * torch.randn(n, dim, generator=generator), labels


@pytest.mark.parametrize("temperature", [0.07, 0.1, 1.0])
def test_accuracy_is_that_of_scikit_learn_for_every_k(temperature: float) -> None:
    bank, bank_labels = clusters(400)
    queries, query_labels = clusters(300, seed=1)
    ours = knn(bank, bank_labels, queries, query_labels, k=(1, 5, 20, 200, 400), temperature=temperature)
    for k, accuracy in ours.items():
        oracle = KNeighborsClassifier(
            k,
            weights=lambda distance: np.exp((1 - distance) / temperature),
            algorithm="brute",
            metric="cosine",
        ).fit(bank.double().numpy(), bank_labels.numpy())
        expected = 100 * oracle.score(queries.double().numpy(), query_labels.numpy())
        assert accuracy == pytest.approx(expected, abs=1e-9), k
    assert len(set(ours.values())) >= 3  # the cases differ, so agreement means something


@pytest.mark.parametrize("chunk", [(1, 13), (7, 1), (64, 99), (101, 103), (1000, 1000)])
def test_chunks_do_not_change_the_neighbours(chunk: tuple[int, int]) -> None:
    bank, bank_labels = clusters(103)
    queries, query_labels = clusters(101, seed=1)
    cosine = torch.nn.functional.cosine_similarity(queries[:, None].double(), bank.double(), dim=2)
    expected_scores, expected = cosine.topk(9)
    scores, indices = neighbours(bank, queries, 9, chunk=chunk)
    assert torch.equal(indices, expected)
    assert torch.allclose(scores.double(), expected_scores, atol=1e-6)  # float32 against float64
    whole = knn(bank, bank_labels, queries, query_labels, k=(3, 50))
    assert knn(bank, bank_labels, queries, query_labels, k=(3, 50), chunk=chunk) == whole


def test_queries_that_are_not_all_held_at_once_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, queries = clusters(103)[0], clusters(101, seed=1)[0]
    chosen = torch.arange(101)
    whole = neighbours(bank, queries, 9, exclude=chosen)
    monkeypatch.setattr("unitsphere.features.knn.BLOCKS_HELD", 2)
    parts = neighbours(bank, queries, 9, exclude=chosen, chunk=(7, 20))
    assert torch.equal(parts[1], whole[1])
    assert torch.allclose(parts[0], whole[0], atol=1e-6)  # sums of a block in another order


def test_a_bank_may_be_a_file_or_half_as_precise(tmp_path: Path) -> None:
    bank, labels = clusters(103)
    queries, truth = clusters(101, seed=1)
    halves = (5000 * bank).half()  # float16 could not hold the sum of a row, which does not matter
    assert halves.isfinite().all() and halves.sum(1).isinf().any()
    expected = knn(halves.float(), labels, queries, truth, k=(3, 50))
    np.save(tmp_path / "bank.npy", halves.numpy())
    file = np.load(tmp_path / "bank.npy", mmap_mode="r")
    for half in (halves, file):
        assert knn(half, labels, queries, truth, k=(3, 50), chunk=(30, 40)) == expected
    coarse = knn(bank.bfloat16(), labels, queries, truth, k=(3, 50))
    assert coarse == knn(bank.bfloat16().float(), labels, queries, truth, k=(3, 50))


@pytest.mark.parametrize("chunk", [(5, 3), (100, 100)])
def test_an_excluded_image_is_not_found_even_among_its_duplicates(chunk: tuple[int, int]) -> None:
    bank = clusters(20)[0].repeat(2, 1)  # image i has the twin i + 20
    chosen = torch.tensor([3, 38, 0, 17, 25, 11])
    scores, indices = neighbours(bank, bank[chosen], 39, exclude=chosen, chunk=chunk)
    assert torch.equal(indices[:, 0], (chosen + 20) % 40)
    assert (indices != chosen[:, None]).all()
    assert all(len(set(row)) == 39 for row in indices.tolist())
    assert scores.isfinite().all()


def test_no_tensor_of_all_queries_by_all_of_the_bank_is_made() -> None:
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                largest = max(largest, tensor.numel() if isinstance(tensor, Tensor) else 0)
            return out

    bank, bank_labels = clusters(1000, dim=4)
    queries, query_labels = clusters(700, dim=4, seed=1)
    with Watch():
        knn(bank, bank_labels, queries, query_labels, k=(5,), chunk=(100, 200))
    assert largest <= 100 * 200


def test_a_k_larger_than_the_bank_is_refused_with_the_largest_allowed() -> None:
    bank, labels = clusters(50)
    with pytest.raises(UsageError, match=r"200 was given.* 1 to 50 "):
        knn(bank, labels, bank, labels, k=(20, 200))
    with pytest.raises(UsageError, match="1 to 49"):
        neighbours(bank, bank, 50, exclude=torch.arange(50))
    with pytest.raises(UsageError, match=r"\(0, 5\) was given"):
        knn(bank, labels, bank, labels, k=(0, 5))


def test_classes_are_those_of_the_bank() -> None:
    bank, queries = torch.eye(4), torch.eye(4)[[0, 1, 2]]
    assert knn(bank, np.array([0, 1, 2, 6]), queries, np.array([0, 1, 2]), k=(1,)) == {1: 100.0}
    two_of_three = knn(bank, np.array([0, 1, 2, 2]), queries, np.array([0, 1, 9]), k=(1,))
    assert two_of_three[1] == pytest.approx(200 / 3)  # class 9 is unknown to the bank: wrong, not an error


def test_equal_votes_go_to_the_lower_class() -> None:
    bank = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    query = torch.tensor([[1.0, 0.0]])
    assert knn(bank, torch.tensor([3, 1]), query, torch.tensor([1]), k=(2,)) == {2: 100.0}


def test_a_low_temperature_neither_overflows_nor_loses_the_nearest() -> None:
    bank, labels = clusters(60)
    assert knn(bank, labels, bank, labels, k=(50,), temperature=1e-3) == {50: 100.0}


def test_what_cannot_be_judged_is_said() -> None:
    bank, labels = clusters(10)
    with pytest.raises(UsageError, match="training images have none"):
        knn(bank, None, bank, labels, k=(1,))
    with pytest.raises(UsageError, match="2 of 10 of the test images"):
        knn(bank, labels, bank, labels.clone().index_fill_(0, torch.tensor([1, 2]), -1), k=(1,))
    with pytest.raises(UsageError, match="temperature: 0"):
        knn(bank, labels, bank, labels, k=(1,), temperature=0)
    broken = bank.clone()
    broken[3] = torch.nan
    for some in (broken, broken.numpy(), broken.half()):
        with pytest.raises(UnitsphereError, match="1 of 10 of the training images"):
            knn(some, labels, bank, labels, k=(1,), chunk=(3, 3))
    with pytest.raises(UnitsphereError, match="1 of 10 of the test images"):
        knn(bank, labels, broken, labels, k=(1,))
    with pytest.raises(UnitsphereError, match="diverged"):
        knn(broken * torch.nan, labels, bank, labels, k=(1,))
