"""The loop, optimisers, schedules, checkpoints, telemetry, and the run's folder."""
