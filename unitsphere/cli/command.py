"""What commands share: how each is added, how what was typed wrongly is told, and which images could not be read."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from unitsphere.common.errors import UsageError, check_word

NUMBERS = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """Tells mistakes as the rest of unitsphere does: what was given, what is allowed, what is near.

    before_parsing: is told the words before they are parsed, and may add options for what they name.
    """

    before_parsing: Callable[[Sequence[str]], None] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.before_parsing is not None:
            self.before_parsing(args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace("expected one argument", "a value must follow")
        message = re.sub(r"^the following arguments are required: (.*)", r"\1: it must be given", message)
        message = re.sub(r"invalid (int|float) value: (.*)", lambda m: f"{m[2]} is not {NUMBERS[m[1]]}", message)
        raise UsageError(f"{message}.\n`{self.prog} --help` lists what there is.")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None:
            name = action.option_strings[0] if action.option_strings else str(action.metavar or action.dest).lower()
            check_word(name, value, action.choices)


def add_command(commands: Any, name: str, run: Any, help: str, **more: Any) -> Parser:
    command: Parser = commands.add_parser(
        name, help=help, description=help[0].upper() + help[1:] + ".", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, **more,
    )  # fmt: skip
    command.set_defaults(run=run)
    return command


def words(text: str) -> list[str]:
    """Parted by commas, but not by those in parentheses."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 20,200") from None


def print_broken(broken: dict[str, str]) -> None:
    from unitsphere.common.text import printable
    from unitsphere.data.broken import describe

    for line in describe(broken):
        print(printable(line), file=sys.stderr)
