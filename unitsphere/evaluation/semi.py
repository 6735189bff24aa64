"""The protocol `semi`: fine-tuning on the few training images whose labels may be used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from unitsphere.common.errors import UsageError
from unitsphere.data.images import Images
from unitsphere.data.lists import read_text
from unitsphere.data.subsets import keep_fraction
from unitsphere.evaluation import finetune
from unitsphere.evaluation.backbone import JudgedBackbone, Judgement, LabelledImages
from unitsphere.evaluation.settings import SemiSettings
from unitsphere.features.inputs import class_numbers

FEW = 0.03  # a share of labels nearer to 1 % than to 10 %: the encoder is frozen


def judge(backbone: JudgedBackbone, data: LabelledImages, settings: SemiSettings) -> Judgement:
    """Fine-tune on the part of the training images that a list names, or on a stratified fraction of them."""
    if settings.labelled is not None:
        part = listed_part(data.train, data.test, settings.labelled)
    else:
        assert settings.fraction is not None  # the model asks for one of the two
        part = stratified_fraction(data.train, settings.fraction, settings.seed)
    nearer = "msbreg-1%" if len(part) / len(data.train) < FEW else "msbreg-10%"
    with_recipe = settings.model_copy(update={"recipe": settings.recipe or nearer})
    found = finetune.judge(backbone, replace(data, train=part), with_recipe)
    which = {"fraction": settings.fraction, "labelled": settings.labelled and os.fspath(settings.labelled)}
    return replace(found, constants=found.constants | which)


def stratified_fraction(images: Images, fraction: float, seed: int) -> Images:
    """That share of every class, by chance but decided by the images' names and the seed alone. A larger share of the
    same seed holds a smaller one."""
    labels = class_numbers(images.labels, f"the training images of {images.name}").numpy()
    part = keep_fraction(images, fraction, seed)
    classes, counts = np.unique(labels, return_counts=True)
    least = int(counts.argmin())
    if round(fraction * int(counts[least])) < 1:
        raise UsageError(
            f"fraction: {fraction:g} of {counts[least]} images leaves class {class_name(images, classes[least])!r} "
            f"without any. Give at least {1 / counts[least]:.2g}, or choose the images yourself: --labelled FILE."
        )
    return part


def listed_part(images: Images, test: Images, path: str | os.PathLike[str]) -> Images:
    """The images that a file names, one a line (and what follows a tab is left out): by the name they have here, or by
    the end of it from a folder on, so that `n01440764_10026.JPEG` will do. None of the test images is allowed."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"labelled: there is no file {path}. It lists training images, one name a line.")
    lines = (line.partition("\t")[0].strip() for line in read_text(file).splitlines())
    wanted = {line for line in lines if line and not line.startswith("#")}
    if not wanted:
        raise UsageError(f"labelled: {path} names no image. It lists training images, one name a line.")
    found: dict[str, int] = {}
    for index, name in enumerate(images.names):
        line = next((end for end in ends(name) if end in wanted), None)
        if line in found:
            raise UsageError(
                f"labelled: {path} names {line!r}, which may be {images.names[found[line]]!r} or {name!r}."
            )
        if line is not None:
            found[line] = index
    missing = sorted(wanted - found.keys())
    judged = sorted({end for name in test.names for end in ends(name)}.intersection(missing)) if missing else []
    if judged:
        raise UsageError(
            f"labelled: {len(judged)} of the {len(wanted)} images that {path} names are test images of {test.name}, "
            f"such as {judged[0]!r}: held out (--holdout), or of its own val split. Take them off the list."
        )
    if missing:
        raise UsageError(
            f"labelled: {len(missing)} of the {len(wanted)} images that {path} names are not among the training images "
            f"of {images.name}, such as {missing[0]!r}. Names are like {images.names[0]!r}, or the end of it."
        )
    part = images.subset(sorted(found.values()))
    require_every_class(images, part)
    return part


def ends(name: str) -> Iterator[str]:
    """a/b/c, b/c, c"""
    while name:
        yield name
        name = name.partition("/")[2]


def require_every_class(images: Images, part: Images) -> None:
    known, kept = (np.unique(class_numbers(each.labels, "the training images")) for each in (images, part))
    lost = np.setdiff1d(known, kept)
    if len(lost):
        raise UsageError(
            f"labelled: {len(lost)} of {len(known)} classes have no image in the list, {class_name(images, lost[0])!r} "
            "among them. List at least one of each, or name the classes to use (--classes)."
        )


def class_name(images: Images, label: int) -> str:
    return images.classes[label] if images.classes else str(label)
