"""What the papers plot: the numbers and the figure. Each analysis is one file with `measure` and `draw`."""

__all__ = ["analyse"]
