"""Optimisers and schedules, for training, linear evaluation and fine-tuning alike."""
