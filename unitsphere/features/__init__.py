"""What a backbone says about images, and the neighbours among it."""

__all__ = ["extract", "knn"]
