"""What holds state: backbones, heads, the key queue, the slow copy, norms."""

__all__ = ["backbones", "encoder", "heads", "norms", "queue", "slow_copy"]
