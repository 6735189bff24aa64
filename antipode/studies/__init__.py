"""Studies: the tables and figures of the papers, each beside the paper's numbers, with its claims checked."""

from __future__ import annotations

from antipode.studies.eqco import STUDIES as EQCO
from antipode.studies.study import Study, check_word

STUDIES: dict[str, Study] = {study.id: study for study in (*EQCO,)}


def find(id: str) -> Study:
    check_word("study", id, STUDIES)
    return STUDIES[id]
