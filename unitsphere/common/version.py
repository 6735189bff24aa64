"""The version of the package, at the bottom, so that every room may name it."""

__all__ = ["__version__"]

__version__ = "0.1.0"
