"""What a run has learned, said at its end without any label; and with labels along the way, if asked."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unitsphere.common.files import replacing
from unitsphere.data.broken import describe
from unitsphere.data.images import evenly
from unitsphere.data.loader import Loader
from unitsphere.evaluation.embedding import neighbour_sheet
from unitsphere.features.knn import neighbours
from unitsphere.modules.names import CUSTOM
from unitsphere.objectives.geometry import alignment, effective_rank, feature_deviation, uniformity
from unitsphere.runs.run import Run
from unitsphere.training.prepare import Prepared
from unitsphere.training.telemetry import COLLAPSED_DEVIATION, COLLAPSED_RANK, Listener
from unitsphere.views.views import MakeViews

HELD_OUT_IMAGES = 2000


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
    sheet = neighbour_sheet(loader, features, images.names)
    with replacing(run.path / "neighbours.png") as temporary:
        sheet.save(temporary, format="PNG")
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
