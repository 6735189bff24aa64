"""How alike a network finds the augmentations of one image: JCL's Fig. M.3 (section 5 of its supplement).

For each image, z_1..z_A are the normalised features of A augmentations. The mean cosine over all A x A pairs, each
with itself included, is |mean z|^2. The mean of the covariance's diagonal (over A, not A - 1) is the mean over the D
dimensions of E z^2 - (E z)^2; since |z| = 1 it is (1 - similarity) / D: one measurement in two pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from unitsphere.analysis.figures import colour, panels
from unitsphere.analysis.request import AnalysisRequest, number
from unitsphere.common.errors import UsageError
from unitsphere.data.images import Images
from unitsphere.evaluation.backbone import JudgedBackbone
from unitsphere.evaluation.options import check_features
from unitsphere.features.extract import forward, frozen
from unitsphere.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 200
Result = dict[str, Any]


def similarity_and_variance(features: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """(n,) and (n, D), float64: of each image the mean cosine over all pairs of its augmentations, and the diagonal of
    their covariance. features: (n, D) for each augmentation in turn, of which one is held at a time.
    """
    count, first, second = 0, torch.zeros(()), torch.zeros(())
    for each in features:
        z = normalize(each.double(), dim=1)
        first, second, count = first + z, second + z.square(), count + 1
    mean = first / count
    return mean.square().sum(1), second / count - mean.square()


def measure(
    run: Run,
    ask: AnalysisRequest,
    *,
    images: int = 32_768,
    augmentations: int = 32,
    features: str = "backbone",
    split: str = "train",
) -> Result:
    """Histograms over images, of the latest checkpoint. Memory holds two views of a batch at a time."""
    check_features(features)
    if augmentations < 2:
        raise UsageError(f"augmentations: given {augmentations}; at least 2 can be alike.")
    backbone = ask.backbone(run, ask.checkpoints(run)[-1], features)
    parts = each_image(run, ask, backbone, ask.images(run, split, images), augmentations)
    similarity, diagonal, (dim, *_) = (list(column) for column in zip(*parts, strict=True))
    return {
        "epoch": backbone.loaded.epoch,
        "features": features,
        "split": split,
        "images": sum(map(len, similarity)),
        "augmentations": augmentations,
        "dim": dim,
        "similarity": summary(torch.cat(similarity), 0.0, 1.0),
        "variance": summary(torch.cat(diagonal), 0.0, 1.0 / dim),
    }


def each_image(
    run: Run, ask: AnalysisRequest, backbone: JudgedBackbone, images: Images, augmentations: int
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Batch by batch: similarity (n,) and mean variance (n,) of the readable images, and D."""
    loader, module = backbone.open(images).loader, backbone.loaded.backbone.to(ask.device)
    make = ask.views(run.config, 2)  # two, since they may have policies of their own
    progress = ask.progress(f"augmentations, {run.path.name}", len(images))
    parts = torch.arange(len(images)).split(ask.batch_size)
    with frozen(module):
        for batch, (part, (delivered, canvas)) in enumerate(zip(parts, loader.batches(parts), strict=True)):
            numbers = range(batch * augmentations, (batch + 1) * augmentations)  # more than enough
            views = (view for which in numbers for view in make(canvas, "analysis-similarity", which))
            few = islice(views, augmentations)
            found = similarity_and_variance(forward(module, view, backbone.precision) for view in few)
            similarity, diagonal = (values.cpu()[delivered == part] for values in found)  # not of broken images
            yield similarity, diagonal.mean(1), diagonal.shape[1]
            progress(int(part[-1]) + 1)


def summary(values: Tensor, low: float, high: float) -> Result:
    """Mean, deviation, quantiles, and a histogram over [low, high]."""
    counts = torch.histc(values.clamp(low, high), BINS, low, high)
    quantiles = torch.quantile(values, torch.tensor([0.05, 0.5, 0.95], dtype=values.dtype))
    return {
        "mean": number(values.mean()),
        "deviation": number(values.std(correction=0)),
        **{name: number(q) for name, q in zip(("q05", "median", "q95"), quantiles, strict=True)},
        "edges": [number(edge) for edge in torch.linspace(low, high, BINS + 1, dtype=torch.float64)],
        "counts": [int(count) for count in counts],
    }


def draw(results: Sequence[Result]) -> Figure:
    """Both histograms, the runs over each other."""
    figure, both = panels(2)
    for axes, what, label in zip(
        both,
        ("similarity", "variance"),
        ("mean cosine of an image's augmentations", "mean variance of a feature, in thousandths"),
        strict=True,
    ):
        for place, result in enumerate(results):
            told, edges = result[what], result[what]["edges"]
            share = [count / result["images"] for count in told["counts"]]
            name = f"{result['name']} (mean {told['mean']:.3g})"
            axes.stairs(share, edges, color=colour(place), fill=True, alpha=0.25)
            axes.stairs(share, edges, color=colour(place), label=name)
        held = [edge for r in results for edge, n in zip(r[what]["edges"], r[what]["counts"], strict=False) if n]
        width = max(r[what]["edges"][1] for r in results)
        axes.set_xlim(max(0.0, min(held) - 2 * width), max(held) + 3 * width)
        axes.set_xlabel(label)
        axes.set_ylabel("share of images")
        axes.set_ylim(0, 1.35 * axes.get_ylim()[1])  # room for the legend
        axes.legend(loc="upper left")
    both[1].xaxis.set_major_formatter(lambda value, _: f"{1000 * value:g}")
    first = results[0]
    both[0].set_title(f"{first['images']:,} images, {first['augmentations']} augmentations, {first['features']}")
    return figure
