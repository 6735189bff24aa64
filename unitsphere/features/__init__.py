"""The features that a frozen backbone gives of images, and their nearest neighbours."""

__all__ = ["extract", "knn"]
