"""A run's folder: its record, checkpoints, metrics, results, locks."""
