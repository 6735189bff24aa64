"""Damaged and hostile files, made from a seed, and what the command makes of them."""
