"""Configuration: typed fields, named patches, and how they are laid over each other. No torch in here."""

__all__ = ["config", "fields", "sizing", "unused"]
