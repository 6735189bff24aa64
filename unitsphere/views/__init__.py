"""Augmentation policies as data, and the batched executor that makes all views on the device."""

__all__ = ["apply", "draw", "evaluation", "policies"]
