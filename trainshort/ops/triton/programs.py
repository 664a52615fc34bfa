"""The programs of a plan (windows, forward, backward): which kernel gets what, in the order of its parameters."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from trainshort.ops.triton import backward as backward_kernels
from trainshort.ops.triton import forward as forward_kernels
from trainshort.ops.triton import windows as window_kernels
from trainshort.ops.triton.driver import Launch, Tile
from trainshort.ops.triton.plan import Plan, can_describe
from trainshort.ops.triton.program import Part, Program
from trainshort.ops.triton.shapes import ROWS

COARSE = {"ieee": 0.0, "tf32": 2.0**-9}  # rounding of products beyond float32's, relative
SCRATCH = ("reach", "common", "center", "norm", "pasts", "norm_past", "most_past", "norm_ahead", "most_ahead", "from",
           "to", "found_first", "found_last")  # fmt: skip

# Inputs of a call in their order, then what a plan keeps.
READ = ("slopes", "futures", "line", "buckets", "sequences", "blocks", "unit0", "sees", "order")
NUMBERS = ("start", "scale", "log2_scale", "budget", "share")


def _window_parts(plan: Plan) -> dict[str, Part]:
    """FIRST, LAST, UNTIL and SINCE in one tensor of windows."""
    units, key_units = plan.units, plan.key_units
    starts = (0, 0, units, units) if plan.causal else (0, units, 2 * units, 2 * units + key_units)
    names = ("first", "last", "until", "since")
    if plan.width == 0:
        starts = (0,) * 4
    return {name: Part("windows", 4 * start, torch.int32) for name, start in zip(names, starts, strict=True)}


def _bounds_launches(plan: Plan) -> list[Launch]:
    q, k = plan.strides["q"], plan.strides["k"]
    heads, kv_heads, entries = plan.heads, plan.kv_heads, plan.key_entries
    lengths = (plan.queries, plan.keys)
    return [
        Launch(
            window_kernels.sample_kernel,
            (plan.sequences, kv_heads, 1),
            ("q", "k", "center", "common", "reach", "sequences", "start", "scale",
             *q, *k, heads, kv_heads, plan.group, *lengths),
            plan.constants(num_warps=4),
        ),
        Launch(
            window_kernels.bounds_kernel,
            (entries, plan.batch, kv_heads),
            (Tile("k", ROWS), "slopes", "futures", "center", "reach", "norm", "pasts", "aheads",
             "sequences", "blocks", "start",
             *k, plan.stride_slope, heads, kv_heads, plan.group, *lengths, entries),
            plan.constants(TMA=plan.tma, num_warps=4),
        ),
        Launch(
            window_kernels.largest_kernel,
            (plan.sequences, kv_heads, 1),
            ("norm", "pasts", "aheads", "norm_past", "most_past", "norm_ahead", "most_ahead", "sequences", "unit0",
             "start", heads, kv_heads, plan.group, *lengths, entries),
            _scan_constants(plan),
        ),
    ]  # fmt: skip


def _scan_constants(plan: Plan) -> dict[str, Any]:
    together = min(1024, triton.next_power_of_2(max(plan.units, plan.key_units)))
    return {"CAUSAL": plan.causal, "RAGGED": plan.kind.ragged, "PACKED": plan.packed, "TOGETHER": together,
            "num_warps": 4 if together >= 512 else 1}  # fmt: skip


def _order_launch(plan: Plan) -> Launch:
    return Launch(
        window_kernels.order_kernel,
        (plan.sequences, plan.heads, 1),
        ("found_first", "found_last", "first", "last", "until", "since", "sequences", "unit0",
         plan.units * plan.found_parts, plan.width, plan.heads, plan.queries, plan.keys),
        _scan_constants(plan) | {"PARTS": plan.found_parts},
    )  # fmt: skip


def forward(plan: Plan, out: Tensor, track: bool) -> Program:
    """Windows, if there can be any, the output, and if asked the windows of the backward pass. out: as it will be."""
    tiles, strides = plan.tiles["forward"], plan.strides
    scratch = SCRATCH if plan.width else ("order",) * len(SCRATCH)
    launch = Launch(
        forward_kernels.forward_kernel,
        (plan.entries * (ROWS // tiles.rows), plan.batch, plan.heads),
        (Tile("q", tiles.rows), Tile("k", tiles.keys), Tile("v", tiles.keys), "out", "lse", "slopes", "futures",
         "sees", "line", *scratch, "sequences", "blocks", "order", "unit0", "start", "log2_scale", "scale", "budget",
         "share", *strides["q"], *strides["k"], *strides["v"], *out.stride()[:3], plan.stride_slope, plan.units,
         plan.key_entries, *_sizes(plan)),
        plan.attention_constants(tiles, plan.tma, TRACK=track and plan.width > 0,
                                 COARSE=COARSE[plan.precision]),
    )  # fmt: skip
    launches = [launch]
    if plan.width:
        launches = [*_bounds_launches(plan), launch, *([_order_launch(plan)] if track else ())]
    return Program(
        ("q", "k", "v", "out", "lse", "windows", "scratch", *READ),
        NUMBERS,
        _window_parts(plan) | (plan.scratch_parts if plan.width else {}),
        launches,
        plan.block_dim if plan.tma else 0,
    )


def backward(plan: Plan, grad: Tensor, out: Tensor, gradients: tuple[Tensor, Tensor, Tensor], bias: bool) -> Program:
    """All gradients; those of slopes and table as shares to be summed. grad, out, gradients: as they will be."""
    strides = plan.strides
    dq, dk, dv = (gradient.stride()[:3] for gradient in gradients)
    reads = (*strides["q"], *strides["k"], *strides["v"])
    tma = plan.tma and can_describe(grad)
    rows, keys = plan.tiles["queries"], plan.tiles["keys"]
    queries_first = Launch(
        backward_kernels.query_kernel,
        (plan.entries * (ROWS // rows.rows), plan.batch, plan.heads),
        (Tile("q", rows.rows), Tile("k", rows.keys), Tile("v", rows.keys), Tile("grad", rows.rows),
         "out", "lse", "delta", "dq", "dpast", "dfuture", "dtable", "slopes", "futures", "sees", "line", "buckets",
         "first", "last", "sequences", "blocks", "order", "unit0", "start", "log2_scale", "scale",
         *reads, *out.stride()[:3], *grad.stride()[:3], *dq, plan.stride_slope, plan.width, *_sizes(plan)),
        plan.attention_constants(rows, tma, DBIAS=bias, NB=triton.next_power_of_2(plan.kind.buckets)),
    )  # fmt: skip
    then_keys = Launch(
        backward_kernels.key_kernel,
        (plan.key_entries * (ROWS // keys.keys), plan.batch, plan.kv_heads),
        (Tile("q", keys.rows), Tile("k", keys.keys), Tile("v", keys.keys), Tile("grad", keys.rows),
         "lse", "delta", "dk", "dv", "slopes", "futures", "sees", "line", "first", "last", "until", "since",
         "sequences", "blocks", "order", "unit0", "start", "log2_scale", "scale",
         *reads, *grad.stride()[:3], *dk, *dv, plan.stride_slope, plan.width, *_sizes(plan)),
        plan.attention_constants(keys, tma, ORDERED=plan.ordered and plan.group == 1, BLIND=plan.kind.blind),
    )  # fmt: skip
    return Program(
        ("q", "k", "v", "grad", "out", "lse", "delta", "dq", "dk", "dv", "windows", "dpast", "dfuture", "dtable",
         *READ),
        NUMBERS,
        _window_parts(plan),
        [queries_first, then_keys],
        plan.block_dim if tma else 0,
    )  # fmt: skip


def share_shapes(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Of what each program of the backward pass finds of the gradients of slopes, future slopes and table."""
    programs = plan.entries * (ROWS // plan.tiles["queries"].rows)
    shape = (plan.batch, plan.heads, programs)
    return shape, shape, (*shape, triton.next_power_of_2(plan.kind.buckets))


def _sizes(plan: Plan) -> tuple[float, ...]:
    return plan.heads, plan.group, plan.queries, plan.keys, plan.kind.offset, plan.kind.reach
