"""unitsphere pack, unitsphere methods, unitsphere data"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from unitsphere.cli.command import add_command, print_broken


def add_commands(commands: Any) -> None:
    add_pack(commands)
    add_methods(commands)
    add_data(commands)


def add_pack(commands: Any) -> None:
    command = add_command(
        commands,
        "pack",
        run_pack,
        "write a data set, still encoded, into one fast file",
        epilog="example:\n"
        "  unitsphere pack --data ./photos --out photos.pack --size 512\n"
        "  unitsphere pretrain moco-v2 --data photos.pack --out runs/p\n",
    )
    command.once_words, command.instead = ("data", "out"), "check"
    command.add_argument("--data", help="images: a name, name=path, a folder or a list (required)")
    command.add_argument("--out", metavar="FILE", help="the file to write (required)")
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
    command.add_argument("--quiet", action="store_true", help="show no progress")
    command.add_argument(
        "--max-pixels",
        type=int,
        default=100_000_000,
        metavar="N",
        help="pixels of an image; one with more counts as unreadable (default: 100000000)",
    )
    command.add_argument("--check", metavar="PACK", help="compare a pack, byte for byte, with its checksums")


def in_split(count: int, split: str) -> str:
    return f"{count:,}" if split == "all" else f"{count:,} {split}"


def run_pack(options: argparse.Namespace) -> None:
    from unitsphere.common.text import printable
    from unitsphere.data.packfile import check_pack

    if options.check is not None:
        checked = check_pack(options.check)
        counts = ", ".join(in_split(count, split) for split, count in checked.images.items())
        print(f"{checked.path}: {counts} images, {checked.size / 2**20:,.1f} MiB, every byte as it was written")
        return
    from unitsphere.data.commands import pack_data

    packed = pack_data(options.data, options.out, size=options.size, quality=options.quality,
                       max_broken=options.max_broken, max_pixels=options.max_pixels,
                       verbose=not options.quiet)  # fmt: skip
    counts = ", ".join(in_split(count, split) for split, count in packed.images.items())
    print(f"wrote {packed.path}: {counts} images, {packed.size / 2**20:,.1f} MiB")
    for name, reason in packed.broken.items():
        print(printable(f"left out {name}: {reason}"), file=sys.stderr)


def add_methods(commands: Any) -> None:
    add_command(commands, "methods", run_methods, "list the methods and recipes, with papers, settings and needs")


def run_methods(options: argparse.Namespace) -> None:
    from unitsphere.config.recipes import RECIPES
    from unitsphere.methods.catalogue import METHODS

    for name, method in METHODS.items():
        about = method.about
        print(f"{name}: {about.title} ({about.paper})")
        print(f"    needs     {about.needs}")
        print(f"    settings  {', '.join(f'{key} {value}' for key, value in about.defaults.items())}")
    print(f"\nrecipes (chosen by the data's name, or --recipe): {', '.join(RECIPES)}")


def add_data(commands: Any) -> None:
    command = add_command(
        commands, "data", run_data, "list the named data sets, look at the views of one, or index a large folder"
    )
    actions = command.add_subparsers(dest="action", metavar="ACTION")
    preview = add_command(actions, "preview", run_preview, "write a contact sheet of images and their views as PNG")
    preview.once_words = ("data", "out")
    preview.add_argument("--data", help="images: a name, name=path, a folder, a list or a pack (required)")
    preview.add_argument("--out", metavar="PNG", help="the picture to write (required)")
    preview.add_argument("--views", default="moco-v2", help="augmentation policy (default: moco-v2)")
    preview.add_argument(
        "--image-size", type=int, default=None, metavar="S", help="side of a view (default: from the images)"
    )
    preview.add_argument("--images", type=int, default=8, metavar="N", help="how many images (default: 8)")
    preview.add_argument(
        "--view-count", "--count", dest="count", type=int, default=8, metavar="V", help="views of each (default: 8)"
    )
    preview.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the images and views that are drawn (default: 0)"
    )
    index = add_command(actions, "index", run_index, "list a large folder once, so that it opens at once later")
    index.once_words = ("data",)
    index.add_argument("--data", help="images: a folder, name=path, or tar files (required)")
    index.add_argument("--refresh", action="store_true", help="list it anew, whatever is remembered")


def run_data(options: argparse.Namespace) -> None:
    from unitsphere.data.named import NAMED
    from unitsphere.views.policies import POLICIES, VIEWS

    print("named data sets (--data NAME or NAME=PATH):")
    for name, named in NAMED.items():
        print(f"  {name:<18} {named.description}")
        for line in textwrap.wrap(named.layout, 99):
            print(f"{'':21}{line}")
    print("\nor a path: a folder (labelled by sub-folders or flat), a list file, a pack (`unitsphere pack`),")
    print("Parquet or tar files or a folder of them")
    print("\naugmentation policies (--views NAME):")
    for name, policy in POLICIES.items():
        print(f"  {name:<18} {policy.describe()}")
    for name, parts in VIEWS.items():
        print(f"  {name:<18} {' and '.join(parts)} in turn")


def run_preview(options: argparse.Namespace) -> None:
    from unitsphere.data.commands import preview

    broken = preview(options.data, options.out, views=options.views, image_size=options.image_size,
                     images=options.images, count=options.count, seed=options.seed)  # fmt: skip
    print(f"wrote {options.out}")
    print_broken(broken)


def run_index(options: argparse.Namespace) -> None:
    from unitsphere.data.index import MANY, index_folder, indexes_of
    from unitsphere.data.source import open_splits

    path = Path(os.path.expanduser(options.data.rpartition("=")[2]))
    folder = path if path.is_dir() else path.parent
    if options.refresh:
        for file in indexes_of(folder):
            file.unlink()
    started = time.perf_counter()
    counts = {split: len(open()) for split, open in open_splits(options.data).items()}
    seconds = time.perf_counter() - started
    found = ", ".join(in_split(count, split) for split, count in counts.items())
    print(f"{options.data}: {found} images in {seconds:.1f} s")
    indexes = indexes_of(folder)
    for file, count in indexes.items():
        print(f"  {count:,} remembered in {file} ({file.stat().st_size / 2**20:.1f} MiB)")
    if not indexes:
        print(f"  nothing is remembered in {index_folder()}: fewer than {MANY:,} images are listed anew each time")
