"""What trains: the networks and the memory of a method, and one step of its loss."""

__all__ = ["contrastive", "learner", "negatives", "regression"]
