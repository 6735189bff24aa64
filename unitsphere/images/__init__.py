"""Pictures in memory: the canvas, decoding and encoding, contact sheets."""
