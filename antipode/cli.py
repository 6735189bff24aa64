"""The command. Thin: it turns words into the same calls that Python makes.

Nothing here imports torch before a command needs it, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from antipode import __version__
from antipode.errors import AntipodeError, UsageError, nearest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 2 for a mistake in what was asked, 1 for a failure on the way."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    parser = build_parser()
    try:
        options, unknown = parser.parse_known_args(words)
        if unknown:
            refuse_unknown(parser, words, unknown)
        if options.command is None:
            parser.print_help()
            return 0
        options.run(options)
        return 0
    except SystemExit as leaving:  # argparse: --help, --version, or a mistake that it has explained
        return int(leaving.code or 0)
    except BrokenPipeError:  # `antipode methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (AntipodeError, KeyboardInterrupt, Exception) as error:
        if debug:
            raise
        return complain(error)


def complain(error: BaseException) -> int:
    """Say what went wrong in words a person can act on."""
    if isinstance(error, AntipodeError):
        print(f"antipode: {error}", file=sys.stderr)
        return error.exit_status
    if isinstance(error, KeyboardInterrupt):
        print("antipode: interrupted", file=sys.stderr)
        return 1
    print(f"antipode: {type(error).__name__}: {error}\n(--debug shows where)", file=sys.stderr)
    return 1


def refuse_unknown(parser: argparse.ArgumentParser, words: list[str], unknown: list[str]) -> None:
    """An option that does not exist: name it and the nearest that does."""
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    command = next((commands[word] for word in words if word in commands), parser)
    known = [option for action in command._actions for option in action.option_strings]
    lines = [
        f"{word.partition('=')[0]}: there is no such option.{nearest(word.partition('=')[0], known)}"
        if word.startswith("-")
        else f"{word!r}: nothing takes this word."
        for word in unknown
    ]
    raise UsageError("\n".join([*lines, f"`{command.prog} --help` lists what there is."]))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="antipode",
        description="Learns image representations without labels.",
        allow_abbrev=False,
        epilog="`antipode COMMAND --help` says more. --debug shows a traceback on errors.",
    )
    parser.add_argument("--version", action="version", version=f"antipode {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for add in (add_pretrain, add_evaluate, add_embed, add_pack, add_methods, add_data):
        add(commands)
    return parser


def add_command(commands: Any, name: str, run: Any, help: str, **more: Any) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=help, description=help[0].upper() + help[1:] + ".", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, **more,
    )  # fmt: skip
    command.set_defaults(run=run)
    return command


# --- pretrain -----------------------------------------------------------------------------------------------------


def add_pretrain(commands: Any) -> None:
    from antipode.config.fields import SECTIONS

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
    from antipode.config.resolve import FIELDS

    chosen = {name: value for name, value in vars(options).items() if name in FIELDS and value is not None}
    return {name: None if value == "none" else value for name, value in chosen.items()}


def run_pretrain(options: argparse.Namespace) -> None:
    from pathlib import Path

    from antipode.config.resolve import Layer, read_file, resolve

    given = Layer("command line", given_fields(options))
    file = Layer(f"file {options.config}", read_file(options.config)) if options.config else None
    if not (options.resume and Path(options.out).exists()):
        resolve(given, file=file)  # a wrong field is told before torch is loaded

    from antipode.training.prepare import prepare
    from antipode.training.pretrain import train
    from antipode.training.run import Run

    run = Run(Path(options.out))
    prepared = prepare(run, given, file, options.resume)
    print_plan(prepared, everything=options.dry_run)
    if not options.dry_run:
        train(prepared, run)


def print_plan(prepared: Any, everything: bool) -> None:
    """What will be run, and where each setting comes from."""
    from rich.console import Console
    from rich.table import Table

    from antipode.config.resolve import as_table

    table = Table(box=None, pad_edge=False)
    for heading in ("field", "value", "from"):
        table.add_column(heading, overflow="fold")
    for name, value, origin in as_table(prepared.resolved):
        if everything or origin != "default":
            table.add_row(name, value, origin)
    plan = prepared.plan
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{plan.images:,} images, {plan.steps_per_epoch:,} steps an epoch, {plan.steps:,} steps; "
        f"learning rate {prepared.config.learning_rate:g}; {prepared.precision} on {prepared.device}"
    )


# --- evaluate, embed ----------------------------------------------------------------------------------------------


def add_backbone(command: argparse.ArgumentParser) -> None:
    command.add_argument("what", help="a run, a checkpoint, a file of weights, random, or torchvision:NAME")
    command.add_argument("--features", choices=("backbone", "embedding"), default="backbone",
                         help="the backbone's output, or that of backbone and head (runs only; default: backbone)")  # fmt: skip
    command.add_argument("--batch-size", type=int, default=256, metavar="N", help="images at once (default: 256)")
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group = command.add_argument_group("what is not known of weights that are no run")
    group.add_argument("--backbone", default="resnet50", help="architecture (default: resnet50)")
    group.add_argument("--stem", choices=("imagenet", "small"), default="imagenet", help="of a ResNet")
    group.add_argument("--image-size", type=int, default=224, metavar="S", help="input size (default: 224)")
    group.add_argument("--channels", type=int, default=3, metavar="C", help="input channels (default: 3)")


def numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 20,200") from None


def add_evaluate(commands: Any) -> None:
    command = add_command(
        commands,
        "evaluate",
        run_evaluate,
        "judge a frozen backbone on labelled images",
        epilog="examples:\n"
        "  antipode evaluate runs/c --protocol knn --data cifar10=/data/cifar\n"
        "  antipode evaluate runs/c --protocol linear --data ./photos\n"
        "  antipode evaluate random --backbone resnet18 --stem small --image-size 32 --protocol knn --data cifar10\n",
    )
    add_backbone(command)
    command.add_argument("--protocol", choices=("knn", "linear"), required=True, help="how to judge")
    command.add_argument("--data", required=True, help="labelled images: a name, name=path, a folder, a list or a pack")
    command.add_argument("--holdout", type=float, default=0.1, help="share for testing where there is no val split")
    command.add_argument("--seed", type=int, default=0, help="of splits and of the linear layer")
    knn = command.add_argument_group("knn")
    knn.add_argument(
        "--k", type=numbers, default=[20, 200], metavar="K,..", help="numbers of neighbours (default: 20,200)"
    )
    knn.add_argument(
        "--temperature", type=float, default=0.1, metavar="T", help="votes weigh exp(cosine/T) (default: 0.1)"
    )
    linear = command.add_argument_group("linear")
    linear.add_argument("--as", dest="row", default="moco", metavar="NAME",
                        help="whose protocol: moco, jcl-imagenet100, mochi-imagenet100, mochi-imagenet, byol (default: moco)")  # fmt: skip
    linear.add_argument(
        "--lr",
        type=numbers,
        metavar="LR,..",
        help="one rate, or several to choose from on held-out training images",
    )
    linear.add_argument("--epochs", type=int, metavar="N", help="epochs; the drops keep their share of them")
    linear.add_argument(
        "--augment", action="store_true", help="the faithful form: fresh crops and flips each epoch (slow)"
    )


def run_evaluate(options: argparse.Namespace) -> None:
    from antipode.evaluation.evaluate import evaluate

    settings: dict[str, Any] = {"seed": options.seed, "holdout": options.holdout}
    if options.protocol == "knn":
        settings |= {"k": [int(k) for k in options.k], "temperature": options.temperature}
    else:
        settings |= {
            "row": options.row,
            "lr": options.lr,
            "epochs": options.epochs,
            "augment": options.augment,
        }
    result = evaluate(
        options.what, protocol=options.protocol, data=options.data, **backbone_options(options), **settings
    )
    print_result(result)


def backbone_options(options: argparse.Namespace) -> dict[str, Any]:
    names = ("features", "batch_size", "device", "backbone", "stem", "image_size", "channels")
    return {name: getattr(options, name) for name in names}


def print_result(result: dict[str, Any]) -> None:
    of = f"{result['backbone']}, {result['features']}" + (f", epoch {result['epoch']}" if result.get("epoch") else "")
    print(f"{result['protocol']} on {result['data']} ({of})")
    for name, value in result["value"].items():
        print(f"  {name:<8} {value:.2f} %")


def add_embed(commands: Any) -> None:
    command = add_command(
        commands,
        "embed",
        run_embed,
        "features of images, with file names, nearest neighbours and near-duplicates",
        epilog="example:\n  antipode embed runs/photos --data ./photos --out features.npz --neighbours sheet.png\n",
    )
    add_backbone(command)
    command.add_argument("--data", required=True, help="images: a name, name=path, a folder, a list or a pack")
    command.add_argument("--split", choices=("all", "train", "val"), default="all", help="which images (default: all)")
    command.add_argument("--out", metavar="FILE", help="features as .npz or .parquet")
    command.add_argument("--neighbours", metavar="PNG", help="a contact sheet of images and their nearest neighbours")
    command.add_argument(
        "--duplicates", type=float, metavar="COSINE", help="also list pairs at least this similar, e.g. 0.98"
    )


def run_embed(options: argparse.Namespace) -> None:
    from antipode.evaluation.embed import embed

    if not (options.out or options.neighbours or options.duplicates):
        raise UsageError("embed: say what to make: --out FILE, --neighbours PNG or --duplicates COSINE.")
    found = embed(
        options.what, data=options.data, split=options.split, out=options.out, neighbours=options.neighbours,
        duplicates=options.duplicates, **backbone_options(options),
    )  # fmt: skip
    print(f"{len(found.names):,} images, {found.features.shape[1]} features each")
    for path in (options.out, options.neighbours):
        if path:
            print(f"wrote {path}")
    for first, second, score in found.duplicates:
        print(f"{score:.4f}  {found.names[first]}  {found.names[second]}")


# --- data, methods ------------------------------------------------------------------------------------------------


def add_pack(commands: Any) -> None:
    command = add_command(
        commands,
        "pack",
        run_pack,
        "write a data set, still encoded, into one fast file",
        epilog="example:\n  antipode pack ./photos photos.pack --size 512\n  antipode pretrain moco-v2 --data photos.pack --out runs/p\n",
    )
    command.add_argument("data", help="a name, name=path, a folder or a list")
    command.add_argument("out", metavar="FILE", help="the file to write")
    command.add_argument(
        "--size", type=int, metavar="S", help="shrink images once so that the shorter side is S at most"
    )
    command.add_argument(
        "--quality", type=int, default=90, metavar="Q", help="JPEG quality of shrunk images (default: 90)"
    )
    command.add_argument(
        "--max-broken",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="unreadable images that may be skipped (default: 0.01)",
    )


def run_pack(options: argparse.Namespace) -> None:
    from antipode.data.commands import pack_data

    packed = pack_data(options.data, options.out, size=options.size, quality=options.quality,
                       max_broken=options.max_broken)  # fmt: skip
    counts = ", ".join(f"{count:,} {split}" for split, count in packed.images.items())
    print(f"wrote {packed.path}: {counts} images, {packed.size / 2**20:,.1f} MiB")
    for name, reason in packed.broken.items():
        print(f"left out {name}: {reason}", file=sys.stderr)


def add_methods(commands: Any) -> None:
    add_command(commands, "methods", run_methods, "list the methods and recipes, with papers, settings and needs")


def run_methods(options: argparse.Namespace) -> None:
    from antipode.config.catalogue import METHODS, RECIPES

    for name, method in METHODS.items():
        print(f"{name}: {method.title} ({method.paper})")
        print(f"    needs     {method.needs}")
        print(f"    settings  {', '.join(f'{key} {value}' for key, value in method.patch.items())}")
    print(f"\nrecipes (chosen by the data's name, or --recipe): {', '.join(RECIPES)}")


def add_data(commands: Any) -> None:
    command = add_command(commands, "data", run_data, "list the named data sets, or look at the views of a data set")
    actions = command.add_subparsers(dest="action", metavar="ACTION")
    preview = add_command(actions, "preview", run_preview, "write a contact sheet of images and their views as PNG")
    preview.add_argument("data", help="a name, name=path, a folder, a list or a pack")
    preview.add_argument("--out", required=True, metavar="PNG", help="the picture to write")
    preview.add_argument("--views", default="moco-v2", help="augmentation policy (default: moco-v2)")
    preview.add_argument(
        "--image-size", type=int, default=None, metavar="S", help="side of a view (default: from the images)"
    )
    preview.add_argument("--images", type=int, default=8, metavar="N", help="how many images (default: 8)")
    preview.add_argument("--count", type=int, default=8, metavar="V", help="views of each (default: 8)")
    preview.add_argument("--seed", type=int, default=0)


def run_data(options: argparse.Namespace) -> None:
    from antipode.data.named import NAMED
    from antipode.views.policies import POLICIES

    print("named data sets (--data NAME or NAME=PATH):")
    for name, named in NAMED.items():
        print(f"  {name:<18} {named.description}")
    print("\nor a path: a folder (labelled by sub-folders or flat), a list file, a pack (`antipode pack`)")
    print("\naugmentation policies (--views NAME):")
    for name, policy in POLICIES.items():
        print(f"  {name:<18} {policy.describe()}")


def run_preview(options: argparse.Namespace) -> None:
    from antipode.data.commands import preview

    preview(options.data, options.out, views=options.views, image_size=options.image_size, images=options.images,
            count=options.count, seed=options.seed)  # fmt: skip
    print(f"wrote {options.out}")
