"""Where images come from."""

__all__ = ["images", "loader", "pack", "source"]
