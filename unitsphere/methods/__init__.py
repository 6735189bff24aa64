"""The step, the families of methods and their named points."""

__all__ = ["build", "catalogue", "contrastive", "declaration", "embedding", "learners", "regression"]
