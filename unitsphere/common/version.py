"""The version of the package, at the bottom, so that every room may name it."""

__version__ = "0.1.0"
