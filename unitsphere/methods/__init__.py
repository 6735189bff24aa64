"""Methods: what each one declares, and the learners that train."""

__all__ = ["build", "catalogue", "contrastive", "declaration", "embedding", "learners", "regression"]
