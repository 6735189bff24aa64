"""Packages that not everyone needs, and the sentence that says how to get them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from unitsphere.common.errors import UsageError

# The extras of pyproject.toml: which package is part of which. A test holds the two equal.
EXTRAS = {"timm": "timm", "pyarrow": "parquet", "matplotlib": "plots", "scikit-learn": "plots"}
MODULES = {"scikit-learn": "sklearn"}  # imported under another name


def how_to_install(extra: str) -> str:
    """The command that installs an extra: `pip install -e '.[plots]'` in a checkout, else the packages by name.

    The packages and not `unitsphere[plots]`: until a release is there, that name would install nothing of ours.
    """
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '.[{extra}]' (in {checkout})"
    return f"pip install {' '.join(package for package, part in EXTRAS.items() if part == extra)}"


def require(package: str, purpose: str) -> None:
    """Raise UsageError where the package that `purpose` needs is not installed. To be asked before any work."""
    if find_spec(MODULES.get(package, package)) is None:
        raise UsageError(f"{purpose} needs {package}. Install it: {how_to_install(EXTRAS[package])}")
