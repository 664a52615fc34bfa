"""Running sums of log gates and their gradient: one program for a chunk of the tokens of one head of one row.

Each is a scan in float64. Where there are several chunks, a kernel before it leaves what each of them amounts to. The
sum is cut down to its running minimum, so that it never rises; a gate that is refused (above 0, or NaN) makes it NaN
from there on. Gates of zero are borders, and count for nothing in the sum.
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
MOST_AT_ONCE = 2048  # tokens of a chunk


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
def _counted(GATES, t, stride_t, T):
    """What gates add to the sum, and which are closed."""
    gate = _load_gates(GATES, t, stride_t, T)
    closed = gate < LOWEST
    counted = tl.where(closed | (t == 0), 0.0, gate)  # no link crosses the first token
    return tl.where(gate <= 0.0, counted, float("nan")), closed


@triton.jit
def _falling(counted):
    """Their running sum inside a chunk, which never rises."""
    return tl.associative_scan(tl.cumsum(counted, 0), 0, _least)


@triton.jit
def chunks_kernel(
    GATES, TOTALS, EDGES, stride_b, stride_h, stride_t, H, T, AHEAD: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Of each chunk the sum, and its last closed gate, or its first if AHEAD."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    GATES += row // H * stride_b + row % H * stride_h
    index = tl.arange(0, CHUNK)
    t = chunk * CHUNK + index
    counted, closed = _counted(GATES, t, stride_t, T)
    at = row * tl.num_programs(1) + chunk
    tl.store(TOTALS + at, tl.sum(tl.where(index == CHUNK - 1, _falling(counted), 0.0), 0))
    edge = tl.min(tl.where(closed, t, T), 0) if AHEAD else tl.max(tl.where(closed, t, 0), 0)
    tl.store(EDGES + at, edge)


@triton.jit
def sums_kernel(
    GATES, TOTALS, EDGES, SUMS, BORDERS, stride_b, stride_h, stride_t, H, T, AHEAD: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    GATES += row // H * stride_b + row % H * stride_h
    SUMS += row * T
    BORDERS += row * T
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    counted, closed = _counted(GATES, t, stride_t, T)
    sums = _falling(counted)
    border = chunk * 0 + (T if AHEAD else 0)
    if CHUNKS > 1:
        other = tl.arange(0, CHUNKS)
        at, count = row * tl.num_programs(1) + other, tl.num_programs(1)
        total = tl.load(TOTALS + at, mask=other < count, other=0.0)
        before = tl.cumsum(tl.load(TOTALS + at - 1, mask=(other > 0) & (other < count), other=0.0), 0)
        so_far = tl.sum(tl.where(other == chunk, before, 0.0), 0)
        # Not above the last sum of any chunk in front, whatever was rounded.
        lowest = tl.reduce(tl.where(other < chunk, before + total, 0.0), 0, _least)
        sums = _least(so_far + sums, tl.zeros_like(sums) + lowest)
        edge = tl.load(EDGES + at, mask=other < count, other=0)
        if AHEAD:
            border = tl.minimum(border, tl.min(tl.where((other > chunk) & (other < count), edge, T), 0))
        else:
            border = tl.max(tl.where(other < chunk, edge, 0), 0)
    tl.store(SUMS + t, sums, mask=t < T)
    if AHEAD:  # the next closed gate of each position is the first from the position behind it on
        end = tl.minimum(tl.associative_scan(tl.where(closed, t, T), 0, _sooner, reverse=True), border)
        tl.store(BORDERS + t - 1, end, mask=(t >= 1) & (t < T))
        tl.store(BORDERS + T - 1, T, mask=chunk == tl.num_programs(1) - 1)
    else:
        first = tl.maximum(tl.associative_scan(tl.where(closed, t, 0), 0, _later), border)
        tl.store(BORDERS + t, first, mask=t < T)


@triton.jit
def chunk_gradients_kernel(GRAD, TOTALS, T, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    grad = tl.load(GRAD + row * T + t, mask=t < T, other=0.0).to(tl.float64)
    tl.store(TOTALS + row * tl.num_programs(1) + chunk, tl.sum(grad, 0))


@triton.jit
def gradient_kernel(
    GRAD, GATES, TOTALS, OUT, stride_b, stride_h, stride_t, H, T, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """A gate acts on all sums from its own on: the sum of their gradients. None on closed ones and on the first."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    GATES += row // H * stride_b + row % H * stride_h
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    closed = _load_gates(GATES, t, stride_t, T) < LOWEST
    grad = tl.load(GRAD + row * T + t, mask=t < T, other=0.0).to(tl.float64)
    total = tl.cumsum(grad, 0, reverse=True)
    if CHUNKS > 1:
        other = tl.arange(0, CHUNKS)
        behind = (other > chunk) & (other < tl.num_programs(1))
        total += tl.sum(tl.load(TOTALS + row * tl.num_programs(1) + other, mask=behind, other=0.0), 0)
    tl.store(OUT + row * T + t, tl.where(closed | (t == 0), 0.0, total).to(OUT.dtype.element_ty), mask=t < T)


def running_sums(log_gates: Tensor, ahead: bool) -> tuple[Tensor, Tensor]:
    """c, float64, and borders, int32, like log_gates [B, H, T]: the first position that each may see, or ahead: one
    past the last."""
    sums = torch.empty(log_gates.shape, dtype=torch.float64, device=log_gates.device)
    borders = torch.empty(log_gates.shape, dtype=torch.int32, device=log_gates.device)
    if log_gates.numel():
        call = _Call(log_gates)
        totals, edges = call.of_chunks(torch.float64), call.of_chunks(torch.int32)
        given = {"TOTALS": totals, "EDGES": edges, "AHEAD": ahead, **call.arguments}
        with on_device(log_gates):
            if call.chunks > 1:
                chunks_kernel[call.grid](**given)
            sums_kernel[call.grid](SUMS=sums, BORDERS=borders, CHUNKS=call.most_chunks, **given)
    return sums, borders


def gradient(grad: Tensor, log_gates: Tensor) -> Tensor:
    """Of the log gates, from that of c."""
    out = torch.empty(log_gates.shape, dtype=log_gates.dtype, device=log_gates.device)
    if log_gates.numel():
        call, grad = _Call(log_gates), grad.contiguous()
        totals = call.of_chunks(torch.float64)
        sizes = {name: call.arguments[name] for name in ("T", "CHUNK", "num_warps")}
        with on_device(log_gates):
            if call.chunks > 1:
                chunk_gradients_kernel[call.grid](GRAD=grad, TOTALS=totals, **sizes)
            gradient_kernel[call.grid](GRAD=grad, OUT=out, TOTALS=totals, CHUNKS=call.most_chunks, **call.arguments)
    return out


class _Call:
    """How gates [B, H, T] are cut into chunks, and what kernels are given of them, by the names of parameters."""

    def __init__(self, log_gates: Tensor) -> None:
        gates = log_gates.detach()
        self.gates, (batch, heads, length) = gates, gates.shape
        chunk = min(triton.next_power_of_2(length), MOST_AT_ONCE)
        self.chunks = -(-length // chunk)
        self.most_chunks = triton.next_power_of_2(self.chunks)
        self.grid = (batch * heads, self.chunks)
        self.arguments: dict[str, Any] = {
            "GATES": gates,
            "stride_b": gates.stride(0),
            "stride_h": gates.stride(1),
            "stride_t": gates.stride(2),
            "H": heads,
            "T": length,
            "CHUNK": chunk,
            "num_warps": max(chunk // 256, 1),
        }

    def of_chunks(self, dtype: torch.dtype) -> Tensor | None:
        """Room for a number of each chunk; None where there is one."""
        return torch.empty(self.grid, dtype=dtype, device=self.gates.device) if self.chunks > 1 else None
