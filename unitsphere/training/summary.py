"""What a run has learned, said at its end without any label; and with labels along the way, if asked."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unitsphere.common.distributed import any_rank, gather, mine, rank, world
from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.data.broken import describe
from unitsphere.data.images import evenly, refuse_multi_label
from unitsphere.data.loader import Loader
from unitsphere.evaluation.embedding import neighbour_sheet
from unitsphere.features.inputs import usable_rows
from unitsphere.features.knn import knn, neighbours
from unitsphere.methods.learners.learner import Learner
from unitsphere.modules.names import CUSTOM
from unitsphere.objectives.geometry import alignment, effective_rank, feature_deviation, uniformity
from unitsphere.runs.run import Run
from unitsphere.training.prepare import Prepared
from unitsphere.training.telemetry import COLLAPSED_DEVIATION, COLLAPSED_RANK, Listener
from unitsphere.views.views import MakeViews

HELD_OUT_IMAGES = 2000
BANK_IMAGES = 20_000
ONLINE_K = 20


class OnlineKNN:
    """k-NN of the backbone as it is now: training images vote on held-out ones."""

    def __init__(self, prepared: Prepared) -> None:
        held_out, images = prepared.held_out(), prepared.images
        if held_out is None or held_out.labels is None or images.labels is None:
            raise UsageError("knn_every: online k-NN needs labelled training and held-out images; this data has none.")
        refuse_multi_label(images, "knn_every")
        known, judged = (np.flatnonzero(labels >= 0) for labels in (images.labels, held_out.labels))
        if not len(known) or not len(judged):
            raise UsageError("knn_every: none of the training images, or of those held out, has a label.")
        self.prepared = prepared
        self.bank, self.bank_labels = torch.from_numpy(known[evenly(len(known), BANK_IMAGES)]), images.labels
        queries = torch.from_numpy(judged[evenly(len(judged), HELD_OUT_IMAGES)])
        self.truth = held_out.labels[queries.numpy()]
        self.queries = held_out.subset(my_share(queries).numpy())
        self.query_loader: Loader | None = None

    def measure(self, loader: Loader, method: Learner) -> dict[str, float]:
        """loader: of the training images. Each rank makes its share of the features, and the first searches them."""
        failure: Exception | None = None
        try:
            self.query_loader = self.query_loader or self.prepared.loader(self.queries)
            known = self.prepared.features(method.backbone, loader, my_share(self.bank))
            asked = self.prepared.features(method.backbone, self.query_loader, torch.arange(len(self.queries)))
        except (UnitsphereError, torch.OutOfMemoryError) as error:
            failure = error
        (failed,) = any_rank(failure is not None)  # or the others would wait for the features of this one
        if failed:
            raise failure or UnitsphereError("another process could not make its share of the features.")
        known, asked = gather(known)[: len(self.bank)], gather(asked)[: len(self.truth)]
        if rank() > 0:
            return {}
        rows, asked_rows = usable_rows(known), usable_rows(asked)
        labels, truth = self.bank_labels[self.bank[rows].numpy()], self.truth[asked_rows.numpy()]
        k = min(ONLINE_K, len(rows))
        return {"knn": knn(known[rows], labels, asked[asked_rows], truth, k=[k], device=self.prepared.device)[k]}


def my_share(indices: Tensor) -> Tensor:
    """This rank's share of some indices. All shares are as long: the last is filled up from the beginning."""
    share = math.ceil(len(indices) / world())
    return mine(indices[torch.arange(share * world()) % len(indices)])


@torch.no_grad()
def features_of_views(backbones: Sequence[nn.Module], loader: Loader, make_views: MakeViews) -> list[list[Tensor]]:
    """For each backbone the features (N, F) of a view of each image that can be read, and of another one."""
    found: list[list[list[Tensor]]] = [[[], []] for _ in backbones]
    asked = torch.arange(len(loader)).split(256)
    for number, (delivered, canvas) in enumerate(loader.batches(asked)):
        good = delivered == asked[number]  # not the stand-ins of broken images
        for which, view in enumerate(make_views(canvas, "held-out", number)[:2]):
            for parts, backbone in zip(found, backbones, strict=True):
                parts[which].append(backbone.eval()(view).float().cpu()[good])
    return [[torch.cat(each) for each in parts] for parts in found]


def retrieval(first: Tensor, second: Tensor) -> float:
    """How often, in percent, a view's nearest neighbour among all the others' is the other view of its own image."""
    _, nearest = neighbours(second, first, 1)
    return round(100 * float((nearest[:, 0] == torch.arange(len(first))).float().mean()), 2)


def label_free(first: Tensor, second: Tensor) -> dict[str, float]:
    """Of features of two views: alignment, uniformity, effective rank and retrieval."""
    return {
        "alignment": round(float(alignment(first, second)), 4),
        "uniformity": round(float(uniformity(first)), 4),
        "effective_rank": round(float(effective_rank(first)), 2),
        "retrieval": retrieval(first, second),
    }


def summarise(
    run: Run,
    prepared: Prepared,
    backbone: nn.Module,
    untrained: nn.Module | None,
    make_views: MakeViews,
    listener: Listener,
) -> None:
    """Write the label-free results and the neighbours of the run, and say them in words. untrained: the backbone as it
    was before the run (with the weights of --init, if given), where that is known."""
    config = prepared.config
    held_out = prepared.held_out()
    images = prepared.images if held_out is None else held_out
    images = images.subset(evenly(len(images), HELD_OUT_IMAGES))
    if len(images) < 3:
        listener.say(f"done: {run.path}")
        return
    loader = prepared.loader(images)
    backbones = [backbone] if untrained is None else [backbone, untrained]
    pairs, *before = features_of_views(backbones, loader, make_views)
    if len(pairs[0]) < 3:  # the others are broken
        listener.say(f"done: {run.path}")
        return
    value, count = label_free(*pairs), len(pairs[0])
    began = "initial" if config.init else "untrained"
    if before:
        value[f"{began}_retrieval"] = retrieval(*before[0])
    result: dict[str, Any] = {
        "protocol": "label-free",
        "data": config.data,
        "value": value,
        "epoch": config.epochs,
        "seed": config.seed,
        "images": {"training" if held_out is None else "held out": count},
        **config.caveats,
    }
    features = prepared.features(backbone, loader, torch.arange(len(images)))
    neighbour_sheet(loader, features, images.names).save(run.path / "neighbours.png")
    run.add_result(result)  # last: it tells that the others are there
    which = "training images (none were held out)" if held_out is None else "held-out images"
    compared = f"{began} {value[f'{began}_retrieval']:.1f} %, " if before else ""
    lines = [
        f"On {count:,} {which}, without labels:",
        f"  a view finds the other view of its image: {value['retrieval']:.1f} % "
        f"({compared}chance {100 / count:.1f} %)",
        f"  the backbone's features: alignment {value['alignment']:.3f} (0: views agree), uniformity "
        f"{value['uniformity']:.2f} (lower: more even), effective rank {value['effective_rank']:.0f}",
        f"  neighbours to look at: {run.path / 'neighbours.png'}",
    ]
    if images.labels is not None and not images.multi_label and config.data != CUSTOM:
        words = shlex.join(["unitsphere", "evaluate", str(run.path), "--protocol", "knn", "--data", config.data])
        lines.append(f"With labels: {words}")
    for line in lines + (describe(loader.broken) if held_out is not None else []):
        listener.say(line)
    deviation = float(feature_deviation(pairs[0]))
    if not (value["effective_rank"] >= COLLAPSED_RANK and deviation >= COLLAPSED_DEVIATION):
        listener.warn(
            f"collapsed: the features of different images lie on a line or in a point (effective rank "
            f"{value['effective_rank']:.1f}, deviation {deviation:.3f} where 1 is an even spread): this backbone has "
            "learnt nothing of use. metrics.jsonl says when it happened; train anew with a lower --lr, more "
            "--warmup-epochs, batch norm or --singular-weight."
        )
