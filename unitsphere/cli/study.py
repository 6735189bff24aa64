"""unitsphere study"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unitsphere.cli.command import add_command, whole_numbers
from unitsphere.common.errors import UsageError


def add_commands(commands: Any) -> None:
    command = add_command(commands, "study", run_list, "compute a paper's table or figure beside the paper's numbers")
    actions = command.add_subparsers(dest="action", metavar="ACTION")
    add_command(actions, "list", run_list, "list the studies")
    show = add_command(actions, "show", run_show, "print a study's grid, the paper's numbers and its claims")
    show.add_argument("study", metavar="ID", help="see `unitsphere study list`")
    show.add_argument("--settings", action="store_true", help="a line a setting: name, value, where it comes from")
    show.add_argument("--only", type=choice, action="append", default=[], metavar="AXIS=V,..",
                      help="of the cells at these values of an axis; may be repeated")  # fmt: skip
    add_run(actions)


def add_run(actions: Any) -> None:
    command = add_command(
        actions,
        "run",
        run_run,
        "compute the cells of a study that are not finished, and check its claims",
        epilog="examples:\n"
        "  unitsphere study run eqco/table-5\n"
        "  unitsphere study run eqco/table-5 --only k=64,128 --only objective=EqCo --set steps=500 --out runs/quick\n"
        "  unitsphere study run eqco/table-1 --set data=imagenet=/data/imagenet --part 1/3 --out /shared/table-1\n",
    )
    command.add_argument("study", metavar="ID", help="see `unitsphere study list`")
    command.add_argument("--out", metavar="DIR", help="where results.json goes (default: runs/ID with - for /)")
    command.add_argument("--store", metavar="DIR", help="where finished cells and runs are kept (default: --out)")
    command.add_argument("--seed", "--seeds", dest="seeds", type=whole_numbers, metavar="S,..",
                         help="seeds of a cell, whose value is their mean (default: 0; quick --scale: 5)")  # fmt: skip
    command.add_argument("--only", type=choice, action="append", default=[], metavar="AXIS=V,..",
                         help="only the cells at these values of an axis; may be repeated")  # fmt: skip
    command.add_argument("--part", type=part, default=(1, 1), metavar="I/N",
                         help="only the I-th of N parts of the cells, to share the work between machines")  # fmt: skip
    command.add_argument("--set", type=setting, action="append", default=[], dest="given", metavar="NAME=VALUE",
                         help="a setting of all cells, as JSON or text; may be repeated")  # fmt: skip
    command.add_argument(
        "--scale",
        choices=("small", "tiny"),
        help="on this machine, with a small network and few images (docs/studies.md)",
    )
    command.add_argument("--data", metavar="DATA", help="with --scale: images other than the drawn shapes")  # fmt: skip
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    command.add_argument("--dry-run", action="store_true",
                         help="say what would be run: settings, hours, missing data")  # fmt: skip
    command.add_argument("--quiet", action="store_true", help="show no progress")


def choice(text: str) -> tuple[str, list[str]]:
    axis, equals, values = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form AXIS=VALUE,VALUE such as k=64,128")
    return axis, values.split(",")


def setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE such as steps=500")
    try:
        return name, None if value == "none" else json.loads(value)
    except ValueError:
        return name, value


def part(text: str) -> tuple[int, int]:
    try:
        which, parts = map(int, text.split("/"))
    except ValueError:
        which = parts = 0
    if not 1 <= which <= parts:
        raise argparse.ArgumentTypeError(f"{text!r} is not a part I/N such as 1/4, of which I is 1 to N")
    return which, parts


def run_list(options: argparse.Namespace) -> None:
    from unitsphere.studies import STUDIES

    for study in STUDIES.values():
        print(f"{study.id}: {study.title} ({study.paper})")
        print(f"    cells  {len(study.cells)}")
        print(f"    needs  {study.needs}")


def run_show(options: argparse.Namespace) -> None:
    from unitsphere.studies import find

    study = find(options.study)
    if options.settings:
        from unitsphere.cli.study_plan import print_settings
        from unitsphere.studies.plan import settings_of

        print_settings(settings_of(study, study.choose(gathered(options.only)), {}))
        return
    print(f"{study.title} ({study.paper})\n{study.quantity}; {len(study.cells)} cells; needs {study.needs}\n")
    print_table(study)
    print("\nclaims")
    for claim in study.claims:
        print(f"  {claim.told}")


def run_run(options: argparse.Namespace) -> None:
    from unitsphere.studies import find

    study = find(options.study)  # before torch is loaded

    from unitsphere.studies.run import as_run, remark, run_study

    if options.scale:
        from unitsphere.studies.scale import at_scale

        study = at_scale(study, options.scale, options.data)
    elif options.data:
        raise UsageError("data: it is for --scale. Otherwise a study's data are a setting: --set data=NAME=PATH.")
    only = gathered(options.only)
    out = Path(options.out or Path("runs") / "-".join(filter(None, (study.id.replace("/", "-"), options.scale))))
    store = Path(options.store) if options.store else out
    options.seeds = options.seeds or usual_seeds(study, store, dict(options.given), only)
    if options.dry_run:
        from unitsphere.cli.study_plan import print_plan
        from unitsphere.studies.plan import plan

        print_plan(study, plan(study, store, seeds=options.seeds, given=dict(options.given), only=only), options.seeds)
        return
    try:
        results = run_study(
            study,
            out,
            store=store,
            seeds=options.seeds,
            given=dict(options.given),
            only=only,
            part=options.part,
            device=options.device,
            say=lambda line: None if options.quiet else print(line, file=sys.stderr, flush=True),
        )
    except KeyboardInterrupt:
        print("what is finished is kept; the same command goes on from there", file=sys.stderr)
        raise
    study = as_run(study, results["given"], results["altered"])
    print(f"{study.title} ({study.paper})\n{study.quantity}\n")
    if said := remark(results):
        print(f"{said}\n")
    print_table(study, results["cells"])
    if any(0 < count_seeds(cell) < len(results["seeds"]) for cell in results["cells"]):
        print(f"(n): over n of the {len(results['seeds'])} seeds; the others are not finished")
    told = [about for cell in results["cells"] for about in cell["told"].values() if about]
    if edges := sum("edge" in about for about in told):
        print(f"of {edges} numbers the linear classifier's rate lies at the edge of those tried (results.json: edge)")
    print()
    print_claims(results["claims"])
    wrote = [out / "results.json"]
    if study.over is not None and any(cell["value"] is not None for cell in results["cells"]):
        wrote += draw_figure(study, results["cells"], said, out / "results.png")
    print(f"wrote {' and '.join(map(str, wrote))}")


def usual_seeds(study: Any, store: Path, given: Mapping[str, Any], only: Mapping[str, Sequence[str]]) -> list[int]:
    """One; at the small scale five, where they take an hour at most."""
    if study.scale != "small":
        return [0]
    from unitsphere.studies.plan import plan

    hours = plan(study, store, seeds=[0], given=given, only=only).hours
    return list(range(5)) if hours is None or 5 * hours <= 1 else [0]


def gathered(choices: Sequence[tuple[str, list[str]]]) -> dict[str, list[str]]:
    """The values of each axis, which may have been given in several turns."""
    only: dict[str, list[str]] = {}
    for axis, values in choices:
        only.setdefault(axis, []).extend(values)
    return only


def draw_figure(study: Any, cells: Sequence[Mapping[str, Any]], said: str, path: Path) -> list[Path]:
    """The file, if it could be drawn: what was computed is not lost for want of a picture."""
    from unitsphere.analysis.figures import save
    from unitsphere.common.extras import require
    from unitsphere.studies.figure import draw

    try:
        require("matplotlib", "drawing figures")
    except UsageError as error:
        print(f"no figure: {error}", file=sys.stderr)
        return []
    save(lambda: draw(study, cells, said), path)
    return [path]


def print_claims(claims: Sequence[Mapping[str, str]]) -> None:
    """Those that are judged; the others as a number, since of a part of a study they would be nearly all."""
    judged = [claim for claim in claims if claim["verdict"] != "not measured"]
    for claim in judged:
        print(f"{claim['verdict']}: {claim['statement']} ({claim['evidence']})")
    if missing := len(claims) - len(judged):
        print(f"not measured: {missing} of {len(claims)} claims, for want of cells (results.json says which)")


def count_seeds(cell: Mapping[str, Any]) -> int:
    return sum(value is not None for value in cell["values"].values())


def measured(cell: Mapping[str, Any]) -> str:
    text = with_deviation(number(cell["value"]), cell["deviation"], 2)
    return text if count_seeds(cell) == len(cell["values"]) else f"{text} ({count_seeds(cell)})"


def number(value: float) -> str:
    """With two digits after the point, or three that count where these would say little."""
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"


def with_deviation(number: str, deviation: float | None, digits: int) -> str:
    return number if deviation is None else f"{number} ± {deviation:.{digits}f}"


def print_table(study: Any, cells: Sequence[Mapping[str, Any]] = ()) -> None:
    """The measured numbers (of results.json) and the paper's side by side; only the paper's where nothing is measured,
    and only the measured ones where the paper has none. Rows of which nothing is computed are left out, unless it is
    all of them."""
    from rich.console import Console
    from rich.table import Table

    from unitsphere.studies.study import shown

    axes = list(dict.fromkeys(axis for cell in study.cells for axis in cell.at if axis != study.columns))
    rows: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
    computed = set()
    for number, cell in enumerate(study.cells):
        place = tuple(shown(cell.at[axis]) if axis in cell.at else "" for axis in axes)
        row = rows.setdefault(place, {})
        column = shown(cell.at[study.columns])
        if cells and any(about is not None for about in cells[number]["told"].values()):  # also that it diverged
            computed.add(place)
        if cells and cells[number]["value"] is not None:
            row["here", column] = measured(cells[number])
        if cell.paper is not None:
            row["paper", column] = with_deviation(str(cell.paper), cell.deviation, 1)
    columns = list(dict.fromkeys(shown(cell.at[study.columns]) for cell in study.cells))
    kept = {place: row for place, row in rows.items() if place in computed} or rows
    told = {source for row in kept.values() for source, _ in row}
    sources = [source for source in ("here", "paper") if source in told]
    table = Table(box=None, pad_edge=False)
    for axis in axes:
        table.add_column(axis.replace("_", " "))
    for source in sources:
        for number, column in enumerate(columns):
            head = f"{study.columns} {column}" if column[0].isdigit() else column
            table.add_column(f"{source if number == 0 else ''}\n{head}", justify="right")
    for place, row in kept.items():
        table.add_row(*place, *(row.get((source, column), "-") for source in sources for column in columns))
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)
    if len(kept) < len(rows):
        print(f"{len(rows) - len(kept)} of {len(rows)} rows are left out: nothing of them is computed yet")
    if not sources:
        print(f"each by {study.columns}: {', '.join(columns)}")
