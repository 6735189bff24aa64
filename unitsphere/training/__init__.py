"""The loop, optimisers, schedules, checkpoints, telemetry, and the run's folder."""

__all__ = ["hooks"]
