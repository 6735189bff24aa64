"""Augmentation policies as data, and the batched executor that makes all views on the device."""
