"""Studies: the tables and figures of the papers, each beside the paper's numbers, with its claims checked."""

from __future__ import annotations

from unitsphere.common.errors import check_word
from unitsphere.studies import (
    eqco,
    eqco_cifar10,
    eqco_figures,
    eqco_imagenet,
    jcl,
    jcl_cifar10,
    mochi,
    mochi_cifar10,
    mochi_figures,
    mochi_imagenet,
    mochi_ladder,
    mochi_variants,
    msbreg,
    msbreg_cifar10,
    msbreg_elsewhere,
    sphere,
)
from unitsphere.studies.study import Study

__all__ = ["STUDIES", "find", "run", "study"]

ALL = (
    *(eqco.TABLE_5, eqco_cifar10.CIFAR10, *eqco_imagenet.STUDIES, *eqco_figures.STUDIES),
    *(jcl_cifar10.CIFAR10, *jcl.STUDIES),
    *(mochi_cifar10.CIFAR10, *mochi.STUDIES, *mochi_imagenet.STUDIES, *mochi_variants.STUDIES),
    *(sphere.FIGURE_1, *mochi_figures.STUDIES, mochi_ladder.FIGURE_4),
    *(msbreg_cifar10.CIFAR10, msbreg_elsewhere.ELSEWHERE, *msbreg.STUDIES),
)
STUDIES: dict[str, Study] = {study.id: study for study in ALL}


def find(id: str) -> Study:
    check_word("study", id, STUDIES)
    return STUDIES[id]
