"""What a run shows to a person."""
