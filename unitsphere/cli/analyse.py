"""unitsphere analyse"""

from __future__ import annotations

import argparse
from typing import Any

from unitsphere.cli.command import add_command, whole_numbers, words

WHAT = {
    "similarity": "how alike the augmentations of an image are (JCL, Fig. M.3)",
    "gradient": "the query's gradient and the mutual-information bound over K, on checkpoints (EqCo, Fig. 1 and 2)",
    "training": "the same, loss and proxy accuracy over epochs, as logged (EqCo, Fig. 1 and 2; MoCHi, Fig. 4)",
    "geometry": "alignment and uniformity over checkpoints (MoCHi, Fig. 3c)",
    "hardness": "matching probabilities, proxy accuracy, false negatives over checkpoints (MoCHi, Fig. 2)",
    "tsne": "a query on a random sphere with mixed negatives; takes no run (MoCHi, Fig. 1)",
}


def add_commands(commands: Any) -> None:
    command = add_command(
        commands,
        "analyse",
        run_analyse,
        "draw what the papers plot of one run or several, with the numbers as JSON",
        epilog="what:\n" + "".join(f"  {name:<11} {text}\n" for name, text in WHAT.items()) + "\nexamples:\n"
        "  unitsphere analyse runs/moco runs/jcl --what similarity --out figures\n"
        "  unitsphere analyse runs/moco --what gradient --negatives 16,256,4096 --alpha 65536\n",
    )
    command.add_argument("runs", nargs="*", metavar="RUN", help="one run or several, side by side")
    command.add_argument("--what", required=True, choices=tuple(WHAT), metavar="NAME", help=", ".join(WHAT))
    command.add_argument("--data", help="the images, where they are not (or no longer) what the runs say")
    command.add_argument(
        "--out", metavar="DIR", help="where NAME.json and NAME.png go (default for one run: RUN/analysis)"
    )
    command.add_argument("--names", type=words, metavar="A,B,..", help="what the runs are called in the figure")
    command.add_argument("--format", choices=("png", "svg", "pdf"), default="png", help="of the figure (default: png)")
    command.add_argument("--batch-size", type=int, default=256, metavar="N",
                         help="images at once (default: 256); gradient and hardness take the run's")  # fmt: skip
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    command.add_argument("--seed", type=int, default=0, metavar="N",
                         help="of the images, views and negatives that are drawn (default: 0)")  # fmt: skip
    command.add_argument("--quiet", action="store_true", help="show no progress")
    add_settings(command.add_argument_group("settings of one analysis or another"))


def add_settings(group: Any) -> None:
    def add(name: str, help: str, **more: Any) -> None:
        group.add_argument(f"--{name}", default=argparse.SUPPRESS, help=help, **more)

    add("images", "how many images (similarity, geometry: 32768; gradient, hardness: 4096)", type=int, metavar="N")
    add("split", "similarity (train), geometry (val): which images", choices=("train", "val"))
    add("features", "similarity, geometry: backbone, or backbone and head", choices=("backbone", "embedding"))
    add("augmentations", "similarity: of each image (32)", type=int, metavar="A")
    add("positives", "geometry: images of one class, or two views of one image", choices=("class", "views"))
    add("negatives", "gradient: numbers of negatives (16, 64, .. the queue's size)", type=whole_numbers, metavar="K,..")
    add("alpha", "gradient: EqCo's alpha (the queue's size)", type=float)
    add("top", "hardness: how many of the hardest negatives (1024)", type=int, metavar="N")
    add("mixing", "hardness: what is mixed, in place of each run's own; tsne (50,50,25)", type=whole_numbers,
        metavar="N,S,S'")  # fmt: skip
    add("points", "tsne: how many on the sphere (500)", type=int, metavar="N")
    add("dim", "tsne: of the sphere's space (32)", type=int, metavar="D")


def run_analyse(options: argparse.Namespace) -> None:
    from unitsphere.analysis.analyse import analyse

    apart = ("command", "run", "runs", "what", "quiet")
    given = {name: value for name, value in vars(options).items() if name not in apart}
    for path in analyse(options.runs, options.what, verbose=not options.quiet, **given):
        print(f"wrote {path}")
