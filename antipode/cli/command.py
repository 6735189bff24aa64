"""How every command is added."""

from __future__ import annotations

import argparse
from typing import Any


def add_command(commands: Any, name: str, run: Any, help: str, **more: Any) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=help, description=help[0].upper() + help[1:] + ".", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, **more,
    )  # fmt: skip
    command.set_defaults(run=run)
    return command
