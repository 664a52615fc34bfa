"""From a Problem to kernel launches: ragged sequences, windows, forward and backward.

Nothing here looks inside a tensor or waits for the GPU: once a call of its kind has compiled the kernels, every call
can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainshort.ops.bias import BucketBias, LinearBias, fold_gradient
from trainshort.ops.problem import Problem
from trainshort.ops.triton import programs
from trainshort.ops.triton.plan import Kind, Plan, kind_of, plan_for
from trainshort.ops.triton.shapes import ROWS, UNIT, blocks_of, gradient_of, layout_of, rows_contiguous
from trainshort.ops.windows import visible_blocks

LOG2E = math.log2(math.e)
LARGEST = 3.4028234e38  # of float32
SLACK = 0.999  # for the rounding of sums that are compared with a share of the tolerance


class Inputs(NamedTuple):
    """The tensors that kernels read besides q, k and v."""

    slopes: Tensor | None = None  # float32 [H] or [B, H], like the next
    futures: Tensor | None = None
    line: Tensor | None = None  # float32 [H, 2 reach + 1], in units of log2
    buckets: Tensor | None = None  # int32 [2 reach + 1]
    sequences: Tensor | None = None  # int32 [S, 5]
    blocks: Tensor | None = None  # int32 [entries, 2]: document, block in it
    unit0: Tensor | None = None  # int32 [documents]: first unit of each


class Numbers(NamedTuple):
    """What kernels are told of a call, in the order of programs.NUMBERS."""

    start: int  # position of query 0
    scale: float
    log2_scale: float
    budget: float  # -ln of the mass that the forward pass may skip on one side
    share: float  # the mass that the backward pass may skip on one side beyond that


class Call(NamedTuple):
    """What a problem is without its q, k and v."""

    kind: Kind
    numbers: Numbers
    inputs: Inputs


def prepare(problem: Problem) -> Call:
    kind = kind_of(problem)
    start: int | Tensor = problem.start
    inputs = Inputs()
    if problem.cu_seqlens is not None:
        documents = _documents(problem.cu_seqlens, blocks_of(problem.q.shape[2], kind.borders))
        inputs = inputs._replace(**dict(zip(("sequences", "blocks", "unit0"), documents, strict=True)))
        start = 0
    elif kind.ragged:
        inputs, start = inputs._replace(sequences=sequences_of(problem, start)), 0
    bias = problem.bias
    if isinstance(bias, LinearBias):
        slopes = plain_slopes(bias.slopes)
        futures = slopes if bias.future is None else plain_slopes(bias.future)
        if futures.dim() != slopes.dim():
            shape = problem.q.shape[:2]
            slopes, futures = slopes.expand(shape).contiguous(), futures.expand(shape).contiguous()
        inputs = inputs._replace(slopes=slopes, futures=futures)
    elif isinstance(bias, BucketBias):
        buckets, line = bucket_line(bias)
        inputs = inputs._replace(line=line, buckets=buckets)
    return Call(kind, numbers_of(problem, start), inputs)


def numbers_of(problem: Problem, start: int | Tensor) -> Numbers:
    assert isinstance(start, int)
    # Half of the tolerance for the forward pass, half for the backward pass; of each, half for either side.
    share = problem.tolerance / (2 if problem.causal else 4)
    scale = min(max(float(problem.scale), -LARGEST), LARGEST)
    low, high = _farthest(problem)
    return Numbers(
        start=min(max(start, low), high),
        scale=scale,
        log2_scale=min(max(scale * LOG2E, -LARGEST), LARGEST),
        budget=-math.log(share) if share > 0.0 else 0.0,
        share=share * SLACK,
    )


def _farthest(problem: Problem) -> tuple[int, int]:
    """Where query 0 may be, counted from key 0. Beyond, all keys are on one side of all queries, and whatever more
    their distances have in common changes no weight; so numbers stay small."""
    return -problem.q.shape[2] - problem.bias_reach, problem.k.shape[2] + problem.bias_reach


def plain_slopes(slopes: Tensor) -> Tensor:
    """Float32, one after another, at an address that kernels may count on."""
    return _plain(slopes.detach().float())


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


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
    position = (zero + start - first).clamp(*_farthest(problem))
    return torch.stack((zero, zero + queries, first, count, position), dim=1).to(torch.int32)


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


def _read(plan: Plan, inputs: Inputs) -> list[Tensor]:
    """What programs.READ names, besides q, k and v."""
    given = [plan.nothing if tensor is None else tensor for tensor in inputs]
    return [*given, plan.sees, plan.order]


def visited(plan: Plan, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """The first and one-past-last key unit of every query unit that a forward pass visited, from its scratch memory:
    int32 [B, H, units] each. Causal attention stops at the diagonal, whatever the second says."""
    shape = (plan.batch, plan.heads, plan.units, plan.found_parts)
    starts = (plan.scratch_parts[name].offset for name in ("from", "to"))
    first, last = (scratch[start:].view(torch.int32)[: math.prod(shape)].view(shape) for start in starts)
    # Parts of a unit beyond the last query were not written.
    part = torch.arange(plan.units * plan.found_parts, device=scratch.device).view(shape[2:])
    written = part * (UNIT // plan.found_parts) < plan.queries
    if plan.packed:  # nor were those of short documents
        assert plan.found_parts == 1
        written = torch.ones_like(written)
    return first.where(written, 2**30).amin(-1), last.where(written, 0).amax(-1)


def certified_blocks(problem: Problem, block: int) -> Tensor | None:
    """The keys visited, in blocks: int32 [B, H, ceil(Tq / block), 2]; None where none are looked for."""
    if problem.cu_seqlens is not None or block % UNIT or 0 in problem.q.shape:
        return None
    call = prepare(problem)
    q, k = rows_contiguous(problem.q), rows_contiguous(problem.k)
    plan = plan_for(call.kind, q, k, k)
    if plan.width == 0:
        return None
    *_, scratch = _forward(call, plan, q, k, k, track=True)
    first, last = visited(plan, scratch)
    low, high = visible_blocks(problem, block)  # [B, H, blocks]
    units = -(-plan.queries // UNIT)
    offset = 0 if call.inputs.sequences is None else call.inputs.sequences[:, None, None, 2]

    def by_block(values: Tensor, fill: int) -> Tensor:
        missing = -units % (block // UNIT)
        padded = torch.nn.functional.pad(values[..., :units].long(), (0, missing), value=fill)
        return padded.unflatten(-1, (-1, block // UNIT))

    empty = high <= low
    low = torch.maximum(low, (offset + by_block(first, 2**40).amin(-1) * UNIT) // block)
    if not plan.causal:
        high = torch.minimum(high, -(-(offset + by_block(last, 0).amax(-1) * UNIT) // block))
    return torch.stack((low, high), dim=-1).masked_fill(empty[..., None], 0).to(torch.int32)


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, plan: Plan | None = None, track: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Output like q, log-sum-exp [B, H, Tq] in units of log2, and the windows of the backward pass.

    plan: if it is known already. track: whether there will be a backward pass; if not, windows are left unwritten.
    """
    if plan is None:
        q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
        plan = plan_for(call.kind, q, k, v)
    return _forward(call, plan, q, k, v, track)[:3]


def _forward(
    call: Call, plan: Plan, q: Tensor, k: Tensor, v: Tensor, track: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    device = q.device
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=device)
    windows = torch.empty((plan.batch, plan.heads, plan.width), dtype=torch.int32, device=device)
    scratch = plan.nothing
    if q.numel() == 0 or plan.keys == 0:
        return out.zero_(), lse.fill_(math.inf), windows.zero_(), scratch
    program = plan.forwards.get(track)
    if program is None:
        program = plan.forwards[track] = programs.forward(plan, out, track)
    if plan.width:
        scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=device)
    program.run((q, k, v, out, lse, windows, scratch, *_read(plan, call.inputs)), call.numbers)
    return out, lse, windows, scratch


class Saved(NamedTuple):
    """What backward needs of a forward pass: its inputs and its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor | None
    future: Tensor | None
    table: Tensor | None
    out: Tensor
    lse: Tensor
    windows: Tensor


def backward(
    call: Call, grad: Tensor, saved: Saved, want_bias: bool, plan: Plan | None = None
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Gradients of q, k, v, and of slopes, future slopes and table where wanted. plan: if it may be known already."""
    q, k, v = rows_contiguous(saved.q), rows_contiguous(saved.k), rows_contiguous(saved.v)
    grad, out = rows_contiguous(grad), rows_contiguous(saved.out)
    lse, windows = _plain(saved.lse), _plain(saved.windows)
    if plan is None or plan.layout != layout_of(q, k, v):  # hooks may have stored tensors elsewhere
        plan = plan_for(call.kind, q, k, v)
    dq, dk, dv = gradient_of(q), gradient_of(k), gradient_of(v)
    empty = q.numel() == 0 or plan.keys == 0
    if empty or plan.uneven or call.kind.tail:  # padding, what lies between documents, the end of a cache
        for gradient in (dq, dk, dv):
            gradient.zero_()
    shares = [plan.nothing] * 3
    if want_bias:  # zeros: blocks beyond the end of a sequence write nothing
        shares = [torch.zeros(shape, dtype=torch.float32, device=q.device) for shape in programs.share_shapes(plan)]
    if not empty:
        key = (grad.stride(), out.stride(), grad.data_ptr() % 16, out.data_ptr() % 16, want_bias)
        program = plan.backwards.get(key)
        if program is None:
            program = plan.backwards[key] = programs.backward(plan, grad, out, (dq, dk, dv), want_bias)
        delta = torch.empty_like(lse)
        program.run(
            (q, k, v, grad, out, lse, delta, dq, dk, dv, windows, *shares, *_read(plan, call.inputs)),
            call.numbers,
        )
    return dq, dk, dv, _bias_gradients(saved, shares, call.kind.buckets) if want_bias else [None] * 3


def _bias_gradients(saved: Saved, shares: list[Tensor], buckets: int) -> list[Tensor | None]:
    """Sum what each program found: the gradients of slopes, future slopes and table."""
    if saved.table is not None:
        return [None, None, shares[2].double().sum((0, 2)).T[:buckets].to(saved.table.dtype).contiguous()]
    if saved.slopes is None:
        return [None, None, None]
    past = shares[0].double().sum(2)  # [B, H]
    ahead = shares[1].double().sum(2)
    if saved.future is None:
        return [fold_gradient(past + ahead, saved.slopes), None, None]
    return [fold_gradient(past, saved.slopes), fold_gradient(ahead, saved.future), None]
