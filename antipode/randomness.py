"""Randomness is a function of (seed, purpose, counters) and of nothing else.

Every draw is made for the whole batch over all ranks and then sliced. So two ranks see what one rank
sees, and a resumed run needs no generator state: the step number is enough.
"""

from __future__ import annotations

import hashlib

import torch


def stream(seed: int, purpose: str, *counters: int) -> int:
    """A 63-bit seed of its own for each (seed, purpose, counters)."""
    text = "/".join([str(int(seed)), purpose, *(str(int(c)) for c in counters)])
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *counters: int) -> torch.Generator:
    """A CPU generator at the start of the stream of (seed, purpose, counters)."""
    return torch.Generator().manual_seed(stream(seed, purpose, *counters))
