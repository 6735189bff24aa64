"""unitsphere evaluate, unitsphere embed"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from unitsphere.cli.command import add_command, print_broken, whole_numbers, words
from unitsphere.common.errors import UsageError
from unitsphere.common.outside import installed_names
from unitsphere.evaluation.options import Architecture, Options
from unitsphere.evaluation.protocols import GROUP, PROTOCOLS, find_protocol
from unitsphere.evaluation.settings import Settings

FEW = 100  # judged images: one of fewer is more than a point
ALSO = {"recipe": ["--as"]}  # other spellings of an option


def add_commands(commands: Any) -> None:
    add_evaluate(commands)
    add_embed(commands)


def add_evaluate(commands: Any) -> None:
    command = add_command(
        commands,
        "evaluate",
        run_evaluate,
        "judge a backbone on labelled images",
        conflict_handler="resolve",  # a protocol from outside may have its own meaning of an option
        epilog="protocols:\n"
        + "".join(f"  {name:<9} {protocol.summary}\n" for name, protocol in PROTOCOLS.items())
        + "Others are named package.module:NAME, or as an installed package calls them.\n"
        "`unitsphere evaluate --protocol NAME --help` lists their settings too.\n\nexamples:\n"
        "  unitsphere evaluate runs/c --protocol knn --data cifar10=/data/cifar\n"
        "  unitsphere evaluate runs/c --protocol linear --data ./photos\n"
        "  unitsphere evaluate runs/c --protocol semi --fraction 0.01 --data cifar10=/data/cifar\n"
        "  unitsphere evaluate runs/c --protocol svm --data voc2007=/data/voc\n"
        "  unitsphere evaluate random --backbone resnet18 --stem small --image-size 32 --protocol knn --data cifar10\n",
    )
    add_backbone(command)
    command.add_argument("--protocol", required=True, metavar="NAME", help=f"how to judge: {', '.join(PROTOCOLS)}")
    command.add_argument("--data", required=True, help="labelled images: a name, name=path, a folder, a list or a pack")
    add_field(command, "seed", Settings.model_fields["seed"])
    add_settings(command, PROTOCOLS)

    def add_those_from_outside(given: Sequence[str]) -> None:
        """The options of a protocol from outside are known once its name is."""
        if "--help" in given or "-h" in given:
            installed = ", ".join(installed_names(GROUP))
            command.epilog = f"{command.epilog}\ninstalled: {installed}\n" if installed else command.epilog
        name = value_of("--protocol", given)
        if name is not None and name not in PROTOCOLS:
            add_settings(command, {name: find_protocol(name, "--protocol")})

    command.before_parsing = add_those_from_outside


def value_of(option: str, given: Sequence[str]) -> str | None:
    """Return what follows an option among the words given, also as --option=VALUE; the last where there are several."""
    following = [second for first, second in pairwise(given) if first == option]
    joined = [word.partition("=")[2] for word in given if word.startswith(f"{option}=")]
    found = [*joined, *following]
    return found[-1] if found else None


def add_settings(command: argparse.ArgumentParser, protocols: Mapping[str, Any]) -> None:
    """Add what may be asked of these protocols, in a group for each set of protocols that share an option."""
    takers: dict[str, list[str]] = {}
    for name, protocol in protocols.items():
        for option in protocol.options:
            takers.setdefault(option, []).append(name)
    groups: dict[str, Any] = {}
    for option, names in takers.items():
        title = ", ".join(names)
        if title not in groups:
            groups[title] = command.add_argument_group(title)
        fields = {protocols[name].settings.model_fields[option].description: name for name in reversed(names)}
        about = "; ".join(f"{name}: {text}" for text, name in reversed(fields.items())) if len(fields) > 1 else None
        add_field(groups[title], option, protocols[names[0]].settings.model_fields[option], about)


def add_backbone(command: argparse.ArgumentParser) -> None:
    """Add what `evaluate` and `embed` share."""
    command.add_argument("what", help="a run, a checkpoint, a file of weights, random, pixels or torchvision:NAME")
    for name, field in Options.model_fields.items():
        add_field(command, name, field)
    command.add_argument("--quiet", action="store_true", help="show no progress")
    group = command.add_argument_group("what is not known of weights that are no run")
    for name, field in Architecture.model_fields.items():
        add_field(group, name, field)


def add_field(group: Any, name: str, field: Any, about: str | None = None) -> None:
    """Add a field of a settings model as an option. An option that is not given leaves the default to the model."""
    said = field.default is None or field.default is False or field.is_required()
    known = "" if said else f" (default: {field.default})"
    how: dict[str, Any] = {
        "dest": name,
        "default": argparse.SUPPRESS,
        "help": f"{about or field.description}{known}".replace("%", "%%"),
    }
    kind = plain(field.annotation)
    if kind is bool:
        how["action"] = "store_true"
    elif get_origin(kind) is Literal:
        how["choices"] = get_args(kind)
    elif get_origin(kind) is tuple:
        of = plain(get_args(kind)[0])
        how |= {int: {"type": whole_numbers, "metavar": "N,.."}, float: {"type": numbers, "metavar": "X,.."}}.get(
            of, {"type": words, "metavar": "A,B,.."}
        )
    else:
        how["metavar"] = {int: "N", float: "X", Path: "FILE"}.get(kind, "NAME")
        how["type"] = kind if kind in (int, float) else str
    group.add_argument("--" + name.replace("_", "-"), *ALSO.get(name, []), **how)


def plain(annotation: Any) -> Any:
    """Return the type of a field without its checks, and of `X | None` the X."""
    if get_origin(annotation) in (UnionType, Union):
        return plain(next(kind for kind in get_args(annotation) if kind is not NoneType))
    return plain(get_args(annotation)[0]) if get_origin(annotation) is Annotated else annotation


def numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 20,200") from None


def run_evaluate(options: argparse.Namespace) -> None:
    from unitsphere.evaluation.evaluate import evaluate

    print_result(evaluate(**keywords(options)))


def keywords(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options as the keywords of the Python call."""
    given = {name: value for name, value in vars(options).items() if name not in ("command", "run", "quiet")}
    return given | {"verbose": not options.quiet}


def print_result(result: dict[str, Any]) -> None:
    of = f"{result['backbone']}, {result['features']}" + (f", epoch {result['epoch']}" if result.get("epoch") else "")
    print(f"{result['protocol']} on {result['data']} ({of})")
    for name, value in result["value"].items():
        print(f"  {name:<8} {value:.2f} %")
    if rates := rates_of(result["constants"]):
        print(f"  with a learning rate of {rates}")
    if classes := result.get("classes"):
        number = "1 class" if classes == 1 else f"{classes:,} classes"
        print(f"  {number} in the test images, the largest with {result['largest_class']:.1f} %")
    print_broken(result.get("broken", {}))
    if (judged := result["images"]["test"]) < FEW:
        from unitsphere.common.terminal import warn

        share = "" if "mAP" in result["value"] else f", of which one is {100 / judged:.3g} %"  # of an accuracy
        warn(f"few images: these numbers are of {judged}{share}.")


def rates_of(constants: dict[str, Any]) -> str:
    if "chosen_lr" not in constants:
        return ""
    rates = f"{constants['chosen_lr']:g}"
    if "chosen_encoder_lr" not in constants:
        return rates
    encoder = constants["chosen_encoder_lr"]
    return f"{rates}, {encoder:g} for the encoder" if encoder else f"{rates}, the encoder frozen"


def add_embed(commands: Any) -> None:
    command = add_command(
        commands,
        "embed",
        run_embed,
        "features of images, with file names, nearest neighbours and near-duplicates",
        epilog="example:\n  unitsphere embed runs/photos --data ./photos --out features.npz --neighbours sheet.png\n",
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
    from unitsphere.common.text import printable
    from unitsphere.evaluation.embed import embed

    if not (options.out or options.neighbours or options.duplicates):
        raise UsageError("embed: say what to make: --out FILE, --neighbours PNG or --duplicates COSINE.")
    found = embed(**keywords(options))
    missing = f", {len(found.broken):,} left out" if found.broken else ""
    print(f"{len(found.names):,} images, {found.features.shape[1]} features each{missing}")
    for path in (options.out, options.neighbours):
        if path:
            print(f"wrote {path}")
    print_broken(found.broken)
    for first, second, score in found.duplicates:
        print(f"{score:.4f}  {printable(found.names[first])}  {printable(found.names[second])}")
