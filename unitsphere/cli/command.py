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
    once_words: required options that were bare words until 0.1, in this order; that form still works, with a notice.
    instead: an option with which these are not required.
    """

    before_parsing: Callable[[Sequence[str]], None] | None = None
    once_words: Sequence[str] = ()
    instead: str = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.before_parsing is not None:
            self.before_parsing(args or ())
        found, unknown = super().parse_known_args(args, namespace)
        return (found, self.take_words(found, unknown)) if self.once_words else (found, unknown)

    def take_words(self, found: argparse.Namespace, unknown: list[str]) -> list[str]:
        """Take bare words for the options in `once_words` that are missing; return the unknown words that are left."""
        missing = [name for name in self.once_words if getattr(found, name) is None]
        if any(word.startswith("-") for word in unknown) or getattr(found, self.instead or "-", None) is not None:
            return unknown
        given, left = unknown[: len(missing)], unknown[len(missing) :]
        vars(found).update(zip(missing, given, strict=False))
        if len(given) < len(missing):
            names = ", ".join(f"--{name}" for name in missing[len(given) :])
            self.error(f"the following arguments are required: {names}")
        if given and not left:
            now = " ".join(f"--{name} {word}" for name, word in zip(missing, given, strict=True))
            print(f"{self.prog}: words without their options are the old form, which goes after 0.1. Write {now}",
                  file=sys.stderr)  # fmt: skip
        return left

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
