"""What antipode is measured by: `python -m benchmarks.speed` and its neighbours."""
