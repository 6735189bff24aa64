"""What unitsphere is measured by: `python -m benchmarks.speed` and its neighbours."""
