"""Training: preparing a run, the loop, the step, checkpoints, telemetry and hooks."""

__all__ = ["hooks"]
