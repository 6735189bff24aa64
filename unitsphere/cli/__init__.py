"""The command. Thin: it turns words into the same calls that Python makes.

Nothing here imports torch before a command needs it, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from unitsphere.cli import analyse, data, doctor, evaluate, pretrain, study
from unitsphere.cli.command import Parser
from unitsphere.common.allocator import fast_cpu
from unitsphere.common.errors import UnitsphereError, UsageError, nearest
from unitsphere.common.stopping import Interrupted, Stopped, drop_unread, handled_by, interrupt
from unitsphere.common.text import printable
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
    """Run a command; the exit status is 0, 2 for a mistake in what was asked, 1 for a failure on the way, 75 for a run
    that stopped on request, is saved, and goes on with --resume."""
    with handled_by(interrupt):
        status = run_words(arguments)
        drop_unread(sys.stdout, sys.stderr)
    return status


def run_words(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    fast_cpu()
    parser = build_parser()
    options = argparse.Namespace()
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
        return 0
    except (Exception, KeyboardInterrupt) as error:
        if debug and not isinstance(error, Stopped):
            raise
        with suppress(BrokenPipeError):  # nobody reads what went wrong; the exit status tells it
            print(printable(words_for(error, options), lines=True), end="", file=sys.stderr)
        return status_of(error, options)


def words_for(error: BaseException, options: argparse.Namespace) -> str:
    """Say what went wrong in words a person can act on. What all ranks would say, the first says alone."""
    rank = os.environ.get("RANK", "0") if "LOCAL_RANK" in os.environ else "0"
    who = "unitsphere" if rank == "0" else f"unitsphere, rank {rank}"
    if isinstance(error, UnitsphereError):
        return f"{who}: {error}\n" if rank == "0" or not error.of_all else ""
    if isinstance(error, KeyboardInterrupt):
        by = f" by {error}" if isinstance(error, Interrupted) else ""
        go_on = "; --resume goes on from the last checkpoint, or starts anew" if trains(options) else ""
        return f"{who}: interrupted{by}{go_on}\n"
    if isinstance(error, OSError) and error.strerror:
        return f"{who}: {error.filename or 'a file'}: {error.strerror}\n"
    return f"{who}: {type(error).__name__}: {error}\n(--debug shows where)\n"


def status_of(error: BaseException, options: argparse.Namespace) -> int:
    if isinstance(error, UnitsphereError):
        return error.exit_status
    return Stopped.exit_status if isinstance(error, Interrupted) and trains(options) else 1


def trains(options: argparse.Namespace) -> bool:
    """Whether the command can be given again with --resume."""
    return getattr(options, "command", None) == "pretrain" and not options.dry_run


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
