"""A linear layer for one or a few rows, as a decoding step has them: bound by reading the weight once.

A library's matrix product is made for many rows; for one it reads the weight at a third of the memory's speed where
the weight is small, and what comes after it (bias, activation, residual sum) takes kernels of its own. Here a program
computes a few columns of the output for all rows, in float32 whatever the dtype, and finishes them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def few_rows_kernel(
    X, W, BIAS, RESIDUAL, OUT, rows, columns, inner, stride_x, stride_w, stride_residual,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, ROWS)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INNER)
    x_at = X + i.to(tl.int64)[:, None] * stride_x + k[None, :]
    w_at = W + j.to(tl.int64)[:, None] * stride_w + k[None, :]
    row, column = i < rows, j < columns
    sums = tl.zeros([ROWS, COLUMNS, INNER], tl.float32)
    for start in tl.range(0, inner, INNER, num_stages=STAGES):
        if EVEN:
            w = tl.load(w_at + start, mask=column[:, None], other=0.0)
            x = tl.load(x_at + start, mask=row[:, None], other=0.0)
        else:
            inside = (start + k < inner)[None, :]
            w = tl.load(w_at + start, mask=column[:, None] & inside, other=0.0)
            x = tl.load(x_at + start, mask=row[:, None] & inside, other=0.0)
        sums += x.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :]
    y = tl.sum(sums, 2)
    if HAS_BIAS:
        y += tl.load(BIAS + j, mask=column, other=0.0).to(tl.float32)[None, :]
    y = activated(y, ACTIVATION)
    inside = row[:, None] & column[None, :]
    if HAS_RESIDUAL:
        at = i.to(tl.int64)[:, None] * stride_residual + j[None, :]
        y += tl.load(RESIDUAL + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + i.to(tl.int64)[:, None] * columns + j[None, :], y.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def activated(y, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        y = tl.where(y < 0.0, 0.0, y)  # NaN stays
    if ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    if ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * (y + 0.044715 * y * y * y)  # twice the argument of tanh
        y = y * tl.sigmoid(inner)
    if ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    return y


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "", residual: Tensor | None = None
) -> Tensor:
    """activation(x @ weight.T + bias) + residual, for x [..., in] with at most `shapes.MOST_ROWS` rows in all."""
    shape = (*x.shape[:-1], weight.shape[0])
    x = x.reshape(-1, x.shape[-1])
    if residual is not None:
        residual = residual.reshape(-1, residual.shape[-1])
    rows, inner = x.shape
    columns = weight.shape[0]
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    small = columns < 2048  # tiles so small that every multiprocessor has some
    wide = 512 if small or inner >= 4096 else 256
    tile = 2 if small else 8
    few_rows_kernel[(triton.cdiv(columns, tile),)](
        x, weight, bias, residual, out, rows, columns, inner, x.stride(0), weight.stride(0),
        0 if residual is None else residual.stride(0),
        ACTIVATION=activation, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, EVEN=inner % wide == 0,
        ROWS=triton.next_power_of_2(rows), COLUMNS=tile, INNER=wide, STAGES=4 if small else 3,
        num_warps=1 if small else 4,
    )  # fmt: skip
    return out.view(shape)
