"""What a run has learned, said at its end without any label; and with labels along the way, if asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from antipode.data.loader import Loader
from antipode.errors import UsageError
from antipode.evaluation.embedding import neighbour_sheet
from antipode.evaluation.inputs import usable_rows
from antipode.evaluation.knn import knn, neighbours
from antipode.methods.contrastive import MoCo
from antipode.objectives.geometry import alignment, effective_rank, uniformity
from antipode.training.make_views import MakeViews
from antipode.training.prepare import Prepared
from antipode.training.run import Run

HELD_OUT_IMAGES = 2000
BANK_IMAGES = 20_000
ONLINE_K = 20


def evenly(count: int, limit: int) -> Tensor:
    """Up to `limit` indices, evenly spaced over `count` images."""
    return torch.linspace(0, count - 1, min(count, limit), dtype=torch.float64).round().long().unique()


def online_knn(prepared: Prepared, loader: Loader, method: MoCo) -> Callable[[], dict[str, float]]:
    """k-NN of the backbone as it is now: training images vote on held-out ones."""
    held_out = prepared.held_out()
    if held_out is None or held_out.labels is None or prepared.images.labels is None:
        raise UsageError("knn_every: online k-NN needs labelled training and held-out images; this data has none.")
    test_loader = prepared.loader(held_out)
    bank, queries = evenly(len(loader), BANK_IMAGES), evenly(len(held_out), HELD_OUT_IMAGES)
    bank_labels, truth = prepared.images.labels[bank.numpy()], held_out.labels[queries.numpy()]

    def measure() -> dict[str, float]:
        known, asked = (
            prepared.features(method, loader, bank),
            prepared.features(method, test_loader, queries),
        )
        rows, asked_rows = usable_rows(known), usable_rows(asked)
        k = min(ONLINE_K, len(rows))
        found = knn(
            known[rows],
            bank_labels[rows],
            asked[asked_rows],
            truth[asked_rows],
            k=[k],
            device=prepared.device,
        )
        return {"knn": found[k]}

    return measure


@torch.no_grad()
def label_free(method: MoCo, loader: Loader, indices: Tensor, make_views: MakeViews) -> dict[str, float]:
    """Alignment and uniformity of two fresh views of held-out images, the backbone's effective rank, and how
    often a view's nearest neighbour among all the others' is the other view of its own image."""
    views: list[list[Tensor]] = [[], []]
    method.eval()
    for number, (_, canvas) in enumerate(loader.batches(indices.split(256))):
        for features, view in zip(views, make_views(canvas, "held-out", number)[:2], strict=True):
            features.append(method.backbone(view).float().cpu())
    method.train()
    first, second = (torch.cat(parts) for parts in views)
    _, nearest = neighbours(second, first, 1)
    return {
        "alignment": round(float(alignment(first, second)), 4),
        "uniformity": round(float(uniformity(first)), 4),
        "effective_rank": round(float(effective_rank(first)), 2),
        "retrieval": round(100 * float((nearest[:, 0] == torch.arange(len(first))).float().mean()), 2),
    }


def summarise(run: Run, prepared: Prepared, method: MoCo, make_views: MakeViews) -> list[str]:
    """Write the label-free results and the neighbours of the run, and say them in words."""
    config = prepared.config
    images = prepared.held_out()
    seen = images is None
    images = images if images is not None else prepared.images
    loader = prepared.loader(images)
    indices = evenly(len(images), HELD_OUT_IMAGES)
    if len(indices) < 3:
        return [f"done: {run.path}"]
    value = label_free(method, loader, indices, make_views)
    result: dict[str, Any] = {
        "protocol": "label-free",
        "data": config.data,
        "value": value,
        "epoch": config.epochs,
        "seed": config.seed,
        "images": {"training" if seen else "held out": len(indices)},
    }
    run.add_result(result)
    part = images.subset(indices.numpy())
    part_loader = prepared.loader(part)
    features = prepared.features(method, part_loader, torch.arange(len(part)))
    neighbour_sheet(part_loader, features, part.names).save(run.path / "neighbours.png")
    which = "training images (none were held out)" if seen else "held-out images"
    return [
        f"On {len(indices):,} {which}, without labels:",
        f"  a view finds the other view of its image: {value['retrieval']:.1f} % (chance {100 / len(indices):.1f} %)",
        f"  alignment {value['alignment']:.3f} (0: views agree), uniformity {value['uniformity']:.2f} "
        f"(lower: more even), effective rank {value['effective_rank']:.0f}",
        f"  neighbours to look at: {run.path / 'neighbours.png'}",
        f"With labels: antipode evaluate {run.path} --protocol knn --data {config.data}",
    ]
