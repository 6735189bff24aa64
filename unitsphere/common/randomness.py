"""Randomness is a function of (seed, purpose, counters) and of nothing else.

Every draw is made for the whole batch over all ranks and then sliced. So two ranks see what one rank
sees, and a resumed run needs no generator state: the step number is enough.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

__all__ = ["generator", "lots", "stream", "uniform"]


def stream(seed: int, purpose: str, *counters: int) -> int:
    """A 63-bit seed of its own for each (seed, purpose, counters)."""
    text = "/".join([str(int(seed)), purpose, *(str(int(c)) for c in counters)])
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *counters: int) -> torch.Generator:
    """A CPU generator at the start of the stream of (seed, purpose, counters)."""
    return torch.Generator().manual_seed(stream(seed, purpose, *counters))


def lots(lot: Tensor, rows: Tensor, columns: int) -> Tensor:
    """(len(rows), columns) int64 in [0, 2^62): a function of (lot, row, column) alone, computed where `rows` live.

    For draws that are too many to be made on the host, and that each rank makes for rows of its own. lot: int64
    scalar. The mixing is splitmix64's: two multiplications between shifts, whose carries wrap.
    """
    x = lot + (rows[:, None] * columns + torch.arange(columns, device=rows.device) + 1) * -7046029254386353131
    # Unsigned shifts of a signed number: what the sign filled in is masked.
    x = (x ^ (x >> 30) & 2**34 - 1) * -4658895280553007687
    x = (x ^ (x >> 27) & 2**37 - 1) * -7723592293110705685
    x = x ^ (x >> 31) & 2**33 - 1
    return (x >> 2) & 2**62 - 1


def uniform(lots: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Map integers from `lots` to numbers in (0, 1). Uses 23 random bits, so float32 and float64 agree."""
    return ((lots >> 39).to(dtype) + 0.5) / 2**23
