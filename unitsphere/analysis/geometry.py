"""Alignment and uniformity of the backbone's features on the sphere, over the checkpoints of a run: MoCHi's Fig. 3c.

Positives are images of one class (the class oracle of the paper) or two views of one image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from unitsphere.analysis.figures import colour, name_runs, panels
from unitsphere.analysis.request import AnalysisRequest, number
from unitsphere.common.errors import UsageError, check_word
from unitsphere.data.images import Images, refuse_multi_label
from unitsphere.evaluation.backbone import JudgedBackbone
from unitsphere.evaluation.options import check_features
from unitsphere.features.extract import forward, frozen
from unitsphere.features.inputs import class_numbers, usable_rows
from unitsphere.objectives.geometry import alignment, uniformity
from unitsphere.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = dict[str, Any]


def class_alignment(x: Tensor, labels: Tensor) -> Tensor:
    """E |x - y|^2 over all pairs of distinct images of one class, each pair alike; float64. x: (N, D), l2-normalised
    here; labels: (N,).

    No pair is formed: the n unit vectors of a class, with sum s, have sum_ij |x_i - x_j|^2 = 2 n^2 - 2 |s|^2."""
    x = normalize(x.double(), dim=1)
    classes, place = labels.to(x.device).unique(return_inverse=True)
    sums = x.new_zeros(len(classes), x.shape[1]).index_add_(0, place, x)
    counts = place.bincount(minlength=len(classes)).to(x.dtype)
    pairs = (counts * (counts - 1)).sum()
    if not pairs:
        raise UsageError("positives: no class has two images. Take more images, or two views: --positives views.")
    return 2 * (counts.square().sum() - sums.square().sum()) / pairs


def measure(
    run: Run,
    ask: AnalysisRequest,
    *,
    positives: str = "class",
    images: int = 32_768,
    features: str = "backbone",
    split: str = "val",
) -> Result:
    """Both numbers for each checkpoint. positives: `class` (of images as they are) or `views` (uniformity then of the
    first view)."""
    check_features(features)
    check_word("positives", positives, ("class", "views"))
    chosen = ask.images(run, split, images)
    if positives == "class":
        refuse_multi_label(chosen, "geometry with --positives class")
        if chosen.labels is None:
            raise UsageError(
                f"labels: {chosen.name} has none. Take two views of an image for positives: --positives views."
            )
    found = []
    for path in ask.checkpoints(run):
        backbone, y = ask.backbone(run, path, features), None
        epoch = backbone.loaded.epoch
        if positives == "views":
            x, y = of_views(run, ask, backbone, chosen)
        else:
            x = backbone.features(backbone.open(chosen), f"features, epoch {epoch}")
        rows = usable_rows(x)
        points = x[rows].to(ask.device)
        if y is None:
            labels = class_numbers(chosen.labels, f"the {split} images of {chosen.name}")
            aligned = class_alignment(points, labels[rows])
        else:
            aligned = alignment(points, y[rows].to(ask.device))
        place = {"epoch": epoch, "images": len(rows)}
        found.append(place | {"alignment": number(aligned), "uniformity": number(uniformity(points))})
    return {"positives": positives, "features": features, "split": split, "checkpoints": found}


def of_views(run: Run, ask: AnalysisRequest, backbone: JudgedBackbone, images: Images) -> tuple[Tensor, Tensor]:
    """(N, F) of one view of each image, and of another; NaN where one could not be read."""
    loader, make = backbone.open(images).loader, ask.views(run.config, 2)
    progress = ask.progress(f"views, epoch {backbone.loaded.epoch}", len(images))
    parts, found = torch.arange(len(images)).split(ask.batch_size), []
    with frozen(module := backbone.loaded.backbone.to(ask.device)):
        for batch, (part, (delivered, canvas)) in enumerate(zip(parts, loader.batches(parts), strict=True)):
            views = make(canvas, "analysis-pair", batch)
            both = torch.stack([forward(module, view, backbone.precision).cpu() for view in views])
            found.append(both.where((delivered == part)[:, None], torch.nan))
            progress(int(part[-1]) + 1)
    first, second = torch.cat(found, 1)
    return first, second


def draw(results: Sequence[Result]) -> Figure:
    """Each run's way over its checkpoints, the last of them a larger point; and of several runs these alone, enlarged.
    Up and to the right is better."""
    figure, axes = panels(1 if len(results) == 1 else 2, height=3.9)
    for place, result in enumerate(results):
        x = [-checkpoint["uniformity"] for checkpoint in result["checkpoints"]]
        y = [-checkpoint["alignment"] for checkpoint in result["checkpoints"]]
        axes[0].plot(x, y, "o-", color=colour(place), markersize=3, linewidth=1, alpha=0.6)
        for panel in axes:
            panel.plot(x[-1], y[-1], "o", color=colour(place), markersize=8)
    of = "one class" if results[0]["positives"] == "class" else "two views of an image"
    epochs = sorted({result["checkpoints"][-1]["epoch"] for result in results})
    first = min(result["checkpoints"][0]["epoch"] for result in results)
    way = f"\nepochs {first} to {epochs[-1]}, the last large" if first < epochs[-1] else f"\nepoch {epochs[-1]}"
    titles = (f"positives: {of}; {results[0]['features']}{way}", f"epoch {epochs[-1]}")
    for panel, title in zip(axes, titles, strict=False):
        panel.margins(0.18)
        panel.set_xlabel("- uniformity (right: more even)")
        panel.set_ylabel("- alignment (up: positives nearer)")
        panel.set_title(title if len(epochs) == 1 or panel is axes[0] else "the last epoch of each")
    name_runs(figure, [result["name"] for result in results])
    return figure
