"""Studies: the tables and figures of the papers, each beside the paper's numbers, with its claims checked."""

from __future__ import annotations

from antipode.studies import eqco, eqco_cifar10, eqco_imagenet
from antipode.studies.study import Study, check_word

STUDIES: dict[str, Study] = {study.id: study for study in (eqco.TABLE_5, eqco_cifar10.CIFAR10, *eqco_imagenet.STUDIES)}


def find(id: str) -> Study:
    check_word("study", id, STUDIES)
    return STUDIES[id]
