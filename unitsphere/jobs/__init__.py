"""Whole jobs, from what was asked to the last word: the command and the Python call share them."""

__all__ = ["pretrain"]
