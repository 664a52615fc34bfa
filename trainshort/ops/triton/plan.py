"""What the kernels of a problem are told that does not change from call to call with the same shapes."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from trainshort.ops.bias import BucketBias, LinearBias, Sight, alibi_slopes
from trainshort.ops.problem import Problem
from trainshort.ops.triton.program import Part, Program, interpreted
from trainshort.ops.triton.shapes import (
    ROWS,
    UNIT,
    allows_tf32,
    blocks_of,
    borders_of,
    can_skip,
    kind_of_bias,
    layout_of,
    window_width,
)
from trainshort.ops.triton.tuning import Tiles, is_hopper, tiles_for

_SIGHTS = {"past": 1, "future": 2, "both": 3}
_MOST = 512  # plans to remember
MOST_ROWS = 65535  # of the batch: the second and third number of a grid


class Kind(NamedTuple):
    """All that tells one problem's kernels from another's, but for shapes and memory layouts of q, k and v."""

    dtype: torch.dtype
    device: torch.device
    causal: bool
    windows: bool  # whether keys may be skipped
    bias: int
    sights: tuple[Sight, ...]
    offset: float
    by_row: bool  # slopes [B, H]
    reach: int  # of a BucketBias: its largest distance
    buckets: int
    ragged: bool  # padding, or a start for each row
    borders: int  # of packed documents
    tail: bool  # keys after the last query, at which nobody may look, not even to multiply them by zero
    blind: bool  # queries that see no key, at which no key may look, as little as at a tail
    tf32: bool


def kind_of(problem: Problem) -> Kind:
    bias, start = problem.bias, problem.query_start
    linear = bias if isinstance(bias, LinearBias) else None
    bucket = bias if isinstance(bias, BucketBias) else None
    by_row = linear is not None and (
        linear.slopes.dim() == 2 or (linear.future is not None and linear.future.dim() == 2)
    )
    return Kind(
        dtype=problem.q.dtype,
        device=problem.q.device,
        causal=problem.causal,
        windows=linear is not None and can_skip(problem.tolerance),
        bias=kind_of_bias(bias),
        sights=problem.sights,
        offset=float(linear.offset) if linear else 0.0,
        by_row=by_row,
        reach=bucket.max_distance if bucket else 0,
        buckets=bucket.table.shape[0] if bucket else 1,
        ragged=problem.key_padding_mask is not None or isinstance(start, Tensor),
        borders=borders_of(problem.cu_seqlens),
        blind=_may_be_blind(problem),
        tail=problem.causal and isinstance(start, int) and start + problem.q.shape[2] < problem.k.shape[2],
        tf32=problem.q.dtype == torch.float32 and allows_tf32(),
    )


def _may_be_blind(problem: Problem) -> bool:
    """Whether some query may see no key."""
    start = problem.start
    if problem.key_padding_mask is not None or isinstance(start, Tensor):
        return True
    sided = not problem.causal and set(problem.sights) != {"both"}
    return (start < 0 and (problem.causal or sided)) or (sided and start + problem.q.shape[2] > problem.k.shape[2])


class Plan:
    """One kind of problem in one memory layout: sizes, tiles, and the programs made of them."""

    def __init__(self, kind: Kind, layout: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> None:
        self.kind, self.layout = kind, layout
        self.device = q.device
        self.batch, self.heads, self.queries, self.dim = q.shape
        if max(self.batch, self.heads) > MOST_ROWS:
            raise ValueError(
                f"backend 'triton' takes at most {MOST_ROWS:,} rows and heads, got {self.batch:,} and "
                f"{self.heads:,}: split the batch, or use backend='blocked'"
            )
        self.kv_heads, self.keys = k.shape[1], k.shape[2]
        self.group = self.heads // self.kv_heads
        self.block_dim = max(16, triton.next_power_of_2(self.dim))
        self.strides = {name: t.stride()[:3] for name, t in (("q", q), ("k", k), ("v", v))}
        self.causal = kind.causal
        self.packed = kind.borders > 0
        self.uneven = kind.ragged or self.packed
        self.entries = blocks_of(self.queries, kind.borders)
        self.key_entries = blocks_of(self.keys, kind.borders)
        self.units = self.entries * (ROWS // UNIT)
        self.key_units = self.key_entries * (ROWS // UNIT)
        self.width = window_width(self.queries, self.keys, kind.windows, kind.borders, kind.causal)
        self.stride_slope = self.heads if kind.by_row else 0
        tiled = q.element_size() == 2 and not self.uneven and not kind.tail and (is_hopper(q.device) or interpreted())
        self.tma = tiled and all(can_describe(tensor) for tensor in (q, k, v))
        self.precision = "tf32" if kind.tf32 else "ieee"
        kernels = ("forward", "queries", "keys")
        self.tiles = {name: tiles_for(name, q.dtype, self.dim, q.device, self.width == 0) for name in kernels}
        sights = tuple(_SIGHTS[sight] for sight in kind.sights)
        self.sided = not kind.causal and sights != (3,) * self.heads
        # Stands for tensors that are not there. Not q: a call may outlive it, and it shall not be kept.
        self.nothing = _numbers((0,) * 4, q.device)
        self.sees = _numbers(sights, q.device) if self.sided else self.nothing
        # Heads from steep to gentle by the paper's rule, where that is not their own order.
        self.ordered = self.heads & (self.heads - 1) != 0
        self.order = _numbers(_steepest_first(self.heads), q.device) if self.ordered else self.nothing
        self.sequences = max(kind.borders - 1, 1) if self.packed else self.batch
        self.found_parts = UNIT // min(UNIT, self.tiles["forward"].rows)  # of a unit, that programs look at apart
        self.scratch_parts, self.scratch_bytes = self._scratch()
        self.forwards: dict[bool, Program] = {}  # with what the backward pass needs, or without
        self.backwards: dict[tuple[Any, ...], Program] = {}

    def _scratch(self) -> tuple[dict[str, Part], int]:
        """Of each sequence: X by head, centre and its length by key head. Of each unit of keys: norm, K of past and
        future, and the largest of these before and after it. Of each part of a unit of queries: what the forward pass
        visits, and what it finds to matter."""
        key_units = self.batch * self.kv_heads * self.key_units
        parts = self.batch * self.heads * self.units * self.found_parts
        sizes = {
            "reach": self.sequences * self.heads * 4,
            "common": self.sequences * self.kv_heads * 4,
            "center": self.sequences * self.kv_heads * self.dim * 4,
            "norm": key_units * 4,
            "norm_past": key_units * 4,
            "norm_ahead": 0 if self.causal else key_units * 4,
            "pasts": key_units * self.group * 4,
            "most_past": key_units * self.group * 4,
            "aheads": 0 if self.causal else key_units * self.group * 4,
            "most_ahead": 0 if self.causal else key_units * self.group * 4,
            "from": parts * 4,
            "to": 0 if self.causal else parts * 4,
            "found_first": parts * 4,
            "found_last": 0 if self.causal else parts * 4,
        }
        starts = [0, *accumulate(-(-size // 16) * 16 for size in sizes.values())]
        whole = ("from", "to", "found_first", "found_last")
        named = {
            name: Part("scratch", start, torch.int32 if name in whole else torch.float32)
            for name, start in zip(sizes, starts, strict=False)
        }
        return named, starts[-1]

    def constants(self, **more: Any) -> dict[str, Any]:
        return {
            "D": self.dim,
            "BD": self.block_dim,
            "CAUSAL": self.causal,
            "RAGGED": self.kind.ragged,
            "PACKED": self.packed,
            **more,
        }

    def attention_constants(self, tiles: Tiles, tma: bool, **more: Any) -> dict[str, Any]:
        if tiles.registers is not None:
            more["maxnreg"] = tiles.registers
        return self.constants(
            BM=tiles.rows,
            BN=tiles.keys,
            BIAS=self.kind.bias,
            SIDED=self.sided,
            WINDOWS=self.width > 0,
            TMA=tma,
            PRECISION=self.precision,
            STAGES=tiles.stages,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **({"ORDERED": self.ordered} | more),
        )


@cache
def _numbers(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept for good, unlike plans: a captured CUDA graph goes on reading them."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int32, device=device)


def _steepest_first(heads: int) -> tuple[int, ...]:
    return tuple(alibi_slopes(heads).argsort(descending=True).tolist())


_plans: dict[tuple[Any, ...], Plan] = {}


def plan_for(kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> Plan:
    layout = layout_of(q, k, v)
    key = (kind, layout)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST:
            _plans.clear()
        plan = _plans[key] = Plan(kind, layout, q, k, v)
    return plan


def can_describe(tensor: Tensor) -> bool:
    """Whether the hardware's tile copies can read it: rows and starts on 16 bytes."""
    size = tensor.element_size()
    b, h, t, d = tensor.stride()
    return (
        d == 1
        and (b * size | h * size | t * size | tensor.data_ptr()) % 16 == 0
        and min(b, h, t) > 0
        and tensor.numel() > 0
    )
