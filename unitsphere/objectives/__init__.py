"""Objectives: pure functions of tensors, without state, communication or configuration."""

from unitsphere.objectives.contrastive import info_nce

__all__ = ["contrastive", "geometry", "info_nce", "mixing", "regression"]
