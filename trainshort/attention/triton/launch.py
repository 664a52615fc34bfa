"""From a Problem to kernel launches: ragged sequences, windows, forward and backward.

Nothing here looks inside a tensor or waits for the GPU, so that every call can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
from torch import Tensor

from trainshort.attention.bias import BucketBias, LinearBias, fold_gradient
from trainshort.attention.problem import Problem, gradient_like
from trainshort.attention.triton import backward as backward_kernels
from trainshort.attention.triton import forward as forward_kernels
from trainshort.attention.triton import windows as window_kernels
from trainshort.attention.triton.plan import Plan, plan_for
from trainshort.attention.triton.shapes import ROWS, UNIT
from trainshort.attention.windows import visible_blocks

LOG2E = math.log2(math.e)
WINDOW_KERNELS = ("sample", "bounds", "search", "order")
RUNS_OF_A_BLOCK = 16  # at most
COARSE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}  # rounding, relative


@dataclass
class Call:
    """One call: its plan, and the tensors that the kernels read besides q, k and v."""

    problem: Problem
    plan: Plan
    q: Tensor
    k: Tensor
    v: Tensor
    start: int
    sequences: Tensor  # int32 [S, 5]; like those below, q itself stands for what is not there
    blocks: Tensor  # int32 [entries, 2]: document, block in it
    unit0: Tensor  # int32 [documents]: first unit of each
    slopes: Tensor
    futures: Tensor
    stride_slope: int
    line: Tensor  # float32 [H, 2 reach + 1], in units of log2
    buckets: Tensor  # int32 [2 reach + 1]

    @property
    def sees(self) -> Tensor:
        return self.q if self.plan.sees is None else self.plan.sees

    @property
    def order(self) -> Tensor:
        return self.q if self.plan.order is None else self.plan.order


def prepare(problem: Problem, *others: Tensor) -> Call:
    """others: more tensors that the kernels read as they do q."""
    q, k, v = rows_contiguous(problem.q), rows_contiguous(problem.k), rows_contiguous(problem.v)
    plan = plan_for(problem, q, k, v, *others)
    start = problem.start
    sequences = blocks = unit0 = slopes = futures = line = buckets = q
    if problem.cu_seqlens is not None:
        sequences, blocks, unit0 = _documents(problem.cu_seqlens, plan.entries)
    elif plan.ragged:
        sequences = sequences_of(problem, start)
    stride_slope = 0
    bias = problem.bias
    if isinstance(bias, LinearBias):
        slopes = plain_slopes(bias.slopes)
        futures = slopes if bias.future is None else plain_slopes(bias.future)
        if futures.dim() != slopes.dim():
            slopes, futures = (t.expand(plan.batch, plan.heads).contiguous() for t in (slopes, futures))
        stride_slope = plan.heads if slopes.dim() == 2 else 0
    elif isinstance(bias, BucketBias):
        buckets, line = bucket_line(bias)
    return Call(
        problem=problem,
        plan=plan,
        q=q,
        k=k,
        v=v,
        start=0 if plan.packed or isinstance(start, Tensor) else start,
        sequences=sequences,
        blocks=blocks,
        unit0=unit0,
        slopes=slopes,
        futures=futures,
        stride_slope=stride_slope,
        line=line,
        buckets=buckets,
    )


def plain_slopes(slopes: Tensor) -> Tensor:
    slopes = slopes.detach()
    return slopes if slopes.dtype == torch.float32 and slopes.is_contiguous() else slopes.float().contiguous()


def bucket_line(bias: BucketBias) -> tuple[Tensor, Tensor]:
    """By distance, from -R = -max_distance to R: buckets, int32 [2 R + 1]; bias in log2, float32 [H, 2 R + 1]."""
    index = bias.bucket(torch.arange(-bias.max_distance, bias.max_distance + 1, device=bias.table.device))
    return index.to(torch.int32), (bias.table.detach().float()[index].T * LOG2E).contiguous()


def sequences_of(problem: Problem, start: int | Tensor) -> Tensor:
    """Rows of the batch: (first query, queries, first key, keys, position of query 0), int32 [B, 5]."""
    batch, queries, keys, device = problem.q.shape[0], problem.q.shape[2], problem.k.shape[2], problem.q.device
    if problem.key_padding_mask is not None:
        count = problem.key_padding_mask.sum(-1)
        first = problem.key_padding_mask.to(torch.int8).argmax(-1) if keys else torch.zeros_like(count)
    else:
        count = torch.full((batch,), keys, device=device)
        first = torch.zeros_like(count)
    zero = torch.zeros_like(count)
    return torch.stack((zero, zero + queries, first, count, zero + start - first), dim=1).to(torch.int32)


def _documents(cu_seqlens: Tensor, entries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed documents as sequences, the blocks they fall into, and each one's first unit."""
    borders = cu_seqlens.to(torch.int32)
    if borders.shape[0] < 2:
        borders = torch.zeros(2, dtype=torch.int32, device=borders.device)
    first, length = borders[:-1], borders.diff()
    sequences = torch.stack((first, length, first, length, torch.zeros_like(first)), dim=1)
    each = (length + ROWS - 1) // ROWS
    ends = each.cumsum(0)
    index = torch.arange(entries, device=borders.device)
    # Entries after the last document become blocks beyond its end: there is nothing to do in them.
    document = torch.searchsorted(ends, index, right=True).clamp_max(len(each) - 1)
    blocks = torch.stack((document, index - (ends - each)[document]), dim=1).to(torch.int32)
    return sequences, blocks, ((ends - each) * (ROWS // UNIT)).to(torch.int32)


def rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride()[:3]


def find_windows(call: Call) -> Tensor:
    """FIRST, LAST, UNTIL and SINCE: int32 [B, H, width]; width 0 where everything is visited."""
    plan, q, k, problem = call.plan, call.q, call.k, call.problem
    batch, heads, kv_heads, dim, entries = plan.batch, plan.heads, plan.kv_heads, plan.dim, plan.key_entries
    windows = torch.empty((batch, heads, plan.width), dtype=torch.int32, device=q.device)
    if windows.numel() == 0:
        return windows
    sequences = call.sequences.shape[0] if plan.ragged else batch
    # Of each sequence: X by head, centre and its length by key head. Of each block: norm, K of past and future.
    sizes = (sequences * heads, sequences * kv_heads, sequences * kv_heads * dim, batch * kv_heads * entries)
    starts = [0, *accumulate((*sizes, batch * heads * entries))]
    floats = torch.empty(starts[5] + batch * heads * entries, dtype=torch.float32, device=q.device)
    reach, common, center, norm, pasts, aheads = plan.split(floats, starts, WINDOW_KERNELS)
    means = torch.empty(batch * kv_heads * entries * RUNS_OF_A_BLOCK * dim, dtype=k.dtype, device=q.device)
    scale, ragged = float(problem.scale), plan.ragged and not plan.packed
    plan.launch(
        "sample", window_kernels.sample_kernel, (sequences, kv_heads, 1), (),
        (q, k, center, common, reach, call.sequences), (call.start, scale),
        lambda: (*_strides(q), *_strides(k), heads, kv_heads, plan.group, plan.queries, plan.keys),
        lambda: plan.constants(num_warps=4),
    )  # fmt: skip
    plan.launch(
        "bounds", window_kernels.bounds_kernel, (entries, batch, kv_heads), (plan.readable(k, ROWS),),
        (call.slopes, call.futures, center, reach, norm, pasts, aheads, means, call.sequences, call.blocks),
        (call.start,),
        lambda: (*_strides(k), call.stride_slope, heads, kv_heads, plan.group, plan.queries, plan.keys, entries),
        lambda: plan.constants(
            PRECISION=plan.precision, TMA=plan.tma, RUN_ROWS=RUNS_OF_A_BLOCK, num_warps=4),
    )  # fmt: skip
    first, last, until, since = _parts(plan, windows, WINDOW_KERNELS)
    budget = -math.log(problem.tolerance) + (0.0 if plan.causal else math.log(2.0))
    plan.launch(
        "search", window_kernels.search_kernel, (plan.entries, batch, heads), (plan.readable(q, ROWS),),
        (call.slopes, call.futures, call.sees, reach, common, norm, pasts, aheads, means, first, last,
         call.sequences, call.blocks, call.unit0),
        (call.start, scale, budget),
        lambda: (*_strides(q), call.stride_slope, plan.width, heads, kv_heads, plan.group, plan.queries, plan.keys,
                 entries, plan.offset),
        lambda: plan.constants(SIDED=plan.sided, PRECISION=plan.precision, CHUNK=128, COARSE=COARSE[q.dtype],
                               TMA=plan.tma, num_warps=4),
    )  # fmt: skip
    chunk = min(1024, triton.next_power_of_2(max(plan.units, plan.key_units)))
    plan.launch(
        "order", window_kernels.order_kernel, (sequences, heads, 1), (),
        (first, last, until, since, call.sequences, call.unit0), (),
        lambda: (plan.width, heads, plan.queries, plan.keys),
        lambda: {"CAUSAL": plan.causal, "RAGGED": ragged, "PACKED": plan.packed, "CHUNK": chunk,
                 "num_warps": 4 if chunk >= 512 else 1},
    )  # fmt: skip
    return windows


def certified_blocks(problem: Problem, block: int) -> Tensor | None:
    """The keys visited, in blocks: int32 [B, H, ceil(Tq / block), 2]; None where none are looked for."""
    call = prepare(problem)
    plan = call.plan
    if plan.width == 0 or plan.packed or block % UNIT or 0 in problem.q.shape:
        return None
    windows = find_windows(call)
    first, last = windows, windows[..., plan.units :]
    low, high = visible_blocks(problem, block)  # [B, H, blocks]
    units = -(-plan.queries // UNIT)
    offset = call.sequences[:, None, None, 2] if plan.ragged else 0

    def by_block(values: Tensor, fill: int) -> Tensor:
        missing = -units % (block // UNIT)
        padded = torch.nn.functional.pad(values[..., :units].long(), (0, missing), value=fill)
        return padded.unflatten(-1, (-1, block // UNIT))

    empty = high <= low
    low = torch.maximum(low, (offset + by_block(first, 2**40).amin(-1) * UNIT) // block)
    if not plan.causal:
        high = torch.minimum(high, -(-(offset + by_block(last, 0).amax(-1) * UNIT) // block))
    return torch.stack((low, high), dim=-1).masked_fill(empty[..., None], 0).to(torch.int32)


def _parts(plan: Plan, windows: Tensor, kernels: tuple[str, ...]) -> list[Any]:
    """FIRST, LAST, UNTIL and SINCE in one tensor of windows, for these kernels."""
    units = plan.units
    if plan.width == 0:
        return [windows] * 4
    if plan.causal:
        return plan.split(windows, (0, 0, units, units), kernels)
    return plan.split(windows, (0, units, 2 * units, 2 * units + plan.key_units), kernels)


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output like q, log-sum-exp [B, H, Tq] in units of log2, and windows."""
    call = prepare(problem)
    plan, q, k, v = call.plan, call.q, call.k, call.v
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if q.numel() == 0 or plan.keys == 0:
        windows = torch.zeros((plan.batch, plan.heads, plan.width), dtype=torch.int32, device=q.device)
        return out.zero_(), lse.fill_(math.inf), windows
    windows = find_windows(call)
    tiles = plan.tiles["forward"]
    first, last, _, _ = _parts(plan, windows, ("forward",))
    read = plan.readable
    plan.launch(
        "forward", forward_kernels.forward_kernel,
        (plan.entries * (ROWS // tiles.rows), plan.batch, plan.heads),
        (read(q, tiles.rows), read(k, tiles.keys), read(v, tiles.keys)),
        (out, lse, call.slopes, call.futures, call.sees, call.line, first, last, call.sequences, call.blocks,
         call.order, call.unit0),
        (call.start, float(problem.scale) * LOG2E),
        lambda: (*_strides(q), *_strides(k), *_strides(v), *_strides(out), call.stride_slope, plan.width, plan.heads,
                 plan.group, plan.queries, plan.keys, plan.offset, plan.reach),
        lambda: plan.attention_constants(tiles),
    )  # fmt: skip
    return out, lse, windows


def backward(
    problem: Problem, grad: Tensor, out: Tensor, lse: Tensor, windows: Tensor, want_bias: bool
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Gradients of q, k, v, and of slopes, future slopes and table where wanted."""
    grad, out = rows_contiguous(grad), rows_contiguous(out)
    call = prepare(problem, grad, out)
    plan = call.plan
    dq, dk, dv = (gradient_like(t) for t in (problem.q, problem.k, problem.v))
    empty = call.q.numel() == 0 or plan.keys == 0
    if empty or plan.ragged or plan.tail:  # padding, what lies between documents, the end of a cache
        for gradient in (dq, dk, dv):
            gradient.zero_()
    buckets = problem.bias.table.shape[0] if isinstance(problem.bias, BucketBias) else 1
    shares = [call.q] * 3
    if want_bias:  # zeros: blocks beyond the end of a sequence write nothing
        programs = plan.entries * (ROWS // plan.tiles["queries"].rows)
        sizes = ((), (), (triton.next_power_of_2(buckets),))
        shape = (plan.batch, plan.heads, programs)
        shares = [torch.zeros((*shape, *size), dtype=torch.float32, device=grad.device) for size in sizes]
    if not empty:
        _run_backward(call, grad, out, lse, windows, (dq, dk, dv), shares, want_bias, buckets)
    return dq, dk, dv, _bias_gradients(problem, shares, want_bias, buckets)


def _run_backward(
    call: Call, grad: Tensor, out: Tensor, lse: Tensor, windows: Tensor, gradients: tuple[Tensor, Tensor, Tensor],
    shares: list[Tensor], want_bias: bool, buckets: int,
) -> None:  # fmt: skip
    problem, plan, q, k, v = call.problem, call.plan, call.q, call.k, call.v
    dq, dk, dv = gradients
    queries = "queries, bias" if want_bias else "queries"
    first, last, until, since = _parts(plan, windows, (queries, "keys"))
    delta = torch.empty_like(lse)
    scale = float(problem.scale)
    numbers = (call.start, scale * LOG2E, scale)
    sizes = (plan.heads, plan.group, plan.queries, plan.keys, plan.offset, plan.reach)
    read, tiles = plan.readable, plan.tiles["queries"]
    plan.launch(
        queries, backward_kernels.query_kernel,
        (plan.entries * (ROWS // tiles.rows), plan.batch, plan.heads),
        (read(q, tiles.rows), read(k, tiles.keys), read(v, tiles.keys), read(grad, tiles.rows)),
        (out, lse, delta, dq, *shares, call.slopes, call.futures, call.sees, call.line, call.buckets, first, last,
         call.sequences, call.blocks, call.order, call.unit0),
        numbers,
        lambda: (*_strides(q), *_strides(k), *_strides(v), *_strides(out), *_strides(grad), *_strides(dq),
                 call.stride_slope, plan.width, *sizes),
        lambda: plan.attention_constants(
            tiles, DBIAS=want_bias, NB=triton.next_power_of_2(buckets)),
    )  # fmt: skip
    other = plan.tiles["keys"]
    plan.launch(
        "keys", backward_kernels.key_kernel,
        (plan.key_entries * (ROWS // other.keys), plan.batch, plan.kv_heads),
        (read(q, other.rows), read(k, other.keys), read(v, other.keys), read(grad, other.rows)),
        (lse, delta, dk, dv, call.slopes, call.futures, call.sees, call.line, first, last, until, since,
         call.sequences, call.blocks, call.order, call.unit0),
        numbers,
        lambda: (*_strides(q), *_strides(k), *_strides(v), *_strides(grad), *_strides(dk), *_strides(dv),
                 call.stride_slope, plan.width, *sizes),
        lambda: plan.attention_constants(other) | {"ORDERED": plan.order is not None and plan.group == 1},
    )  # fmt: skip


def _bias_gradients(problem: Problem, shares: list[Tensor], want_bias: bool, buckets: int) -> list[Tensor | None]:
    """Sum what each program found: the gradients of slopes, future slopes and table."""
    bias = problem.bias
    if not want_bias or bias is None:
        return [None, None, None]
    if isinstance(bias, BucketBias):
        return [None, None, shares[2].double().sum((0, 2)).T[:buckets].to(bias.table.dtype).contiguous()]
    past = shares[0].double().sum(2)  # [B, H]
    ahead = shares[1].double().sum(2)
    if bias.future is None:
        return [fold_gradient(past + ahead, bias.slopes), None, None]
    return [fold_gradient(past, bias.slopes), fold_gradient(ahead, bias.future), None]
