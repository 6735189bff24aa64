"""unitsphere evaluate, unitsphere embed"""

from __future__ import annotations

import argparse
import re
from typing import Any

from unitsphere.cli.command import add_command, print_broken
from unitsphere.common.errors import UsageError

FEW = 100  # judged images: one of fewer is more than a point


def add_commands(commands: Any) -> None:
    add_evaluate(commands)
    add_embed(commands)


def add_backbone(command: argparse.ArgumentParser) -> None:
    command.add_argument("what", help="a run, a checkpoint, a file of weights, random, pixels or torchvision:NAME")
    command.add_argument(
        "--features",
        choices=("backbone", "embedding"),
        default="backbone",
        help="the backbone's output, or that of backbone and head (runs only; default: backbone)",
    )
    command.add_argument("--batch-size", type=int, metavar="N", help="images at once (default: 256; more on CUDA)")
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    command.add_argument(
        "--holdout",
        type=float,
        metavar="SHARE",
        help="share of the val split where the data has none (default: the run's, else 0.1)",
    )
    command.add_argument(
        "--classes", type=words, metavar="A,B,..", help="only these classes, by name (default: the run's, on its data)"
    )
    command.add_argument(
        "--max-broken", type=float, metavar="SHARE", help="unreadable images that may be skipped (default: the run's)"
    )
    group = command.add_argument_group("what is not known of weights that are no run")
    group.add_argument("--backbone", help="architecture (default: resnet50)")
    group.add_argument("--stem", choices=("imagenet", "small"), help="of a ResNet (default: imagenet)")
    group.add_argument("--image-size", type=int, metavar="S", help="input size (default: 224)")
    group.add_argument("--channels", type=int, metavar="C", help="input channels (default: 3)")


def numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 20,200") from None


def words(text: str) -> list[str]:
    """Parted by commas, but not by those in parentheses."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 20,200") from None


SETTINGS = ("k", "temperature", "row", "lr", "epochs", "augment", "encoder_lr", "fraction", "labelled")


def add_evaluate(commands: Any) -> None:
    command = add_command(
        commands,
        "evaluate",
        run_evaluate,
        "judge a backbone on labelled images",
        epilog="examples:\n"
        "  unitsphere evaluate runs/c --protocol knn --data cifar10=/data/cifar\n"
        "  unitsphere evaluate runs/c --protocol linear --data ./photos\n"
        "  unitsphere evaluate runs/c --protocol semi --fraction 0.01 --data cifar10=/data/cifar\n"
        "  unitsphere evaluate runs/c --protocol svm --data voc2007=/data/voc\n"
        "  unitsphere evaluate random --backbone resnet18 --stem small --image-size 32 --protocol knn --data cifar10\n",
    )
    add_backbone(command)
    command.add_argument(
        "--protocol",
        choices=("knn", "linear", "transfer", "semi", "finetune", "svm"),
        required=True,
        help="how to judge: neighbours; a linear layer; the same with the settings for other data; fine-tuning with "
        "few labels; fine-tuning; support vector machines",
    )
    command.add_argument("--data", required=True, help="labelled images: a name, name=path, a folder, a list or a pack")
    command.add_argument("--seed", type=int, default=0, help="of classifiers, held-out tenths, folds and fractions")
    knn = command.add_argument_group("knn")
    knn.add_argument(
        "--k", type=whole_numbers, metavar="K,..", help="numbers of neighbours (default: 20,200, or what there is)"
    )
    knn.add_argument("--temperature", type=float, metavar="T", help="votes weigh exp(cosine/T) (default: 0.1)")
    trained = command.add_argument_group("linear, transfer, semi, finetune")
    trained.add_argument(
        "--as",
        dest="row",
        metavar="NAME",
        help="whose settings. linear, transfer: moco (linear's default), jcl-imagenet100, mochi-imagenet100, "
        "mochi-imagenet, byol, inaturalist2018, places205 (transfer's default is that of the data, else "
        "inaturalist2018); semi, finetune: msbreg-1%%, msbreg-10%% (semi's default is the nearer), full",
    )
    trained.add_argument(
        "--lr",
        type=numbers,
        metavar="LR,..",
        help="of the classifier: one rate, or several to choose from on held-out training images",
    )
    trained.add_argument("--epochs", type=int, metavar="N", help="epochs; the drops keep their share of them")
    linear = command.add_argument_group("linear, transfer")
    linear.add_argument(
        "--augment",
        action="store_true",
        default=None,
        help="the faithful form: fresh crops and flips each epoch (slow)",
    )
    tuned = command.add_argument_group("semi, finetune (--batch-size is that of a step; default: the settings')")
    tuned.add_argument("--encoder-lr", type=numbers, metavar="LR,..", help="of the backbone; 0 leaves it as it is")
    semi = command.add_argument_group("semi")
    semi.add_argument("--fraction", type=float, metavar="SHARE", help="of every class that is labelled, e.g. 0.01")
    semi.add_argument("--labelled", metavar="FILE", help="instead: the labelled training images, one name a line")


def run_evaluate(options: argparse.Namespace) -> None:
    from unitsphere.evaluation.evaluate import evaluate

    settings = {name: getattr(options, name) for name in ("protocol", "data", "seed", *SETTINGS)}
    print_result(evaluate(options.what, **backbone_options(options), **settings))


def backbone_options(options: argparse.Namespace) -> dict[str, Any]:
    names = (
        "features", "batch_size", "device", "holdout", "classes", "max_broken", "backbone", "stem", "image_size",
        "channels",
    )  # fmt: skip
    return {name: getattr(options, name) for name in names}


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

        share = "" if "mAP" in result["value"] else f", of which one is {100 / judged:.2g} %"  # of an accuracy
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
    found = embed(
        options.what, data=options.data, split=options.split, out=options.out, neighbours=options.neighbours,
        duplicates=options.duplicates, **backbone_options(options),
    )  # fmt: skip
    missing = f", {len(found.broken):,} left out" if found.broken else ""
    print(f"{len(found.names):,} images, {found.features.shape[1]} features each{missing}")
    for path in (options.out, options.neighbours):
        if path:
            print(f"wrote {path}")
    print_broken(found.broken)
    for first, second, score in found.duplicates:
        print(f"{score:.4f}  {printable(found.names[first])}  {printable(found.names[second])}")
