"""The command. Thin: it turns words into the same calls that Python makes.

Nothing here imports torch before a command needs it, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from unitsphere.cli import analyse, data, doctor, evaluate, pretrain, study
from unitsphere.cli.command import Parser
from unitsphere.common.allocator import fast_cpu
from unitsphere.common.errors import UnitsphereError, UsageError, nearest
from unitsphere.common.version import __version__

__all__ = ["main"]

CALLED_ELSEWHERE = {
    "wd": "weight-decay",
    "tau": "temperature",
    "learning-rate": "lr",
    "arch": "backbone",
    "model": "backbone",
    "bs": "batch-size",
    "b": "batch-size",
    "gpu": "device",
    "num-workers": "workers",
    "j": "workers",
    "output": "out",
    "output-dir": "out",
    "amp": "precision",
    "dataset": "data",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 2 for a mistake in what was asked, 1 for a failure on the way."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    fast_cpu()
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
    except BrokenPipeError:  # `unitsphere methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            raise
        return complain(error)


def complain(error: BaseException) -> int:
    """Say what went wrong in words a person can act on. What all ranks would say, the first says alone."""
    rank = os.environ.get("RANK", "0") if "LOCAL_RANK" in os.environ else "0"
    who = "unitsphere" if rank == "0" else f"unitsphere, rank {rank}"
    if isinstance(error, UnitsphereError):
        if rank == "0" or not error.of_all:
            print(f"{who}: {error}", file=sys.stderr)
        return error.exit_status
    if isinstance(error, KeyboardInterrupt):
        print(f"{who}: interrupted", file=sys.stderr)
        return 1
    print(f"{who}: {type(error).__name__}: {error}\n(--debug shows where)", file=sys.stderr)
    return 1


def refuse_unknown(parser: argparse.ArgumentParser, words: list[str], unknown: list[str]) -> None:
    """An option that does not exist: name it and the nearest that does."""
    command = named_command(parser, words)
    known = [option for action in command._actions for option in action.option_strings]
    options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    lines = [f"{option}: there is no such option.{meant(option, known)}" for option in options]
    if not lines:
        data = " Did you mean --data {}?" if "--data" in known and "--data" not in words else ""
        lines = [f"{word!r}: nothing takes this word.{data.format(word)}" for word in unknown]
    raise UsageError("\n".join([*lines, f"`{command.prog} --help` lists what there is."]))


def meant(option: str, known: list[str]) -> str:
    """The option that is called so elsewhere, or whose name is near."""
    word, names = option.lstrip("-"), [name.lstrip("-") for name in known if name.startswith("--")]
    other = CALLED_ELSEWHERE.get(word)
    return f" Did you mean --{other}?" if other in names else nearest(word, names).replace("mean ", "mean --")


def named_command(parser: argparse.ArgumentParser, words: list[str]) -> argparse.ArgumentParser:
    """The command that the words name, or the command of that command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            place = next((place for place, word in enumerate(words) if word in action.choices), None)
            if place is not None:
                return named_command(action.choices[words[place]], words[place + 1 :])
    return parser


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="unitsphere",
        description="Learns image representations without labels.",
        allow_abbrev=False,
        epilog="`unitsphere COMMAND --help` says more. --debug shows a traceback on errors.",
    )
    parser.add_argument("--version", action="version", version=f"unitsphere {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for part in (pretrain, evaluate, analyse, study, data, doctor):
        part.add_commands(commands)
    return parser
