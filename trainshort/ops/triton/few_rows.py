"""A linear layer for one or a few rows, as a decoding step has them: bound by reading the weight once.

A library's matrix product is made for many rows; for one it reads the weight at a third of the memory's speed where
the weight is small, and what comes before and after it (norm, bias, activation, residual sum) takes kernels of its
own, which cost a step more than their arithmetic. Here a program computes a few columns of the output for all rows,
in float32 whatever the dtype, and finishes them.

A norm of x needs no pass before: with mean and deviation of a row, found beside the products,
w . ((x - mean) / deviation * g + z) = (w . (g x) - mean w . g) / deviation + w . z.
To lose no digits where the mean is large, x is first shifted by one of its numbers: the middle one of three, as some
channels of trained models are thousands of times as large as the others. For long rows these sums cost more than
`norm_kernel`, which then comes before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainshort.ops.triton.run import on_device

WIDEST_NORMED = 1536  # numbers of a row up to which its norm is found beside the products


@triton.jit
def few_rows_kernel(
    X, W, BIAS, RESIDUAL, GAIN, OFFSET, OUT, rows, columns, inner, eps, stride_x, stride_w, stride_residual,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_OFFSET: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, ROWS)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INNER)
    x_at = X + i.to(tl.int64)[:, None] * stride_x + k[None, :]
    w_at = W + j.to(tl.int64)[:, None] * stride_w + k[None, :]
    row, column = i < rows, j < columns
    sums = tl.zeros([ROWS, COLUMNS, INNER], tl.float32)
    gains = tl.zeros([COLUMNS, INNER], tl.float32)
    offsets = tl.zeros([COLUMNS, INNER], tl.float32)
    shift = tl.zeros([ROWS], tl.float32)
    if NORM == "layernorm":
        shift = one_of(X + i.to(tl.int64) * stride_x, row, inner)
    total = tl.zeros([ROWS, INNER], tl.float32)
    squares = tl.zeros([ROWS, INNER], tl.float32)
    for start in tl.range(0, inner, INNER, num_stages=STAGES):
        there = k >= 0 if EVEN else start + k < inner
        w = tl.load(w_at + start, mask=column[:, None] & there[None, :], other=0.0).to(tl.float32)
        x = tl.load(x_at + start, mask=row[:, None] & there[None, :], other=0.0).to(tl.float32)
        if NORM != "":
            gain = tl.load(GAIN + start + k, mask=there, other=0.0).to(tl.float32)
            x = tl.where(there[None, :], x - shift[:, None], 0.0)
            squares += x * x
            x_gain = x * gain[None, :]
            if NORM == "layernorm":
                total += x
                gains += w * gain[None, :]
                if HAS_OFFSET:
                    offset = tl.load(OFFSET + start + k, mask=there, other=0.0).to(tl.float32)
                    offsets += w * offset[None, :]
            sums += x_gain[:, None, :] * w[None, :, :]
        else:
            sums += x[:, None, :] * w[None, :, :]
    y = tl.sum(sums, 2)
    if NORM != "":
        mean = tl.sum(total, 1) / inner
        variance = tl.sum(squares, 1) / inner - mean * mean
        y = (y - mean[:, None] * tl.sum(gains, 1)[None, :]) / tl.sqrt(variance + eps)[:, None]
        y += tl.sum(offsets, 1)[None, :]
    if HAS_BIAS:
        y += tl.load(BIAS + j, mask=column, other=0.0).to(tl.float32)[None, :]
    y = activated(y, ACTIVATION)
    inside = row[:, None] & column[None, :]
    if HAS_RESIDUAL:
        at = i.to(tl.int64)[:, None] * stride_residual + j[None, :]
        y += tl.load(RESIDUAL + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + i.to(tl.int64)[:, None] * columns + j[None, :], y.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def one_of(X, row, inner):
    """Of the first number of each row, one in its middle and its last: neither the largest nor the smallest."""
    a = tl.load(X, mask=row, other=0.0).to(tl.float32)
    b = tl.load(X + inner // 2, mask=row, other=0.0).to(tl.float32)
    c = tl.load(X + inner - 1, mask=row, other=0.0).to(tl.float32)
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))


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


@triton.jit
def norm_kernel(
    X, GAIN, OFFSET, OUT, inner, eps, stride_x,
    NORM: tl.constexpr, HAS_OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    there = k < inner
    x = tl.load(X + row * stride_x + k, mask=there, other=0.0).to(tl.float32)
    if NORM == "layernorm":
        x = tl.where(there, x - tl.sum(x, 0) / inner, 0.0)
    y = x / tl.sqrt(tl.sum(x * x, 0) / inner + eps) * tl.load(GAIN + k, mask=there, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        y += tl.load(OFFSET + k, mask=there, other=0.0).to(tl.float32)
    tl.store(OUT + row * inner + k, y.to(OUT.dtype.element_ty), mask=there)


class Norm(NamedTuple):
    """A norm of the rows before a linear layer."""

    kind: str  # "layernorm" or "rmsnorm"
    weight: Tensor
    bias: Tensor | None
    eps: float


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    activation: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """activation(norm(x) @ weight.T + bias) + residual, for x [..., in] of at most `shapes.MOST_ROWS` rows in all."""
    shape = (*x.shape[:-1], weight.shape[0])
    x = x.reshape(-1, x.shape[-1])
    if residual is not None:
        residual = residual.reshape(-1, residual.shape[-1])
    if norm is not None and x.shape[1] > WIDEST_NORMED:
        x, norm = normed(x, norm), None
    rows, inner = x.shape
    columns = weight.shape[0]
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    small = columns < 2048  # tiles so small that every multiprocessor has some
    wide = 512 if small or inner >= 4096 else 256
    tile = 2 if small else 8
    gain, offset = (None, None) if norm is None else (norm.weight, norm.bias)
    with on_device(x):
        few_rows_kernel[(triton.cdiv(columns, tile),)](
            X=x, W=weight, BIAS=bias, RESIDUAL=residual, GAIN=gain, OFFSET=offset, OUT=out,
            rows=rows, columns=columns, inner=inner, eps=0.0 if norm is None else norm.eps,
            stride_x=x.stride(0), stride_w=weight.stride(0),
            stride_residual=0 if residual is None else residual.stride(0),
            NORM="" if norm is None else norm.kind, ACTIVATION=activation, HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None, HAS_OFFSET=offset is not None, EVEN=inner % wide == 0,
            ROWS=triton.next_power_of_2(rows), COLUMNS=tile, INNER=wide, STAGES=4 if small else 3,
            num_warps=1 if small else 4,
        )  # fmt: skip
    return out.view(shape)


def normed(x: Tensor, norm: Norm) -> Tensor:
    """The norm of rows [rows, inner], each of them held by one program."""
    rows, inner = x.shape
    out = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    with on_device(x):
        norm_kernel[(rows,)](
            X=x, GAIN=norm.weight, OFFSET=norm.bias, OUT=out, inner=inner, eps=norm.eps, stride_x=x.stride(0),
            NORM=norm.kind, HAS_OFFSET=norm.bias is not None, BLOCK=triton.next_power_of_2(inner), num_warps=8,
        )  # fmt: skip
    return out
