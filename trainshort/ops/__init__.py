"""Attention: tensors in, tensors out. Knows nothing of models.

The functions here check their arguments and describe the call as a `Problem`; dispatch.py chooses what computes it.

    bias.py        what is added to the scores: each bias knows its numbers, its gradient and its checks
    decay.py       the bias of gates and times; biases.py: all there are
    problem.py     the fields of one call, and what their shapes and dtypes must be
    values.py      what the contents of its small tensors must be
    dispatch.py    which backend and path takes a problem, or why not
    operators.py   the backends as registered operators, for autograd and compilers
    dropout.py     which weights are dropped
    results.py     what can be returned besides the output: log-sum-exp, windows
    reference.py   the specification: dense, reads like the formula
    sdpa.py        torch's own kernels, where there is no bias; sdpa_arguments.py: the names of their arguments
    tracing.py     whether torch compiles, transforms or records a call
    windows.py     certified windows, from the bounds of norms.py and near.py
    context/       a sequence over several devices
    rings.py       the last keys of a bounded cache; ring_step.py: one token over them; evicted.py: bounds of others
    blocked/       pure torch, linear memory, any device; splits.py and threads.py: several threads for one call
    triton/        fused kernels for GPUs
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, Literal, overload

import torch
from torch import Tensor

from trainshort.ops import dispatch
from trainshort.ops.bias import Bias, BucketBias, LinearBias, alibi_slopes
from trainshort.ops.context import state
from trainshort.ops.decay import DecayBias
from trainshort.ops.dispatch import HAS_TRITON, INTERPRETED, Explanation, backend_for, check_backend
from trainshort.ops.kerple import KerpleBias
from trainshort.ops.problem import BLOCK, check_tensors, make_problem
from trainshort.ops.results import AttentionOutput, Windows
from trainshort.ops.sdpa_arguments import SdpaArguments, causal_and_dropout, refuse_mask_as_slopes
from trainshort.ops.tracing import is_eager
from trainshort.ops.triton import run as triton_backend
from trainshort.ops.values import check_values

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "AttentionOutput",
    "BucketBias",
    "DecayBias",
    "Explanation",
    "KerpleBias",
    "LinearBias",
    "Windows",
    "alibi_attention",
    "alibi_slopes",
    "attention",
    "backend_for",
    "certified_windows",
    "explain",
]


def alibi_attention(  # noqa: PLR0913  a public signature
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
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    backend: str = "auto",
    is_causal: bool | None = None,
    attn_mask: None = None,
    dropout_p: float | None = None,
    enable_gqa: bool | None = None,
) -> Tensor:
    """Attention with a linear penalty on distance: `softmax(scale q.k - slope |i - j|) v`.

    Args:
        q: Queries [B, H, Tq, D]. Any strides; float16, bfloat16, float32 or float64. They are right-aligned to the
            keys unless `query_start` says otherwise.
        k: Keys [B, Hkv, Tk, D]; Hkv divides H (grouped queries).
        v: Values, like k.
        slopes: [H] or [B, H], positive; None: the paper's. Differentiable if it requires grad. (For heads without a
            penalty there is `attention`: a LinearBias takes slopes of 0.)
        causal: A query sees its past and itself; False: both sides, symmetrically.
        scale: Of the scores; None: 1/sqrt(D).
        tolerance: The largest softmax mass that a query may skip. None: 2^-14 for 16-bit inputs, 2^-24 for float32,
            0 for float64. 0: visit everything. What skipping can cost is bounded: see docs/proof.md.
        key_padding_mask: bool [B, Tk], True where a key is real, one contiguous run a row. Padding never leaks, and
            a query with no key to look at gives zeros.
        cu_seqlens: int [documents + 1]: borders of documents packed into one row (B = 1); attention and distances
            stay inside each.
        query_start: Position of query 0 among the keys, an int or int [B]; with a preallocated cache, the number of
            tokens cached before this call. Keys after the last query are never looked at.
        key_norms: Upper bounds of the keys' norms, kept beside a cache so that a decoding step finds its window
            without a pass over the keys: [B, Hkv], or one for each block of 128 keys, or one for each key.
        dropout: The probability, in [0, 1), that the weight of a query on a key is dropped after the softmax; others
            are divided by 1 - dropout. For training: it does not ask whether gradients are recorded.
        seed: Of the dropout: an int, or an int64 tensor on q's device. Which weights are dropped depends on it and on
            row, head, query and key, and is the same on every backend and device. None: a new one from torch's
            generator of q's device at each call.
        backend: "auto", "reference", "blocked" or "triton". A named backend runs or raises.
        is_causal: `causal` under its name in F.scaled_dot_product_attention, which counts where it is given. (Its
            causal mask begins at the first key, so with Tq != Tk it is refused unless `query_start` is given.)
        dropout_p: `dropout` under its name there.
        enable_gqa: Says nothing new: grouped queries are always on.
        attn_mask: None. For a mask there are `key_padding_mask` and `cu_seqlens`, for a bias `slopes`.

    Returns:
        The output, [B, H, Tq, D].

    Example:
        >>> q, k, v = (torch.randn(1, 8, 4096, 64) for _ in range(3))
        >>> ts.alibi_attention(q, k, v).shape
        torch.Size([1, 8, 4096, 64])
    """
    if state.current is not None:
        bias = state.current.checked(lambda: _linear_bias(q, k, v, slopes))
    else:
        bias = _linear_bias(q, k, v, slopes)
    return attention(
        q,
        k,
        v,
        bias=bias,
        causal=causal,
        scale=scale,
        tolerance=tolerance,
        key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens,
        query_start=query_start,
        key_norms=key_norms,
        dropout=dropout,
        seed=seed,
        backend=backend,
        is_causal=is_causal,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        enable_gqa=enable_gqa,
    )


# What is returned depends on what is asked for: the output, or an AttentionOutput.
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Bias | None = None, causal: bool = True,
    scale: float | None = None, tolerance: float | None = None, key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None, query_start: int | Tensor | None = None, key_norms: Tensor | None = None,
    dropout: float = 0.0, seed: int | Tensor | None = None, return_lse: Literal[False] = False,
    return_windows: Literal[False] = False, backend: str = "auto", is_causal: bool | None = None,
    attn_mask: None = None, dropout_p: float | None = None, enable_gqa: bool | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Bias | None = None, causal: bool = True,
    scale: float | None = None, tolerance: float | None = None, key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None, query_start: int | Tensor | None = None, key_norms: Tensor | None = None,
    dropout: float = 0.0, seed: int | Tensor | None = None, return_lse: Literal[True], return_windows: bool = False,
    backend: str = "auto", is_causal: bool | None = None, attn_mask: None = None, dropout_p: float | None = None,
    enable_gqa: bool | None = None,
) -> AttentionOutput: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Bias | None = None, causal: bool = True,
    scale: float | None = None, tolerance: float | None = None, key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None, query_start: int | Tensor | None = None, key_norms: Tensor | None = None,
    dropout: float = 0.0, seed: int | Tensor | None = None, return_lse: bool = False, return_windows: Literal[True],
    backend: str = "auto", is_causal: bool | None = None, attn_mask: None = None, dropout_p: float | None = None,
    enable_gqa: bool | None = None,
) -> AttentionOutput: ...  # fmt: skip
def attention(  # noqa: PLR0913  a public signature
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Bias | None = None,
    causal: bool = True,
    scale: float | None = None,
    tolerance: float | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    query_start: int | Tensor | None = None,
    key_norms: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    return_windows: bool = False,
    backend: str = "auto",
    is_causal: bool | None = None,
    attn_mask: None = None,
    dropout_p: float | None = None,
    enable_gqa: bool | None = None,
) -> Tensor | AttentionOutput:
    """Attention with a bias that depends on where queries and keys stand.

    Args:
        bias: A LinearBias (ALiBi), a DecayBias (gates, times), a BucketBias (T5), a KerpleBias or None. Keys can be
            skipped under the first two and under a KerpleBias with logarithmic=False: `tolerance` and `key_norms`
            say nothing otherwise.
        return_lse: Also return the natural log-sum-exp of the scores, bias and scale included: float32 (float64 for
            float64 inputs), [B, H, Tq], -inf where a query sees no key. Differentiable, so that attention to several
            sets of keys can be merged. Of skipped keys it misses at most -ln(1 - tolerance). Under a DecayBias it is
            -inf, too, where a border lies between a query in padding and all real keys; the output of such a query,
            for which the nearest real key knows the borders, means nothing.
        return_windows: Also return which keys the forward pass visited, as `Windows`.

    All other arguments as in `alibi_attention`.

    Returns:
        The output, [B, H, Tq, D]. If more is asked for, an AttentionOutput (out, lse, windows), where what was not
        asked for is None.

    Example:
        >>> out = ts.attention(q, k, v, bias=ts.BucketBias(torch.zeros(32, 8)))
        >>> out, lse, _ = ts.attention(q, k, v, bias=ts.LinearBias(ts.alibi_slopes(8)), return_lse=True)
    """
    if not (is_causal is None and attn_mask is None and dropout_p is None and enable_gqa is None):
        sdpa = SdpaArguments(is_causal, attn_mask, dropout_p, enable_gqa)
        causal, dropout = _with_sdpa_arguments(sdpa, q, k, query_start, causal, dropout)
    if state.current is not None:
        options = {
            "causal": causal, "scale": scale, "tolerance": tolerance, "key_padding_mask": key_padding_mask,
            "cu_seqlens": cu_seqlens, "query_start": query_start, "key_norms": key_norms, "dropout": dropout,
            "seed": seed, "return_lse": return_lse, "return_windows": return_windows,
        }  # fmt: skip
        return state.current.attend(q, k, v, bias, backend, options)
    check_backend(backend)
    key = None
    asks_more = return_lse or return_windows
    plain = key_padding_mask is None and cu_seqlens is None and key_norms is None and not (asks_more or dropout)
    if plain and isinstance(bias, LinearBias) and _runs_on_triton(q, backend):
        key = triton_backend.cached_signature(q, k, v, bias, causal, scale, tolerance, query_start)
        cached = None if key is None else triton_backend.cached_call(key)
        if cached is not None:
            return triton_backend.attend_cached(cached, q, k, v, bias.slopes)
    problem = make_problem(
        q,
        k,
        v,
        bias,
        causal=causal,
        scale=scale,
        tolerance=tolerance,
        key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens,
        query_start=query_start,
        key_norms=key_norms,
        dropout=dropout,
        seed=seed,
        wants_windows=bool(return_windows),
    )
    if asks_more:
        return dispatch.attend_fully(problem, backend, bool(return_lse))
    out = dispatch.attend(problem, backend)
    if key is not None and not problem.is_decoding and dispatch.why_not_triton(problem.q) is None:
        triton_backend.remember(key, problem)
    return out


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Bias | None = None,
    backend: str = "auto",
    **attention_kwargs: Any,
) -> Explanation:
    """How `attention` would compute a call: which backend and path, why not the others, what share of keys it visits.

    Nothing is computed but the windows, whose sizes are read back: on a GPU, that waits for it.

    Args:
        q: As in `attention`, like all others.
        k: Keys.
        v: Values.
        bias: A bias, or None.
        backend: The one to ask for.
        **attention_kwargs: The other arguments of `attention`.

    Returns:
        An Explanation with `backend`, `path`, `why_not` (a reason for each other path) and `keys_visited`. It prints
        as a short text.

    Example:
        >>> explanation = ts.explain(q, k, v, bias=ts.LinearBias(ts.alibi_slopes(8)))
        >>> explanation.backend
        'blocked'
    """
    check_backend(backend)
    unknown = sorted(set(attention_kwargs) - set(inspect.signature(attention).parameters))
    if unknown:
        raise TypeError(f"explain got {unknown[0]!r}, which is no argument of attention")
    want_lse = bool(attention_kwargs.pop("return_lse", False))
    wants_windows = bool(attention_kwargs.pop("return_windows", False))
    options = {"causal": True, "dropout": 0.0, "query_start": None} | attention_kwargs
    sdpa = SdpaArguments(*(options.pop(name, None) for name in SdpaArguments._fields))
    start, causal, dropout = options["query_start"], options["causal"], options["dropout"]
    options["causal"], options["dropout"] = causal_and_dropout(sdpa, q, k, start, causal, dropout)
    problem = make_problem(q, k, v, bias, wants_windows=wants_windows, **options)
    check_values(problem)
    return dispatch.explain(problem, backend, fully=want_lse or wants_windows)


def certified_windows(  # noqa: PLR0913  a public signature
    q: Tensor,
    k: Tensor,
    slopes: Tensor | None = None,
    *,
    bias: Bias | None = None,
    causal: bool = True,
    scale: float | None = None,
    tolerance: float | None = None,
    block: int = BLOCK,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    query_start: int | Tensor | None = None,
    key_norms: Tensor | None = None,
) -> Tensor:
    """Which keys can matter.

    For every query, the softmax mass of all keys in sight outside its block's window is at most `tolerance`,
    proved from norms: keys outside are never compared. With the default block of 128 these are exactly the keys that
    the backend visits, except that the `triton` backend cuts its windows at every 64 keys and queries; it finds them
    in its forward pass, which this runs, and visits still fewer keys in its backward pass. Where the slopes alone
    show that less than an eighth of the blocks could be skipped (a half in plain causal rows of at most 1,024), the
    `blocked` backend visits everything.

    Args:
        q: Queries [B, H, Tq, D].
        k: Keys [B, Hkv, Tk, D].
        slopes: [H] or [B, H]; None: the paper's.
        bias: Instead of slopes: a LinearBias, for the variants of encoders, a DecayBias, or a KerpleBias with
            logarithmic=False.
        block: Queries and keys of a block.

    All other arguments as in `alibi_attention`.

    Returns:
        First and one-past-last key block visited, int32 [B, H, ceil(Tq/block), 2]; (0, 0) for a query block that sees
        no key at all.

    Example:
        >>> windows = ts.certified_windows(q, k)
        >>> visited = (windows[..., 1] - windows[..., 0]).sum()  # key blocks
    """
    if not isinstance(q, Tensor) or q.dim() != 4:
        check_tensors(q, k, None)
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"block must be a positive int, got {block!r}")
    if bias is None:
        if slopes is not None:
            _check_slopes(slopes)
        bias = LinearBias(_default_slopes(q) if slopes is None else slopes)
    elif slopes is not None:
        raise ValueError("slopes and bias say the same thing: pass one of them")
    elif not (isinstance(bias, Bias) and bias.certifiable):
        came = "one with logarithmic=True" if isinstance(bias, KerpleBias) else type(bias).__name__
        raise TypeError(f"bias must be a LinearBias, a DecayBias or a KerpleBias with logarithmic=False, got {came}")
    problem = make_problem(
        q,
        k,
        k,
        bias,
        causal=causal,
        scale=scale,
        tolerance=tolerance,
        key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens,
        query_start=query_start,
        key_norms=key_norms,
    )
    check_values(problem)
    return dispatch.certified_blocks(problem, block)


def _with_sdpa_arguments(
    sdpa: SdpaArguments, q: Tensor, k: Tensor, start: int | Tensor | None, causal: bool, dropout: float
) -> tuple[bool, float]:
    """`causal` and `dropout`, where arguments were given by the names that torch has for them."""
    if state.current is None:
        return causal_and_dropout(sdpa, q, k, start, causal, dropout)
    found: tuple[bool, float] = state.current.checked(lambda: causal_and_dropout(sdpa, q, k, start, causal, dropout))
    return found


def _linear_bias(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None) -> LinearBias:
    if slopes is None:
        if not isinstance(q, Tensor) or q.dim() != 4:
            check_tensors(q, k, v)
        return LinearBias(_default_slopes(q))
    if isinstance(slopes, Tensor) and (slopes.dim() > 1 or slopes.dtype == torch.bool):
        refuse_mask_as_slopes(q, k, slopes)
    _check_slopes(slopes)
    return LinearBias(slopes)


def _check_slopes(slopes: Tensor) -> None:
    """Here a slope of 0 is taken for a mistake, where it can be seen without waiting for a GPU."""
    if not isinstance(slopes, Tensor):
        raise TypeError(f"slopes must be a tensor or None, got {type(slopes).__name__}")
    if slopes.device.type == "cpu" and is_eager(slopes) and bool((slopes == 0).any()):
        raise ValueError(
            "slopes must be positive, got 0.0: for heads without a penalty call ts.attention with "
            "bias=ts.LinearBias(slopes)"
        )


def _default_slopes(q: Tensor) -> Tensor:
    return _kept_slopes(q.shape[1], q.device) if is_eager(q) else alibi_slopes(q.shape[1], q.device)


@cache
def _kept_slopes(heads: int, device: torch.device) -> Tensor:
    """Kept for good: a captured CUDA graph goes on reading them."""
    with torch.inference_mode(False):
        return alibi_slopes(heads, device)


def _runs_on_triton(q: Any, backend: str) -> bool:
    """Whether this could be a call to the Triton kernels."""
    if backend not in ("auto", "triton") or not isinstance(q, Tensor):
        return False
    return q.is_cuda or (INTERPRETED and backend == "triton")
