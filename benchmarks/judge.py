"""Judge the published results of studies again: the verdicts of today's claims on the numbers that are stored.

    python -m benchmarks.judge            # what would change
    python -m benchmarks.judge --write    # and write it

The numbers stay as they are. A results file is one of `unitsphere study run`, or has in `values` the numbers of a part
of one by method, judge and seed; others are left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from unitsphere.studies import STUDIES
from unitsphere.studies.run import judge_claims
from unitsphere.studies.study import Study
from unitsphere.studies.verdicts import NOT_MEASURED

RESULTS = Path(__file__).parent / "results"


PARTS = {"msbreg-cifar10-small": "msbreg/cifar10"}  # with fewer images and a smaller network


def judged(stored: dict[str, Any]) -> list[dict[str, str]]:
    """The claims of a results file. Its data and recipe are what made its settings differ from the study's."""
    study = STUDIES[stored["study"]]
    by_place = {json.dumps(cell["at"]): cell for cell in stored["cells"]}
    cells = [by_place[json.dumps(cell.at)] for cell in study.cells]
    changed = [name for name in stored["given"] if name in ("data", "recipe")]
    return judge_claims(study, cells, stored["given"], changed)


def judged_part(study: Study, values: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, str]]:
    """Those claims of a study that its part has all numbers of: a question of ours, on settings of ours."""
    cells = [{"values": values.get(cell.at["method"], {}).get(cell.at["judge"], {})} for cell in study.cells]
    return [claim for claim in judge_claims(study, cells, {}, []) if claim["verdict"] != NOT_MEASURED]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--write", action="store_true", help="write the verdicts into the files")
    write = options.parse_args().write
    for path in sorted(RESULTS.glob("*.json")):
        stored = json.loads(path.read_text())
        if path.stem in PARTS:
            claims = judged_part(STUDIES[PARTS[path.stem]], stored["values"])
        elif isinstance(stored, dict) and stored.get("study") in STUDIES and "cells" in stored:
            claims = judged(stored)
        else:
            continue
        known = {claim["statement"]: claim["verdict"] for claim in stored["claims"]}
        for claim in claims:
            if known.get(claim["statement"]) != claim["verdict"]:
                print(f"{path.stem}: {claim['statement']}: {known.get(claim['statement'])} -> {claim['verdict']}")
                print(f"    {claim['evidence']}")
        if write:
            indent = 1 if path.read_text().startswith("{\n") else None
            path.write_text(json.dumps({**stored, "claims": claims}, indent=indent) + "\n")


if __name__ == "__main__":
    main()
