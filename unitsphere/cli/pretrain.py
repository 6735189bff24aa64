"""unitsphere pretrain"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from unitsphere.cli.command import Parser, add_command


class OnlyOnce(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if getattr(namespace, self.dest, values) != values:
            parser.error(f"{self.dest}: given are {getattr(namespace, self.dest)} and {values}; one is enough")
        setattr(namespace, self.dest, values)


def add_commands(commands: Any) -> None:
    command = add_command(
        commands,
        "pretrain",
        run_pretrain,
        "learn from images without labels",
        usage="unitsphere pretrain [METHOD] --data DATA --out RUN [--FIELD VALUE ...]",
        epilog="Methods and recipes have defaults of their own: --dry-run shows what yours come to.\n\nexamples:\n"
        "  unitsphere pretrain moco-v2 --data ./photos --out runs/photos\n"
        "  unitsphere pretrain moco-v2 --data cifar10=/data/cifar --out runs/c --epochs 100 --symmetric\n"
        "  unitsphere pretrain --config runs/c/config.json --out runs/c2 --seed 1\n"
        "  unitsphere pretrain --out runs/c --resume --epochs 200\n",
    )
    method: dict[str, Any] = {"default": argparse.SUPPRESS, "metavar": "METHOD"}
    command.add_argument("method", nargs="?", help="see `unitsphere methods`", action=OnlyOnce, **method)
    # The field's name, as for all others. Of two methods the last would win, unsaid.
    command.add_argument("--method", help=argparse.SUPPRESS, action=OnlyOnce, **method)
    command.add_argument("--out", required=True, metavar="RUN", help="the folder of the run")
    command.add_argument("--config", metavar="FILE", help="a TOML or JSON file of fields")
    command.add_argument("--resume", action="store_true", help="continue the run in RUN; start it if there is none")
    command.add_argument(
        "--dry-run", action="store_true", help="print the configuration, the memory and the hours, and stop"
    )
    command.add_argument("--quiet", action="store_true", help="print warnings and errors alone")
    command.before_parsing = partial(add_fields, command)


def add_fields(command: Parser, words: Sequence[str]) -> None:
    """An option for each field of the named methods or, if the words name one from outside, of that method."""
    from unitsphere.methods.catalogue import SECTIONS, find_method, sections_of

    outside = outside_method(words)
    sections = SECTIONS if outside is None else sections_of(find_method(outside, outside))
    for section in sections:
        group = command.add_argument_group(section.__doc__ or "")
        for name in section.__annotations__:
            if name != "method":
                add_field(group, name, section.model_fields[name])


def outside_method(words: Sequence[str]) -> str | None:
    """The method from outside the package that a command line names: `package.module:Class` or an entry point."""
    from unitsphere.methods.catalogue import is_outside

    for before, word in pairwise(["pretrain", *words]):
        if before == "--method" or not (before.startswith("-") or word.startswith("-")):
            if is_outside(word):
                return word
        elif word.startswith("--method=") and is_outside(word.removeprefix("--method=")):
            return word.removeprefix("--method=")
    return None


def add_field(group: Any, name: str, field: Any) -> None:
    """A field of the configuration as an option. Its text is checked by the field itself, as in a file."""
    known = "" if field.is_required() or field.default in (None, ()) else f" (default: {shown(field.default)})"
    about = f"{field.description}{known}".replace("%", "%%")
    kind = kind_of(field.annotation)
    alone: dict[str, Any] = {"nargs": "?", "const": "true"} if kind == "BOOL" else {}
    flag = "--" + name.replace("_", "-")
    group.add_argument(flag, dest=name, default=argparse.SUPPRESS, metavar=kind, help=about, **alone)


def kind_of(annotation: Any) -> str:
    """What an option takes, in a word: of the types that fields have."""
    if get_origin(annotation) in (UnionType, Union):
        return kind_of(next(kind for kind in get_args(annotation) if kind is not type(None)))
    if get_origin(annotation) is Annotated:
        return kind_of(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    if get_origin(annotation) is tuple:
        first, second = get_args(annotation)
        return f"{kind_of(first)},.." if second is ... else "A,B"
    return {bool: "BOOL", int: "N", float: "X"}.get(annotation, "TEXT")


def shown(value: Any) -> str:
    return (
        ",".join(f"{v:g}" for v in value)
        if isinstance(value, tuple)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def given_fields(options: argparse.Namespace) -> dict[str, Any]:
    from unitsphere.methods.catalogue import FIELDS, find_method, is_outside

    fields, method = dict(FIELDS), getattr(options, "method", None)
    if method is not None and is_outside(method):
        fields |= find_method(method, method).Config.model_fields
    chosen = {name: value for name, value in vars(options).items() if name in fields and value is not None}
    optional = {name for name, field in fields.items() if type(None) in get_args(field.annotation)}
    return {name: None if value == "none" and name in optional else value for name, value in chosen.items()}


def run_pretrain(options: argparse.Namespace) -> None:
    from pathlib import Path

    from unitsphere.config.layers import Layer, read_file
    from unitsphere.methods.resolve import request

    given = Layer("command line", given_fields(options))
    file = Layer(f"file {options.config}", read_file(options.config)) if options.config else None
    if not options.resume:
        request(given, file)  # a wrong field is told before torch is loaded

    from unitsphere.common.distributed import process_group, rank, world
    from unitsphere.jobs.pretrain import check, train
    from unitsphere.runs.run import Run
    from unitsphere.training.prepare import prepare

    run = Run(Path(options.out))
    with process_group():
        prepared = prepare(run, given, file, options.resume, dry=options.dry_run)
        ranks, speaks = world(), rank() == 0
        if options.dry_run:
            check(prepared)
        if speaks and (options.dry_run or not options.quiet):
            print_plan(prepared, everything=options.dry_run)
        if not options.dry_run:
            train(prepared, run, verbose=not options.quiet)
    if options.dry_run and speaks:
        print_estimate(prepared, ranks)


def print_plan(prepared: Any, everything: bool) -> None:
    """What will be run, and where each setting comes from. Of a run that goes on, only what is given now."""
    from rich.markup import escape
    from rich.table import Table

    from unitsphere.common.terminal import Screen
    from unitsphere.methods.resolve import as_table

    table = Table(box=None, pad_edge=False)
    for heading in ("field", "value", "from"):
        table.add_column(heading, overflow="fold")
    resumes = prepared.done is not None
    resolved = prepared.resolved
    for name, value, origin in as_table(resolved):
        shown = everything or (name in resolved.given if resumes else origin != "default")
        if shown and (name in resolved.given or not resolved.why_unused(name)):
            table.add_row(name, escape(value), escape(origin))
    plan = prepared.plan
    console = Screen(highlight=False)
    if table.rows:
        console.print(table)
    if everything:  # otherwise the run says them when it starts
        for note in prepared.resolved.notes:
            console.print(note, markup=False)
    left = f", of which {prepared.steps_left:,} are left" if resumes else ""
    console.print(
        f"{plan.images:,} images, {plan.steps_per_epoch:,} steps an epoch, {plan.steps:,} steps{left}; "
        f"learning rate {prepared.config.learning_rate:g}; {prepared.precision} on {prepared.device}"
    )


def print_estimate(prepared: Any, ranks: int) -> None:
    """What the run will take, and how that was found."""
    from rich.console import Console

    from unitsphere.common.errors import UnitsphereError, UsageError
    from unitsphere.jobs.pretrain import memory_errors
    from unitsphere.training.estimate import estimate_memory, estimate_time, take_sample

    console = Console(highlight=False)
    sample = take_sample(prepared)
    try:
        print_memory(prepared, estimate_memory(prepared, sample, ranks), ranks, console)
    except UsageError:
        raise
    except UnitsphereError as error:
        console.print(f"memory: not known: {error}")
    with memory_errors(prepared):
        time = estimate_time(prepared, sample, ranks)
    taken = "" if time.reserved is None else f" and {size(time.reserved)} of memory"
    console.print(
        f"time: about {hours(time.hours)} for {prepared.steps_left:,} steps of {seconds(time.step)}. A step of "
        f"{time.images} images took {seconds(time.seconds)}{taken} here just now, its views included; a worker needs "
        f"{seconds(sample.seconds)} for an image. Not counted: compiling, checkpoints, online k-NN, and what processes "
        "say to each other."
    )


def print_memory(prepared: Any, memory: dict[str, int], ranks: int, console: Any) -> None:
    from rich.table import Table

    from unitsphere.common.machine import free_memory

    config, total, free = prepared.config, sum(memory.values()), free_memory(prepared.device)
    where = f"{prepared.device}, of which {size(free)} are free" + (", for each process" if ranks > 1 else "")
    console.print(f"memory: about {size(total)} on {where}, and what kernels need to work in")
    held = config.batch_size // ranks // config.accumulate
    about = {"activations": f"of {held} images in {prepared.precision}, by tracing a step", "images": "all, decoded"}
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, count in memory.items():
        table.add_row(f"  {name}", size(count), about.get(name, ""))
    console.print(table)
    if total > free:
        console.print("It will not fit: lower --batch-size or --image-size, or give --accumulate or --resident false.")


def size(count: float) -> str:
    unit, power = next(((unit, power) for unit, power in (("GiB", 30), ("MiB", 20)) if count >= 2**power), ("KiB", 10))
    return f"{count / 2**power:.1f} {unit}"


def seconds(count: float) -> str:
    return f"{count:.2f} s" if count >= 1 else f"{1000 * count:.3g} ms"


def hours(count: float) -> str:
    if count >= 1:
        return f"{count:.1f} hours"
    return f"{60 * count:.1f} minutes" if 60 * count >= 1 else f"{3600 * count:.0f} seconds"
