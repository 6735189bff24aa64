"""Randomness is a function of (seed, purpose, counters) and of nothing else.

Every draw is made for the whole batch over all ranks and then sliced. So two ranks see what one rank
sees, and a resumed run needs no generator state: the step number is enough.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


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
    x = (x ^ _shifted(x, 30)) * -4658895280553007687
    x = (x ^ _shifted(x, 27)) * -7723592293110705685
    return _shifted(x ^ _shifted(x, 31), 2)


def uniform(lots: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Such numbers as ones in the open interval (0, 1), of 23 bits: the same in float32 and float64."""
    return ((lots >> 39).to(dtype) + 0.5) / 2**23


def _shifted(x: Tensor, bits: int) -> Tensor:
    """An unsigned shift to the right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
