"""Attention: tensors in, tensors out. Knows nothing of models.

`alibi_attention` and `attention` check their arguments, choose a backend and call it. Backends:

    reference   the specification: dense, reads like the formula
    blocked     pure torch, linear memory, certified windows, any device
"""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from trainshort.attention import blocked, decode, op, plain, reference
from trainshort.attention.bias import Bias, BucketBias, LinearBias, alibi_slopes
from trainshort.attention.problem import (
    BLOCK,
    Problem,
    check_shapes,
    check_tensors,
    check_values,
    default_tolerance,
)
from trainshort.attention.windows import certified_blocks

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
    q, k, v = _autocast(q, k, v)
    check_tensors(q, k, v)
    if slopes is None:
        slopes = alibi_slopes(q.shape[1], q.device)
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
    problem = _problem(q, k, v, bias, causal, scale, tolerance, key_padding_mask, cu_seqlens, query_start, key_norms)
    chosen = backend_for(problem.q) if backend == "auto" else backend
    if chosen == "triton":
        raise RuntimeError(_no_triton(problem.q))
    if chosen == "reference":
        check_values(problem)
        return reference.attend(problem)
    if backend == "auto" and plain.fits(problem):
        return plain.attend(problem)
    if _eager(problem) and decode.fits(problem):  # skip the operator's bookkeeping where a step takes microseconds
        check_values(problem)
        return blocked.forward(problem, blocked.windows_of(problem))[0]
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
    proved from the norms of q and k: exact keys are never compared. A query block that sees no key at all has an
    empty window (0, 0). With the default block of 128 these are exactly the keys that the `blocked` backend
    visits. Where the slopes alone show that less than an eighth of the blocks could be skipped, everything is
    visited. Arguments as in `alibi_attention`; `bias` instead of `slopes` for the variants of encoders.
    """
    check_tensors(q, k, None)
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"block must be a positive int, got {block!r}")
    if bias is None:
        bias = LinearBias(alibi_slopes(q.shape[1], q.device) if slopes is None else slopes)
    elif slopes is not None:
        raise ValueError("slopes and bias say the same thing: pass one of them")
    elif not isinstance(bias, LinearBias):
        raise TypeError(f"bias must be a LinearBias, got {type(bias).__name__}")
    problem = _problem(q, k, k, bias, causal, scale, tolerance, key_padding_mask, cu_seqlens, query_start, key_norms)
    check_values(problem)
    with torch.no_grad():
        return certified_blocks(problem, block)


def backend_for(q: Tensor) -> str:
    """The name of the backend that "auto" chooses for such a tensor."""
    if not isinstance(q, Tensor):
        raise TypeError(f"q must be a tensor, got {type(q).__name__}")
    return "blocked"


def _eager(problem: Problem) -> bool:
    """Whether plain tensors are computed right now, with nobody recording, tracing or transforming."""
    tensors = [problem.q, problem.k, problem.v]
    if isinstance(problem.bias, LinearBias):
        tensors.append(problem.bias.slopes)
    if torch.compiler.is_compiling() or not all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors):
        return False
    recording = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return not recording and torch._C._functorch.peek_interpreter_stack() is None


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast queries, keys and values take its dtype; everything else stays as it is."""
    if not all(isinstance(t, Tensor) and t.is_floating_point() for t in (q, k, v)) or q.dtype == torch.float64:
        return q, k, v
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _no_triton(q: Tensor) -> str:
    if q.device.type != "cuda":
        return (
            f"backend 'triton' needs CUDA tensors, got q on {q.device}: use backend='auto' or 'blocked', "
            "which run on any device"
        )
    return "this version of trainshort has no Triton kernels: use backend='auto' or 'blocked'"


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
    q, k, v = _autocast(q, k, v)
    check_tensors(q, k, v)
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


class _Package(ModuleType):
    """`trainshort.attention` is the function (see trainshort/__init__.py), so let it know this package's names."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        vars(attention)[name] = value


sys.modules[__name__].__class__ = _Package
vars(attention).update({name: value for name, value in globals().items() if not name.startswith("_")})
