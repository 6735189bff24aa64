"""The step, the families of methods and their named points."""
