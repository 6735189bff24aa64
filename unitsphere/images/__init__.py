"""Pictures in memory: the canvas, decoding and encoding, contact sheets."""

__all__ = ["canvas", "contact_sheet", "decode"]
