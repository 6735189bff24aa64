"""What commands share: how each is added, how what was typed wrongly is told, and which images could not be read."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

from unitsphere.common.errors import UsageError, check_word

NUMBERS = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """Tells mistakes as the rest of unitsphere does: what was given, what is allowed, what is near."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace("expected one argument", "a value must follow")
        message = re.sub(r"^the following arguments are required: (.*)", r"\1: it must be given", message)
        message = re.sub(r"invalid (int|float) value: (.*)", lambda m: f"{m[2]} is not {NUMBERS[m[1]]}", message)
        raise UsageError(f"{message}.\n`{self.prog} --help` lists what there is.")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None:
            name = action.option_strings[0] if action.option_strings else str(action.metavar or action.dest).lower()
            check_word(name, value, action.choices)


def add_command(commands: Any, name: str, run: Any, help: str, **more: Any) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=help, description=help[0].upper() + help[1:] + ".", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, **more,
    )  # fmt: skip
    command.set_defaults(run=run)
    return command


def print_broken(broken: dict[str, str]) -> None:
    from unitsphere.common.text import printable
    from unitsphere.data.broken import describe

    for line in describe(broken):
        print(printable(line), file=sys.stderr)
