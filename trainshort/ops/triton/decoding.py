"""Launching the decoding kernels: no plan and no pass over the keys, because every step has one key more."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from trainshort.ops.bias import BucketBias, LinearBias
from trainshort.ops.problem import Problem
from trainshort.ops.triton.decode import join_kernel, split_kernel
from trainshort.ops.triton.driver import Launch
from trainshort.ops.triton.launch import bucket_line, numbers_of, plain_slopes, sequences_of
from trainshort.ops.triton.program import Program
from trainshort.ops.triton.shapes import allows_tf32, can_skip, kind_of_bias, rows_contiguous

SHARES = 4 * 132  # programs that keep a large GPU busy
MOST_SPLITS = 64
NUMBERS = ("norm_count", "keys", "start", "scale", "budget")
_MOST = 512  # programs to remember
_programs: dict[tuple[Any, ...], Program] = {}


def decode(problem: Problem) -> Tensor:
    """Output like q, for a few causal queries a row and without a way back."""
    q, k, v = (rows_contiguous(t.detach()) for t in (problem.q, problem.k, problem.v))
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    out = torch.empty_like(q)
    if q.numel() == 0 or keys == 0:
        return out.zero_()
    bias, start, sequences = problem.bias, problem.start, q
    ragged = problem.key_padding_mask is not None or isinstance(start, Tensor)
    if ragged:
        sequences, start = sequences_of(problem, start), 0
    slopes, stride_slope, line, reach = q, 0, q, 0
    if isinstance(bias, LinearBias):
        slopes = plain_slopes(bias.slopes)
        stride_slope = heads if slopes.dim() == 2 else 0
    elif isinstance(bias, BucketBias):
        reach = bias.max_distance
        _, line = bucket_line(bias)
    norms, norm_count = q, 0
    norm_strides: tuple[int, ...] = (0, 0)
    windows = isinstance(bias, LinearBias) and can_skip(problem.tolerance) and problem.key_norms is not None
    if windows and problem.key_norms is not None:
        norms = problem.key_norms.detach().float()
        norms = norms[..., None] if norms.dim() == 2 else rows_contiguous(norms)
        norm_strides, norm_count = norms.stride()[:2], norms.shape[2]
    splits = min(MOST_SPLITS, triton.next_power_of_2(max(1, -(-SHARES // (batch * kv_heads)))))
    parts = torch.empty((batch, heads, queries, splits, dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((batch, heads, queries, splits), dtype=torch.float32, device=q.device)
    wide = q.element_size() == 4
    group = heads // kv_heads
    constants = {
        "D": dim,
        "BD": max(16, triton.next_power_of_2(dim)),
        "BM": max(16, triton.next_power_of_2(group * queries)),
        "BN": 32 if wide else 64,
        "BIAS": kind_of_bias(bias),
        "WINDOWS": windows,
        "RAGGED": ragged,
        "SPLITS": splits,
        "PRECISION": "tf32" if wide and allows_tf32() else "ieee",
        "STAGES": 1 if wide else 3,
        "CHUNK": min(1024, triton.next_power_of_2(max(norm_count, 1))),
    }
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *norm_strides, stride_slope)
    places = tuple(t.data_ptr() % 16 for t in (q, k, v, norms, slopes))
    sizes = (*strides, heads, group, queries, reach)
    key = (*sizes, *constants.values(), *places, batch, q.dtype, norms.dtype, q.device)
    program = _programs.get(key)
    if program is None:
        if len(_programs) >= _MOST:
            _programs.clear()
        program = _programs[key] = _program(sizes, constants, (splits, kv_heads, batch), out)
    start, scale, *_ = numbers_of(problem, start)
    budget = -math.log(problem.tolerance) if windows else 0.0
    program.run((q, k, v, parts, sums, out, slopes, line, norms, sequences), (norm_count, keys, start, scale, budget))
    return out


def _program(sizes: tuple[int, ...], constants: dict[str, Any], grid: tuple[int, int, int], out: Tensor) -> Program:
    split = Launch(
        split_kernel,
        grid,
        ("q", "k", "v", "parts", "sums", "slopes", "line", "norms", "sequences", *NUMBERS, *sizes),
        constants | {"num_warps": 4},
    )
    batch, heads, queries, _ = out.shape
    join = Launch(
        join_kernel,
        (queries, heads, batch),
        ("parts", "sums", "out", *out.stride()[:3], heads, queries),
        {name: constants[name] for name in ("D", "BD", "SPLITS")} | {"num_warps": 4},
    )
    tensors = ("q", "k", "v", "parts", "sums", "out", "slopes", "line", "norms", "sequences")
    return Program(tensors, NUMBERS, {}, [split, join])
