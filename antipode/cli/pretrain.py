"""antipode pretrain"""

from __future__ import annotations

import argparse
from typing import Any, get_args

from antipode.cli.command import add_command


def add_commands(commands: Any) -> None:
    from antipode.config.families import SECTIONS

    command = add_command(
        commands,
        "pretrain",
        run_pretrain,
        "learn from images without labels",
        epilog="examples:\n"
        "  antipode pretrain moco-v2 --data ./photos --out runs/photos\n"
        "  antipode pretrain moco-v2 --data cifar10=/data/cifar --out runs/c --epochs 100 --symmetric\n"
        "  antipode pretrain --config runs/c/config.json --out runs/c2 --seed 1\n"
        "  antipode pretrain --out runs/c --resume --epochs 200\n",
    )
    command.add_argument("method", nargs="?", help="see `antipode methods`")
    command.add_argument("--out", required=True, metavar="RUN", help="the folder of the run")
    command.add_argument("--config", metavar="FILE", help="a TOML or JSON file of fields")
    command.add_argument("--resume", action="store_true", help="continue the run in RUN; start it if there is none")
    command.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    for section in SECTIONS:
        group = command.add_argument_group(section.__doc__ or "")
        for name, field in section.__annotations__.items():
            if name != "method":
                add_field(group, name, section.model_fields[name], field)


def add_field(group: Any, name: str, field: Any, annotation: str) -> None:
    """A field of the configuration as an option. Its text is checked by the field itself, as in a file."""
    known = "" if field.is_required() or field.default in (None, ()) else f" (default: {shown(field.default)})"
    about = f"{field.description}{known}".replace("%", "%%")
    flag = "--" + name.replace("_", "-")
    if annotation.startswith("bool"):
        group.add_argument(
            flag, dest=name, nargs="?", const="true", default=argparse.SUPPRESS, metavar="BOOL", help=about
        )
    else:
        group.add_argument(flag, dest=name, default=argparse.SUPPRESS, metavar="X", help=about)


def shown(value: Any) -> str:
    return (
        ",".join(f"{v:g}" for v in value)
        if isinstance(value, tuple)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def given_fields(options: argparse.Namespace) -> dict[str, Any]:
    from antipode.config.families import FIELDS

    chosen = {name: value for name, value in vars(options).items() if name in FIELDS and value is not None}
    optional = {name for name, field in FIELDS.items() if type(None) in get_args(field.annotation)}
    return {name: None if value == "none" and name in optional else value for name, value in chosen.items()}


def run_pretrain(options: argparse.Namespace) -> None:
    from pathlib import Path

    from antipode.config.resolve import Layer, read_file, resolve

    given = Layer("command line", given_fields(options))
    file = Layer(f"file {options.config}", read_file(options.config)) if options.config else None
    if not (options.resume and Path(options.out).exists()):
        resolve(given, file=file)  # a wrong field is told before torch is loaded

    from antipode.distributed import process_group, rank
    from antipode.training.prepare import prepare
    from antipode.training.pretrain import train
    from antipode.training.run import Run

    run = Run(Path(options.out))
    with process_group():
        prepared = prepare(run, given, file, options.resume)
        if rank() == 0:
            print_plan(prepared, everything=options.dry_run)
        if not options.dry_run:
            train(prepared, run)


def print_plan(prepared: Any, everything: bool) -> None:
    """What will be run, and where each setting comes from."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from antipode.config.resolve import as_table

    table = Table(box=None, pad_edge=False)
    for heading in ("field", "value", "from"):
        table.add_column(heading, overflow="fold")
    for name, value, origin in as_table(prepared.resolved):
        if everything or origin != "default":
            table.add_row(name, escape(value), escape(origin))
    plan = prepared.plan
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{plan.images:,} images, {plan.steps_per_epoch:,} steps an epoch, {plan.steps:,} steps; "
        f"learning rate {prepared.config.learning_rate:g}; {prepared.precision} on {prepared.device}"
    )
