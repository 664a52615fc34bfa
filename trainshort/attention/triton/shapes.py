"""Sizes that the launcher and the compiler's shape functions must agree on. Needs no Triton."""

from __future__ import annotations

from torch import Tensor

UNIT = 64  # rows and keys: the granularity of certified windows
ROWS = 128  # rows of a block: packed documents start at a new one
SHORTEST = 384  # keys: below, looking for windows costs more than it saves
LARGEST_DIM = 256


def blocks_of(length: int, cu_seqlens: Tensor | None) -> int:
    """Blocks of ROWS that hold so many rows, however they fall into documents."""
    blocks = (length + ROWS - 1) // ROWS
    return blocks if cu_seqlens is None else blocks + max(cu_seqlens.shape[0] - 1, 1)


def window_width(
    q: Tensor, k: Tensor, linear: bool, cu_seqlens: Tensor | None, causal: bool, tolerance: float
) -> int:
    """Numbers that describe the windows of a head: FIRST of each query unit and UNTIL of each key unit, and unless
    causal LAST and SINCE."""
    if not linear or tolerance <= 0.0 or k.shape[2] < SHORTEST:
        return 0
    blocks = blocks_of(q.shape[2], cu_seqlens) + blocks_of(k.shape[2], cu_seqlens)
    return blocks * (ROWS // UNIT) * (1 if causal else 2)
