"""What a call is: the features that its kernels are made for, and the values that they are given. Needs no Triton.

Nothing here looks inside a tensor or waits for the GPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainshort.ops.bias import LOG2E, NO_BIAS, KernelBias, Sight
from trainshort.ops.dropout import threshold_of
from trainshort.ops.problem import Problem
from trainshort.ops.triton.shapes import ROWS, UNIT, allows_tf32, blocks_of, borders_of, can_skip

LARGEST = 3.4028234e38  # of float32
SLACK = 0.999  # for the rounding of sums that are compared with a part of the tolerance

Values = dict[str, Tensor | float | None]  # by the names of the kernels' parameters


class Features(NamedTuple):
    """All that tells one problem's kernels from another's, but for shapes and memory layouts of q, k and v."""

    dtype: torch.dtype
    device: torch.device
    causal: bool
    windows: bool  # whether keys may be skipped
    bias: int  # KernelBias.kind
    sights: tuple[Sight, ...]
    offset: float
    by_row: bool  # slopes [B, H]
    gates: bool  # of a DecayBias: gates, which may be closed; else times
    level_strides: tuple[int, int]
    max_distance: int  # of a BucketBias
    buckets: int
    ragged: bool  # padding, or a start for each row
    borders: int  # of packed documents
    tail: bool  # keys after the last query, which must not even be multiplied by zero
    blind: bool  # queries that see no key, which must not even be multiplied by zero
    tf32: bool
    dropout: int = 0  # its probability in units of 2^-31
    part: bool = False  # whether its seed is that of a part of a longer sequence


class Call(NamedTuple):
    """What a problem is without its q, k and v. Values: tensors (None: absent) and numbers that kernels read."""

    features: Features
    values: Values


class Saved(NamedTuple):
    """What the backward pass needs of the forward pass: its inputs and its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    windows: Tensor


class Stored(NamedTuple):
    """What a layer of a cache keeps, with room for more: keys and values [B, Hkv, capacity, D], and the largest norm
    of each block of keys, float32 [B, Hkv, blocks]."""

    keys: Tensor
    values: Tensor
    norms: Tensor


class Rotation(NamedTuple):
    """Rotary positions: queries and keys times `size`, then channel i of the first half turned with channel i of the
    second by position x frequency."""

    frequencies: Tensor  # float32 [D / 2]
    size: float = 1.0

    def values(self) -> Values:
        return {"FREQUENCIES": self.frequencies, "size": self.size}


def describe(problem: Problem) -> Call:
    bias = kernel_bias(problem)
    values: Values = {
        "SLOPES": bias.slopes,
        "FUTURES": bias.futures,
        "LINE": bias.line,
        "BUCKETS": bias.buckets,
        "LEVELS": bias.levels,
        "AHEAD": bias.ahead,
        "GATE_FIRST": bias.gate_first,
        "AHEAD_END": bias.ahead_end,
        "SEQ": None,  # int32 [sequences, 5]
        "BLOCKS": None,  # int32 [blocks, 2]: document, block in it
        "SEED": _seed(problem),
        "UNIT0": None,  # int32 [documents]: first unit of each
    }
    features = _features(problem, bias)
    start: int | Tensor = problem.start
    if problem.cu_seqlens is not None:
        blocks = blocks_of(problem.q.shape[2], features.borders)
        values["SEQ"], values["BLOCKS"], values["UNIT0"] = _documents(problem.cu_seqlens, blocks)
        start = 0
    elif features.ragged:
        values["SEQ"], start = sequences_of(problem, start), 0
    assert isinstance(start, int)
    return Call(features, {**values, **numbers_of(problem, start)})


def _seed(problem: Problem) -> Tensor | None:
    """The seed of the dropout, at an address that is a multiple of 16, as the kernels are compiled for."""
    seed = problem.seed
    return seed if seed is None or seed.data_ptr() % 16 == 0 else seed.clone()


def kernel_bias(problem: Problem) -> KernelBias:
    return KernelBias(NO_BIAS) if problem.bias is None else problem.bias.for_kernels(problem.q.shape[0])


def may_skip(problem: Problem) -> bool:
    """Whether bias and tolerance let the kernels skip keys, which divide the tolerance among passes and sides."""
    return problem.may_skip and can_skip(problem.tolerance)


def _features(problem: Problem, bias: KernelBias) -> Features:
    start = problem.query_start
    return Features(
        dtype=problem.q.dtype,
        device=problem.q.device,
        causal=problem.causal,
        windows=may_skip(problem),
        bias=bias.kind,
        sights=problem.sights,
        offset=bias.offset,
        by_row=bias.by_row,
        gates=bias.gate_first is not None,
        level_strides=bias.level_strides,
        max_distance=bias.max_distance,
        buckets=bias.bucket_count,
        ragged=problem.key_padding_mask is not None or isinstance(start, Tensor),
        borders=borders_of(problem.cu_seqlens),
        blind=_may_be_blind(problem),
        tail=problem.causal and isinstance(start, int) and start + problem.q.shape[2] < problem.k.shape[2],
        tf32=problem.q.dtype == torch.float32 and allows_tf32(),
        dropout=threshold_of(problem.dropout),
        part=problem.seed is not None and problem.seed.dim() > 0,
    )


def _may_be_blind(problem: Problem) -> bool:
    """Whether some query may see no key."""
    start = problem.start
    if problem.key_padding_mask is not None or isinstance(start, Tensor):
        return True
    sided = not problem.causal and set(problem.sights) != {"both"}
    return (start < 0 and (problem.causal or sided)) or (sided and start + problem.q.shape[2] > problem.k.shape[2])


def numbers_of(problem: Problem, start: int) -> dict[str, float]:
    """start: the position of query 0. budget: -ln of the softmax mass that the forward pass may skip on one side.
    mass: what the backward pass may skip on one side beyond that."""
    # Half of the tolerance for the forward pass, half for the backward pass; of each, half for either side.
    mass = problem.tolerance / (2 if problem.causal else 4)
    scale = min(max(float(problem.scale), -LARGEST), LARGEST)
    low, high = _farthest(problem)
    return {
        "start": min(max(start, low), high),
        "scale": scale,
        "log2_scale": min(max(scale * LOG2E, -LARGEST), LARGEST),
        "budget": -math.log(mass) if mass > 0.0 else 0.0,
        "mass": mass * SLACK,
    }


def _farthest(problem: Problem) -> tuple[int, int]:
    """Where query 0 may be, counted from key 0. Beyond, all keys are on one side of all queries, and whatever more
    their distances have in common changes no weight; so numbers stay small."""
    beyond = 0 if problem.bias is None else problem.bias.separable_beyond
    return -problem.q.shape[2] - beyond, problem.k.shape[2] + beyond


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


def _documents(cu_seqlens: Tensor, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed documents as sequences, the blocks they fall into, and each one's first unit."""
    borders = cu_seqlens.to(torch.int32)
    if borders.shape[0] < 2:
        borders = torch.zeros(2, dtype=torch.int32, device=borders.device)
    first, length = borders[:-1], borders.diff()
    sequences = torch.stack((first, length, first, length, torch.zeros_like(first)), dim=1)
    each = (length + ROWS - 1) // ROWS
    ends = each.cumsum(0)
    index = torch.arange(blocks, device=borders.device)
    # Blocks after the last document lie beyond its end: there is nothing to do in them.
    document = torch.searchsorted(ends, index, right=True).clamp_max(len(each) - 1)
    places = torch.stack((document, index - (ends - each)[document]), dim=1).to(torch.int32)
    return sequences, places, ((ends - each) * (ROWS // UNIT)).to(torch.int32)
