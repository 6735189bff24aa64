"""What holds state: backbones, heads, the key queue, the slow copy, norms."""
