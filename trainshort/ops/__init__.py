"""Attention: tensors in, tensors out. Knows nothing of models.

`alibi_attention` and `attention` check their arguments, choose a backend and call it. Backends:

    reference   the specification: dense, reads like the formula
    blocked     pure torch, linear memory, certified windows, any device
    triton      fused kernels for GPUs, certified windows
"""

from __future__ import annotations

import importlib.util
import math
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainshort.ops import operators as op
from trainshort.ops import reference
from trainshort.ops import sdpa as plain
from trainshort.ops.bias import Bias, BucketBias, LinearBias, alibi_slopes, learned
from trainshort.ops.blocked import decode
from trainshort.ops.problem import (
    BLOCK,
    Problem,
    check_shapes,
    check_tensors,
    default_tolerance,
)
from trainshort.ops.tracing import is_eager, is_recording
from trainshort.ops.triton import op as triton_ops
from trainshort.ops.triton import run as triton_backend
from trainshort.ops.triton.shapes import LARGEST_DIM
from trainshort.ops.values import check_values
from trainshort.ops.windows import certified_blocks

__all__ = [
    "BucketBias",
    "LinearBias",
    "alibi_attention",
    "alibi_slopes",
    "attention",
    "backend_for",
    "certified_windows",
]

BACKENDS = ("auto", "reference", "blocked", "triton")
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton then runs kernels on the CPU, for tests


def alibi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    tolerance: float | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    query_start: int | Tensor | None = None,
    key_norms: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention with a linear penalty on distance: softmax(scale q.k - slope |i - j|) v, [B, H, Tq, D].

    q: [B, H, Tq, D]; k, v: [B, Hkv, Tk, D], Hkv a divisor of H (grouped queries). Any strides; float16,
        bfloat16, float32 or float64. Queries are right-aligned to keys unless `query_start` says otherwise.
    slopes: [H] or [B, H], positive; None: the paper's. A gradient flows to it if it asks.
    causal: a query sees its past and itself; False: both sides, symmetrically.
    scale: of the scores; None: 1/sqrt(D).
    tolerance: the largest softmax mass that a query may skip. None: 2^-14 for 16-bit inputs, 2^-24 for float32,
        0 for float64. 0: visit everything. What skipping can cost is bounded: see docs/attention.md.
    key_padding_mask: bool [B, Tk], True where a key is real, one contiguous run a row. Padding never leaks, and
        a query with no key to look at gives zeros.
    cu_seqlens: int [documents + 1]: borders of documents packed into one row (B = 1); attention and distances
        stay inside each.
    query_start: position of query 0 among the keys, an int or int [B]; with a preallocated cache, the number
        of tokens cached before this call. Keys after the last query are never looked at.
    key_norms: upper bounds of the keys' norms, kept beside a cache so that a decoding step finds its window
        without a pass over the keys: [B, Hkv], or one for each block of 128 keys, or one for each key.
    backend: "auto", "reference", "blocked" or "triton". A named backend runs or raises.
    """
    if slopes is None:
        if not isinstance(q, Tensor) or q.dim() != 4:
            check_tensors(q, k, v)
        slopes = _default_slopes(q)
    elif not isinstance(slopes, Tensor):
        raise TypeError(f"slopes must be a tensor or None, got {type(slopes).__name__}")
    return attention(
        q,
        k,
        v,
        bias=LinearBias(slopes),
        causal=causal,
        scale=scale,
        tolerance=tolerance,
        key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens,
        query_start=query_start,
        key_norms=key_norms,
        backend=backend,
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Bias = None,
    causal: bool = True,
    scale: float | None = None,
    tolerance: float | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    query_start: int | Tensor | None = None,
    key_norms: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention with a bias that depends on distance: a LinearBias (ALiBi), a BucketBias (T5) or none.

    Everything else as in `alibi_attention`. Keys can be skipped under a LinearBias only: `tolerance` and
    `key_norms` say nothing otherwise.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    key = None
    if isinstance(bias, LinearBias) and _may_be_cached(q, backend, key_padding_mask, cu_seqlens, key_norms):
        key = triton_backend.cached_signature(q, k, v, bias, causal, scale, tolerance, query_start)
        call = None if key is None else triton_backend.cached_call(key)
        if call is not None:
            return triton_backend.attend_cached(call, q, k, v, bias.slopes)
    problem = _problem(q, k, v, bias, causal, scale, tolerance, key_padding_mask, cu_seqlens, query_start, key_norms)
    chosen = backend_for(problem.q) if backend == "auto" else backend
    if backend == "triton":
        _require_triton(problem.q)
    if chosen == "reference":
        check_values(problem)
        return reference.attend(problem)
    if backend == "auto" and plain.fits(problem):
        return plain.attend(problem)
    parts = _parts(problem)
    op.refuse_transforms(parts)
    eager, recording = is_eager(*parts), is_recording(*parts)
    if chosen == "triton":
        if not recording and _is_decoding(problem):
            return triton_backend.decode(problem) if eager else triton_ops.triton_decode_op(*op.pack(problem))
        if not eager:
            return triton_ops.triton_op(*op.pack(problem))[0]
        attended = triton_backend.attend(problem)
        if key is not None and not _is_decoding(problem):
            triton_backend.remember(key, problem)
        return attended
    if not recording and eager and decode.fits(problem):
        # Without the operator's bookkeeping, where a step takes microseconds.
        if problem.key_padding_mask is not None:
            check_values(problem)
        out = decode.attend(problem)
        if out is not None:
            return out
    return op.blocked_op(*op.pack(problem))[0]


def certified_windows(
    q: Tensor,
    k: Tensor,
    slopes: Tensor | None = None,
    *,
    bias: LinearBias | None = None,
    causal: bool = True,
    scale: float | None = None,
    tolerance: float | None = None,
    block: int = BLOCK,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    query_start: int | Tensor | None = None,
    key_norms: Tensor | None = None,
) -> Tensor:
    """Which keys can matter: first and one-past-last key block visited, int32 [B, H, ceil(Tq/block), 2].

    For every query, the softmax mass of all keys in sight outside its block's window is at most `tolerance`,
    proved from norms: keys outside are never compared. A query block that sees no key at all has an empty window
    (0, 0). With the default block of 128 these are exactly the keys that the backend visits, except that the
    `triton` backend cuts its windows at every 64 keys and queries; it finds them in its forward pass, which this
    runs, and visits still fewer keys in its backward pass. Where the slopes alone show that less than an eighth of
    the blocks could be skipped (a half in plain causal rows of at most 1,024), the `blocked` backend visits
    everything. Arguments as in `alibi_attention`; `bias` instead of `slopes` for the variants of encoders.
    """
    check_tensors(q, k, None)
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"block must be a positive int, got {block!r}")
    if bias is None:
        bias = LinearBias(_default_slopes(q) if slopes is None else slopes)
    elif slopes is not None:
        raise ValueError("slopes and bias say the same thing: pass one of them")
    elif not isinstance(bias, LinearBias):
        raise TypeError(f"bias must be a LinearBias, got {type(bias).__name__}")
    problem = _problem(q, k, k, bias, causal, scale, tolerance, key_padding_mask, cu_seqlens, query_start, key_norms)
    check_values(problem)
    with torch.no_grad():
        if backend_for(problem.q) == "triton" and is_eager(*_parts(problem)):
            found = triton_backend.certified_blocks(problem, block)
            if found is not None:
                return found
        return certified_blocks(problem, block)


def backend_for(q: Tensor) -> str:
    """The name of the backend that "auto" chooses for such a tensor."""
    if not isinstance(q, Tensor):
        raise TypeError(f"q must be a tensor, got {type(q).__name__}")
    on_gpu = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return "triton" if HAS_TRITON and on_gpu and q.shape[-1] <= LARGEST_DIM else "blocked"


def _default_slopes(q: Tensor) -> Tensor:
    return _kept_slopes(q.shape[1], q.device) if is_eager(q) else alibi_slopes(q.shape[1], q.device)


@cache
def _kept_slopes(heads: int, device: torch.device) -> Tensor:
    """Kept for good: a captured CUDA graph goes on reading them."""
    with torch.inference_mode(False):
        return alibi_slopes(heads, device)


def _parts(problem: Problem) -> list[Tensor]:
    """The tensors that a gradient could be asked for."""
    return [problem.q, problem.k, problem.v, *(t for t in learned(problem.bias) if t is not None)]


def _may_be_cached(q: Any, backend: str, *others: Any) -> bool:
    """Whether this could be a call to the Triton kernels without any of these other arguments."""
    if backend not in ("auto", "triton") or not isinstance(q, Tensor):
        return False
    return (q.is_cuda or (INTERPRETED and backend == "triton")) and all(other is None for other in others)


def _is_decoding(problem: Problem) -> bool:
    """A few causal queries a row."""
    queries = problem.q.shape[2]
    few = plain.holds(queries <= 16) and plain.holds(queries * (problem.q.shape[1] // problem.k.shape[1]) <= 64)
    return problem.causal and problem.cu_seqlens is None and few


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast queries, keys and values take its dtype; everything else stays as it is."""
    if not all(isinstance(t, Tensor) and t.is_floating_point() for t in (q, k, v)) or q.dtype == torch.float64:
        return q, k, v
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _norms_after_rounding(norms: Tensor, k: Tensor) -> Tensor:
    """Upper bounds for keys that were just rounded to k's dtype, from those of the keys as they were.

    A normal number grows by half a unit in the last place at most, a smaller one by less than the smallest there is;
    one beyond the largest becomes infinite.
    """
    limits = torch.finfo(k.dtype)
    longer = norms * (1.0 + 0.51 * limits.eps) + k.shape[3] ** 0.5 * limits.smallest_normal * limits.eps
    return torch.where(longer > limits.max, math.inf, longer)


def _require_triton(q: Tensor) -> None:
    """Say why the Triton backend cannot run, if it cannot."""
    other = "use backend='auto' or 'blocked', which run on any device"
    if not HAS_TRITON:
        raise RuntimeError(f"backend 'triton' needs Triton, which is not installed: {other}")
    if not q.is_cuda and not INTERPRETED:
        raise RuntimeError(f"backend 'triton' needs CUDA tensors, got q on {q.device}: {other}")
    if q.dtype == torch.float64:
        raise RuntimeError(f"backend 'triton' computes in at most float32, got {q.dtype}: {other}")
    if q.shape[3] > LARGEST_DIM:
        raise RuntimeError(f"backend 'triton' needs head_dim of at most {LARGEST_DIM}, got {q.shape[3]}: {other}")


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias,
    causal: bool,
    scale: float | None,
    tolerance: float | None,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    query_start: int | Tensor | None,
    key_norms: Tensor | None,
) -> Problem:
    """Check what can be checked without looking at values, and fill in what was left out."""
    given = k
    q, k, v = _autocast(q, k, v)
    check_tensors(q, k, v)
    if k is not given and isinstance(key_norms, Tensor):
        key_norms = _norms_after_rounding(key_norms, k)
    problem = Problem(
        q=q,
        k=k,
        v=v,
        bias=bias,
        causal=bool(causal),
        scale=1.0 / math.sqrt(q.shape[3]) if scale is None else scale,
        tolerance=default_tolerance(q.dtype) if tolerance is None else tolerance,
        key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens,
        query_start=query_start,
        key_norms=key_norms,
    )
    check_shapes(problem)
    return problem
