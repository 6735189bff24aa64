"""What every room stands on: errors, files, processes, devices, randomness, the terminal; no image, no method."""

__all__ = ["allocator", "devices", "distributed", "errors", "randomness", "version"]
