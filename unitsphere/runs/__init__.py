"""A run's folder: its record, checkpoints, metrics, results, locks."""

__all__ = ["loading", "record", "run"]
