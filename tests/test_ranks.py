"""Two ranks give what one rank gives: losses, weights, statistics and memory after several steps, on real processes."""

import datetime

import pytest
import torch
from conftest import write_labelled
from torch import distributed as dist
from torch import multiprocessing

from unitsphere.common.distributed import (
    any_rank,
    average,
    averaging_gradients,
    gather,
    gather_with_gradient,
    mine,
    world,
)
from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.common.randomness import generator
from unitsphere.config.layers import Layer
from unitsphere.methods.build import build_learner
from unitsphere.methods.catalogue import find_method
from unitsphere.methods.learners.learner import Moment
from unitsphere.methods.resolve import resolve
from unitsphere.runs.run import Run
from unitsphere.training.online import OnlineKNN
from unitsphere.training.prepare import prepare

N, STEPS = 16, 3
SMALL = {
    "data": "shapes",
    "batch_size": N,
    "queue_size": 40,
    "image_size": 16,
    "dim": 16,
    "lr": 0.05,
    "warmup_epochs": 0,
}
MIXED = {"hardest": 8, "pairs": 4, "with_query": 3}
METHODS = {
    "moco, groups": {"method": "moco-v2", "bn_groups": 4},
    "moco, as many groups as ranks, symmetric": {"method": "moco-v2", "bn_groups": 2, "symmetric": True},
    "moco, one batch": {"method": "moco-v2", "bn_groups": 1},
    "eqco, drawn": {"method": "eqco", "negatives": 6, "alpha": 100, "bn_groups": 2},
    "eqco, drawn once": {"method": "eqco", "negatives": 6, "alpha": 100, "bn_groups": 2, "shared_draw": True},
    "simclr": {"method": "simclr"},
    "simclr, drawn": {"method": "simclr", "negatives": 5, "alpha": 30, "both_views": False},
    "simo": {"method": "simo"},
    "simo, drawn": {"method": "simo", "negatives": 5},
    "simo, shuffled": {"method": "simo", "bn_groups": 4},
    "jcl": {"method": "jcl", "keys": 3, "bn_groups": 2},
    "jcl, in chunks": {"method": "jcl", "keys": 3, "bn_groups": 4},
    "jcl, vanilla": {"method": "jcl-vanilla", "keys": 3, "bn_groups": 2},
    "mochi": {"method": "mochi", "hardest": 8, "pairs": 6, "with_query": 3, "mixing_warmup": 0, "bn_groups": 2},
    "mochi with eqco and jcl": {"method": "mochi+eqco+jcl", "mixing_warmup": 0, "bn_groups": 2, "keys": 2, **MIXED},
    "mochi in the batch": {"method": "simo", **MIXED},
    "oracle": {"method": "moco-v2", "oracle": True, "bn_groups": 2},
    "oracle, keys as a larger batch": {
        "method": "jcl-vanilla",
        "positives": "repeated",
        "keys": 3,
        "oracle": True,
        "bn_groups": 2,
    },
    "moco with all forces": {
        "method": "moco-v2",
        "bn_groups": 2,
        "singular_weight": 0.01,
        "brownian_weight": 0.1,
        "uniformity_weight": 0.1,
    },
    "oracle, mixed": {"method": "mochi", "oracle": True, "mixing_warmup": 0, "bn_groups": 2, **MIXED},
    "byol": {"method": "byol", "optimizer": "sgd"},
    "msbreg": {"method": "msbreg", "optimizer": "sgd", "view_count": 3},
    "supervised": {"method": "supervised", "class_count": 3},
}


def small_for(method):
    """The small settings that the method has."""
    known = find_method(method, None).Config.model_fields
    return {name: value for name, value in SMALL.items() if name in known}


def train(fields, device="cpu") -> dict[str, torch.Tensor]:
    """A few steps of this process's share of the batch. In float64: in float32 a sum in another order can grow a
    thousandfold in three steps on so small a batch."""
    config = resolve(Layer("test", small_for(fields["method"]) | fields)).config
    method = build_learner(config).to(device, torch.float64)
    forward = averaging_gradients(method)
    trained = [parameter for parameter in method.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=config.learning_rate, momentum=0.9)
    losses = []
    for number in range(STEPS):
        random = generator(0, "test", number)
        views = [mine(torch.randn(N, 3, 16, 16, generator=random)).to(device).double() for _ in range(method.views)]
        inputs = method.inputs(N, Moment(number, STEPS, number, STEPS), random)
        if method.labels:
            inputs["labels"] = mine(torch.randint(3, (N,), generator=random))
        step = forward(views, {name: tensor.to(device) for name, tensor in inputs.items()})
        optimizer.zero_grad()
        step.loss.backward()
        optimizer.step()
        method.finish(step)
        losses.append(gather(step.loss.detach()[None]).mean())
    average(buffer for name, buffer in method.named_buffers() if name.endswith(("_mean", "_var")))
    found = {**method.state_dict(), "losses": torch.stack(losses)}
    return {name: tensor.cpu() for name, tensor in found.items()}


def worker(rank, store, task, *arguments):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    result = task(*arguments)
    if rank == 0:
        torch.save(result, f"{store}.result")
    dist.destroy_process_group()


def on_two_ranks(tmp_path, task, *arguments):
    store = tmp_path / "store"
    multiprocessing.spawn(worker, (store, task, *arguments), nprocs=2)
    return torch.load(f"{store}.result")


def train_all(names, device):
    return {name: train(METHODS[name], device) for name in names}


# On one card the two share it, and what they say to each other goes through the host.
@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def two_ranks(request, tmp_path_factory):
    return request.param, on_two_ranks(tmp_path_factory.mktemp("ranks"), train_all, list(METHODS), request.param)


@pytest.mark.parametrize("name", METHODS)
def test_two_ranks_are_one(name, two_ranks):
    device, found = two_ranks
    one = train(METHODS[name], device)
    assert one.keys() == found[name].keys()
    for part, tensor in one.items():
        if part.startswith("slow") and part.endswith("num_batches_tracked"):
            continue  # how often keys were encoded, in more passes where a rank has more groups
        torch.testing.assert_close(found[name][part], tensor, rtol=1e-8, atol=1e-10, msg=lambda m, p=part: f"{p}: {m}")


def gathered_gradient():
    x = mine(torch.arange(8.0).view(4, 2)).requires_grad_()
    everything = gather_with_gradient(x)
    loss = (everything**2).sum() * (dist.get_rank() + 1)  # rank 0 once, rank 1 twice
    loss.backward()
    return {"gradient": gather(x.grad), "any": torch.tensor(any_rank(dist.get_rank() == 1, False))}


def test_a_gathered_tensor_gets_the_gradients_of_all_ranks(tmp_path):
    found = on_two_ranks(tmp_path, gathered_gradient)
    assert torch.equal(found["gradient"], 3 * 2 * torch.arange(8.0).view(4, 2))
    assert found["any"].tolist() == [True, False]


def knn_of(folder, data):
    fields = {**SMALL, "method": "moco-v2", "data": data, "device": "cpu", "bn_groups": 2, "normalise": "half"}
    prepared = prepare(Run(folder / "run"), Layer("test", fields | {"resident": False}), None, resume=False)
    prepared.settle_statistics(loader := prepared.loader(prepared.images))
    return OnlineKNN(prepared).measure(loader, build_learner(prepared.config))


def shared_knn(folder):
    return {name: torch.tensor(value) for name, value in knn_of(folder, "shapes=203x16").items()}


def test_ranks_share_the_features_of_online_knn(tmp_path):
    alone = shared_knn(tmp_path)["knn"]
    assert on_two_ranks(tmp_path, shared_knn, tmp_path)["knn"] == alone > 0


def starved_knn(folder):
    with pytest.raises(UnitsphereError, match="another process" if dist.get_rank() == 0 else "red"):
        knn_of(folder, str(folder / "labelled"))
    return {}


def test_a_rank_that_cannot_read_its_share_keeps_no_other_waiting(tmp_path):
    for image in (write_labelled(tmp_path / "labelled") / "red").iterdir():  # the second half of all
        image.write_bytes(b"no image")
    on_two_ranks(tmp_path, starved_knn, tmp_path)


def refused():
    with pytest.raises(UsageError, match="multiples of 2"):
        train({"method": "moco-v2", "batch_size": 18, "bn_groups": 3})
    return {}


def test_groups_that_no_number_of_ranks_can_hold_are_refused(tmp_path):
    on_two_ranks(tmp_path, refused)


def test_with_one_process_nothing_is_exchanged():
    x = torch.randn(3, 2)
    assert world() == 1 and gather(x) is x and gather_with_gradient(x) is x and mine(x).equal(x)
