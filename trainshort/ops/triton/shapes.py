"""Sizes that the kernels' configuration and the operators' shape functions must agree on. Needs no Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainshort.ops.problem import gradient_like

UNIT = 64  # rows and keys: the granularity of certified windows
ROWS = 128  # rows of a block: packed documents start at a new one
SHORTEST = 384  # keys: below, looking for windows costs more than it saves
LARGEST_DIM = 256
MOST_ROWS = 4  # of a linear layer for a decoding step: beyond, matrix units are worth filling


def can_skip(tolerance: float) -> bool:
    """Whether a quarter of the tolerance, for one pass and one side, is more than zero: not so for the smallest."""
    return tolerance / 4 > 0.0


def allows_tf32() -> bool:
    """Whether torch may round float32 products; by either of its two ways to say so, which must not be mixed."""
    matmul = torch.backends.cuda.matmul
    return bool(matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32)


def rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def gradient_of(tensor: Tensor) -> Tensor:
    """Uninitialised, of the tensor's shape and laid out as it is: the heads of a token together where it has them so,
    else one head after another. backward() would copy a gradient that is laid out otherwise than its leaf."""
    heads_together = tensor.stride(3) == 1 and tensor.stride(1) < tensor.stride(2)
    return gradient_like(tensor) if heads_together else tensor.new_empty(tensor.shape)


def borders_of(cu_seqlens: Tensor | None) -> int:
    """How many borders of packed documents there are."""
    return 0 if cu_seqlens is None else cu_seqlens.shape[0]


def blocks_of(length: int, borders: int) -> int:
    """Blocks of ROWS that hold so many rows, however they fall into documents."""
    blocks = (length + ROWS - 1) // ROWS
    return blocks + max(borders - 1, 1) if borders else blocks


def window_width(queries: int, keys: int, windows: bool, borders: int, causal: bool) -> int:
    """Numbers that describe the windows of a head: FIRST of each query unit and UNTIL of each key unit, and unless
    causal LAST and SINCE. windows: whether a linear bias and a tolerance let keys be skipped."""
    return window_room(queries, keys, borders, causal) if windows and keys >= SHORTEST else 0


def window_room(queries: int, keys: int, borders: int, causal: bool) -> int:
    """The same where keys are skipped at every length, for compilers that make one graph for all of them."""
    blocks = blocks_of(queries, borders) + blocks_of(keys, borders)
    return blocks * (ROWS // UNIT) * (1 if causal else 2)


def layout_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Shapes, strides, and where in 16 bytes each begins: by these Triton compiles kernels anew."""
    return (
        q.shape,
        k.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.data_ptr() % 16,
        k.data_ptr() % 16,
        v.data_ptr() % 16,
    )
