"""Block sizes, warps and pipeline depth for each kernel: a small table, found by benchmarks/tune_gpu.py.

Keys are (kernel, bytes of an element, head dimension up to). GPUs other than Hopper get a row that runs everywhere.
Where nothing can be skipped, "queries of all" and "keys of all" come before "queries" and "keys", if there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    rows: int  # of queries in a tile
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # at most, of a thread; None: as the compiler likes


HOPPER: dict[tuple[str, int, int], Tiles] = {
    ("forward", 2, 64): Tiles(64, 64, 4, 2, registers=128),  # a few more, and a fourth program does not fit
    ("forward", 2, 128): Tiles(64, 64, 4, 3),
    ("forward", 2, 256): Tiles(64, 64, 4, 2),
    ("queries", 2, 64): Tiles(64, 32, 4, 3),
    ("queries", 2, 128): Tiles(64, 64, 4, 2),
    ("queries", 2, 256): Tiles(64, 32, 4, 2),
    ("queries of all", 2, 64): Tiles(64, 64, 4, 3),
    ("keys of all", 2, 128): Tiles(64, 64, 4, 2),
    ("keys", 2, 64): Tiles(32, 64, 4, 2, registers=128),
    ("keys", 2, 128): Tiles(32, 64, 4, 2),
    ("keys", 2, 256): Tiles(32, 64, 4, 1),
}
ANYWHERE: dict[tuple[str, int, int], Tiles] = {
    ("forward", 2, 128): Tiles(64, 64, 4, 2),
    ("forward", 2, 256): Tiles(64, 32, 4, 1),
    ("queries", 2, 128): Tiles(64, 32, 4, 1),
    ("queries", 2, 256): Tiles(32, 32, 4, 1),
    ("keys", 2, 128): Tiles(32, 64, 4, 1),
    ("keys", 2, 256): Tiles(32, 32, 4, 1),
    ("forward", 4, 64): Tiles(64, 32, 4, 2),
    ("forward", 4, 128): Tiles(32, 32, 4, 1),
    ("forward", 4, 256): Tiles(16, 32, 4, 1),
    ("queries", 4, 64): Tiles(32, 32, 4, 1),
    ("queries", 4, 128): Tiles(32, 32, 4, 1),
    ("queries", 4, 256): Tiles(16, 32, 4, 1),
    ("keys", 4, 64): Tiles(32, 32, 4, 1),
    ("keys", 4, 128): Tiles(32, 32, 4, 1),
    ("keys", 4, 256): Tiles(16, 32, 4, 1),
}


@lru_cache(maxsize=256)
def tiles_for(kernel: str, dtype: torch.dtype, dim: int, device: torch.device, everything: bool = False) -> Tiles:
    """everything: whether no keys can be skipped."""
    tables = [HOPPER, ANYWHERE] if is_hopper(device) else [ANYWHERE]
    size = dtype.itemsize
    for table in tables:
        fitting = [width for name, bytes_, width in table if (name, bytes_) == (kernel, size) and width >= dim]
        if fitting:
            row = (kernel, size, min(fitting))
            return table.get((f"{kernel} of all", *row[1:]), table[row]) if everything else table[row]
    raise ValueError(f"head_dim must be at most 256 for the triton backend, got {dim}")


@lru_cache(maxsize=16)
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
