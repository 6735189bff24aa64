"""Optimisers and schedules, for training, linear evaluation and fine-tuning alike."""

__all__ = ["optimisers", "schedules"]
