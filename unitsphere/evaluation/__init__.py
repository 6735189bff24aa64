"""Protocols: a backbone and labelled data in, a number out."""

__all__ = ["backbone", "embed", "evaluate", "protocols", "settings"]
