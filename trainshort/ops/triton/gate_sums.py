"""Running sums of log gates and their gradient: one program for one head of one row, a chunk of tokens at a time.

Each is a scan in float64. The sum is cut down to its running minimum, so that it never rises; a gate that is refused
(above 0, or NaN) makes it NaN from there on. Gates of zero are borders, and count for nothing in the sum.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainshort.ops import gate_sums
from trainshort.ops.triton.run import on_device

LOWEST = tl.constexpr(gate_sums.LOWEST_LOG_GATE)
MOST_AT_ONCE = 8192  # tokens of a chunk


@triton.jit
def _least(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _sooner(a, b):
    return tl.minimum(a, b)


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _load_gates(GATES, t, stride_t, T):
    """In float64; those of no token are 0."""
    return tl.load(GATES + t.to(tl.int64) * stride_t, mask=(t >= 0) & (t < T), other=0.0).to(tl.float64)


@triton.jit
def sums_kernel(
    GATES, SUMS, BORDERS, stride_b, stride_h, stride_t, H, T, AHEAD: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    GATES += row // H * stride_b + row % H * stride_h
    SUMS += row * T
    BORDERS += row * T
    index = tl.arange(0, CHUNK)
    so_far = (row * 0).to(tl.float64)
    border = tl.program_id(0) * 0
    for start in range(0, T, CHUNK):
        t = start + index
        gate = _load_gates(GATES, t, stride_t, T)
        closed = gate < LOWEST
        counted = tl.where(closed | (t == 0), 0.0, gate)  # no link crosses the first token
        counted = tl.where(gate <= 0.0, counted, float("nan"))
        sums = tl.associative_scan(so_far + tl.cumsum(counted, 0), 0, _least)
        sums = _least(sums, tl.zeros_like(sums) + so_far)
        tl.store(SUMS + t, sums, mask=t < T)
        so_far = tl.sum(tl.where(index == CHUNK - 1, sums, 0.0), 0)
        if not AHEAD:
            first = tl.maximum(tl.associative_scan(tl.where(closed, t, 0), 0, _later), border)
            tl.store(BORDERS + t, first, mask=t < T)
            border = tl.max(first, 0)
    if AHEAD:  # from the end: the next closed gate of each position is the first from the position behind it on
        border = tl.program_id(0) * 0 + T
        tl.store(BORDERS + T - 1, border)
        for done in range(0, T, CHUNK):
            t = T - CHUNK - done + index
            closed = _load_gates(GATES, t, stride_t, T) < LOWEST
            at = tl.where(closed, t, T)
            end = tl.minimum(tl.associative_scan(at, 0, _sooner, reverse=True), border)
            tl.store(BORDERS + t - 1, end, mask=t >= 1)
            border = tl.min(end, 0)


@triton.jit
def gradient_kernel(
    GRAD, GATES, OUT, stride_b, stride_h, stride_t, H, T, CHUNK: tl.constexpr
):  # fmt: skip
    """A gate acts on all sums from its own on: the sum of their gradients. None on closed ones and on the first."""
    row = tl.program_id(0).to(tl.int64)
    GATES += row // H * stride_b + row % H * stride_h
    GRAD += row * T
    OUT += row * T
    index = tl.arange(0, CHUNK)
    behind = (row * 0).to(tl.float64)
    for done in range(0, T, CHUNK):
        t = T - CHUNK - done + index
        inside = t >= 0
        closed = _load_gates(GATES, t, stride_t, T) < LOWEST
        grad = tl.load(GRAD + t, mask=inside, other=0.0).to(tl.float64)
        total = behind + tl.cumsum(grad, 0, reverse=True)
        tl.store(OUT + t, tl.where(closed | (t == 0), 0.0, total).to(OUT.dtype.element_ty), mask=inside)
        behind += tl.sum(grad, 0)


def running_sums(log_gates: Tensor, ahead: bool) -> tuple[Tensor, Tensor]:
    """c, float64, and borders, int32, like log_gates [B, H, T]: the first position that each may see, or ahead: one
    past the last."""
    sums = torch.empty(log_gates.shape, dtype=torch.float64, device=log_gates.device)
    borders = torch.empty(log_gates.shape, dtype=torch.int32, device=log_gates.device)
    if log_gates.numel():
        with on_device(log_gates):
            sums_kernel[_grid(log_gates)](SUMS=sums, BORDERS=borders, AHEAD=ahead, **_arguments(log_gates))
    return sums, borders


def gradient(grad: Tensor, log_gates: Tensor) -> Tensor:
    """Of the log gates, from that of c."""
    out = torch.empty(log_gates.shape, dtype=log_gates.dtype, device=log_gates.device)
    if log_gates.numel():
        with on_device(log_gates):
            gradient_kernel[_grid(log_gates)](GRAD=grad.contiguous(), OUT=out, **_arguments(log_gates))
    return out


def _grid(log_gates: Tensor) -> tuple[int]:
    return (log_gates.shape[0] * log_gates.shape[1],)


def _arguments(log_gates: Tensor) -> dict[str, Any]:
    """What both kernels take, by the names of their parameters, and how they are launched."""
    gates = log_gates.detach()
    chunk = min(triton.next_power_of_2(gates.shape[2]), MOST_AT_ONCE)
    return {
        "GATES": gates,
        "stride_b": gates.stride(0),
        "stride_h": gates.stride(1),
        "stride_t": gates.stride(2),
        "H": gates.shape[1],
        "T": gates.shape[2],
        "CHUNK": chunk,
        "num_warps": min(max(chunk // 256, 1), 32),
    }
