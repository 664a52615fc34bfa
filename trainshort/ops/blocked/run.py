"""Attention in pure torch with linear memory, forward and backward, on any device.

Each query block visits exactly the key blocks of its certified window, cut into pieces (cut.py) that are computed
one or several at a time (calls.py, piece_kernels.py) and merged by their log-sum-exp (passes.py). The backward pass
cuts the same windows, so it skips exactly what the forward pass skipped. On a CPU a call is split among threads
(splits.py).
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from trainshort.ops import threads
from trainshort.ops import windows as windows_module
from trainshort.ops.blocked import decode, piece_kernels, short
from trainshort.ops.blocked.decay_pieces import DecayPieces
from trainshort.ops.blocked.passes import Pass, bias_of
from trainshort.ops.blocked.piece_bias import PieceBias
from trainshort.ops.decay import DecayBias
from trainshort.ops.dropout import query_seeds
from trainshort.ops.problem import BLOCK, Problem, gradient_like
from trainshort.ops.splits import Split, splits_of
from trainshort.ops.windows import promising_heads

EVERYTHING = -1  # in place of a window: no window was sought


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output like q, log-sum-exp [B, H, Tq], and windows as one row of numbers, EVERYTHING if none were sought.

    One row, because a dimension of query blocks is 1 up to a length of BLOCK, for which alone a compiler would make a
    graph of its own.
    """
    windows = windows_of(problem)
    out, lse = forward_in(problem, windows)
    if windows is None:
        windows = torch.full((_windows_size(out),), EVERYTHING, dtype=torch.int32, device=out.device)
    return out, lse, windows.reshape(-1)


def fake(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """What `forward` returns, uninitialised."""
    q = problem.q
    lse = q.new_empty(q.shape[:3], dtype=problem.accumulate_dtype)
    return torch.empty_like(q), lse, q.new_empty((_windows_size(q),), dtype=torch.int32)


def visited_keys(problem: Problem, windows: Tensor) -> tuple[Tensor, Tensor]:
    """First and one-past-last key of the window of each query, in sight or not: int32 [B, H, Tq].

    windows: as `forward` returned them.
    """
    batch, heads, queries, _ = problem.q.shape
    each = windows.view(batch, heads, (queries + BLOCK - 1) // BLOCK, 2).repeat_interleave(BLOCK, dim=2)[
        :, :, :queries
    ]
    first, end = (each * BLOCK).unbind(-1)
    return first.clamp_min(0), torch.where(end < 0, problem.k.shape[2], end)  # EVERYTHING is negative


def backward(
    problem: Problem,
    grad: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    windows: Tensor,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Gradients of q, k, v and, if wanted, of the learned fields of the bias. windows: as `forward` returned them."""
    visited = None
    if windows.numel() > 0 and not _capturing(windows) and int(windows[0]) != EVERYTHING:
        visited = windows.view(*problem.q.shape[:2], -1, 2)
    if grad_lse is None:
        return backward_in(problem, visited, out, lse, grad, want_bias)
    wide, wide_out, wide_grad = _with_lse_channel(problem, out, grad, grad_lse)
    *gradients, bias = backward_in(wide, visited, wide_out, lse, wide_grad, want_bias)
    dq, dk, dv = (
        gradient_like(tensor).copy_(gradient[..., : tensor.shape[3]])
        for tensor, gradient in zip((problem.q, problem.k, problem.v), gradients, strict=True)
    )
    return dq, dk, dv, bias


def _with_lse_channel(
    problem: Problem, out: Tensor, grad: Tensor, grad_lse: Tensor
) -> tuple[Problem, Tensor, Tensor]:
    """The problem, its output and the output's gradient with channels more, that bring in the log-sum-exp's gradient.

    The scores' gradient is p_ij (do_i.v_j - do_i.o_i + dlse_i). Where q, k and v have a channel of zeros, the output
    one of -dlse and its gradient one of ones, do_i.o_i becomes do_i.o_i - dlse_i, and nothing else changes.
    """
    dim, dtype = problem.q.shape[3], problem.accumulate_dtype
    q, k, v, out, grad = (
        torch.nn.functional.pad(tensor.to(dtype), (0, 4))  # a multiple of 4 is faster
        for tensor in (problem.q, problem.k, problem.v, out, grad)
    )
    out[..., dim] = -grad_lse
    grad[..., dim] = 1.0
    return replace(problem, q=q, k=k, v=v), out, grad


def _windows_size(q: Tensor) -> int:
    return q.shape[0] * q.shape[1] * -(-q.shape[2] // BLOCK) * 2


def certified_blocks(problem: Problem, block: int = BLOCK) -> Tensor:
    """First and one-past-last key block for each query block: int32 [B, H, ceil(Tq / block), 2]."""
    if block == BLOCK and decode.why_not(problem) is None:
        return decode.windows_of(problem)
    return windows_module.certified_blocks(problem, block)


def windows_of(problem: Problem) -> Tensor | None:
    """The certified windows that this backend will use, or None where it visits everything."""
    if promising_heads(problem) is None and decode.why_not(problem) is not None:
        return None
    return None if _capturing(problem.q) else certified_blocks(problem)


def _capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured: then nothing may be read back, and everything is visited."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def forward_in(problem: Problem, windows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output, in the shape, dtype and layout of q, and log-sum-exp [B, H, Tq] of the scores of visited keys."""
    with torch.autocast(problem.q.device.type, enabled=False):  # its dtypes are for the inputs, not for the sums
        return _forward(_with_query_seeds(problem), windows)


def _with_query_seeds(problem: Problem) -> Problem:
    """With what each query makes of the seed, so that splits of the problem drop what the whole would."""
    if problem.seed is None:
        return problem
    return replace(problem, seed=query_seeds(problem.seed, *problem.q.shape[:3]))


def _forward(problem: Problem, windows: Tensor | None) -> tuple[Tensor, Tensor]:
    if windows is not None and decode.why_not(problem) is None and (done := decode.forward(problem, windows)):
        return done
    if short.fits(problem, windows):
        with suppress(piece_kernels.NonFiniteScoresError):
            return _laid_out(problem.q, *short.forward(problem))
    splits = splits_of(problem, windows)
    if len(splits) == 1:
        own_out, own_lse = _forward_split(problem, windows, problem.q.shape[:2], None)
        return _laid_out(problem.q, own_out, own_lse)
    out = torch.empty_like(problem.q)
    lse = out.new_empty(out.shape[:3], dtype=problem.accumulate_dtype)

    def compute(split: Split) -> None:
        own_windows = None if windows is None else split.queries(windows)
        into = (split.queries(out), split.queries(lse))
        _forward_split(split.of(problem), own_windows, problem.q.shape[:2], into)

    threads.run(compute, splits)
    return out, lse


def _laid_out(q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The output in the dtype and layout of q."""
    empty = torch.empty_like(q)
    same = out.dtype == empty.dtype and out.stride() == empty.stride()
    return out if same else empty.copy_(out), lse.contiguous()


def _forward_split(
    problem: Problem, windows: Tensor | None, lanes: torch.Size, into: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    try:
        return Pass(problem, windows, _can_fuse(problem), lanes).forward(into)
    except piece_kernels.NonFiniteScoresError:
        return Pass(problem, windows, False, lanes).forward(into)


def backward_in(
    problem: Problem, windows: Tensor | None, out: Tensor, lse: Tensor, grad: Tensor, want_bias: bool
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Gradients of q, k, v and, if wanted, of the bias."""
    problem = _with_query_seeds(problem)
    if not want_bias and short.fits(problem, windows) and math.isfinite(lse.sum().item() + grad.sum().item()):
        return (*short.backward(problem, out, lse, grad), {})
    splits = splits_of(problem, windows)
    with torch.autocast(problem.q.device.type, enabled=False):
        if len(splits) == 1:
            gradients, bias = _backward_split(problem, windows, out, lse, grad, want_bias, problem.q.shape[:2], None)
            dq, dk, dv = (gradient.to(problem.q.dtype) for gradient in gradients)
            return dq, dk, dv, bias.gradients() if want_bias else {}
        dq, dk, dv = (gradient_like(t) for t in (problem.q, problem.k, problem.v))

        def compute(split: Split) -> PieceBias | DecayPieces:
            own_windows = None if windows is None else split.queries(windows)
            own_out, own_lse, own_grad = (split.queries(tensor) for tensor in (out, lse, grad))
            own = (split.queries(dq), split.key_heads(dk), split.key_heads(dv))
            into = own if dq.dtype == problem.accumulate_dtype else None
            gradients, bias = _backward_split(
                split.of(problem), own_windows, own_out, own_lse, own_grad, want_bias, problem.q.shape[:2], into
            )
            if into is None:
                for target, gradient in zip(own, gradients, strict=True):
                    target.copy_(gradient)
            return bias

        biases = threads.run(compute, splits)
    if not want_bias:
        return dq, dk, dv, {}
    total = bias_of(problem, [], problem.accumulate_dtype)
    for split, bias in zip(splits, biases, strict=True):
        total.take(bias.sums, split.rows, split.heads)
    return dq, dk, dv, total.gradients()


def _backward_split(
    problem: Problem,
    windows: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    want_bias: bool,
    lanes: torch.Size,
    into: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[tuple[Tensor, Tensor, Tensor], PieceBias | DecayPieces]:
    fused = _can_fuse(problem) and (not want_bias or _can_fuse_sums(problem)) and math.isfinite(lse.sum().item())
    run = Pass(problem, windows, fused, lanes)
    return run.backward(out, lse, grad, want_bias, into), run.bias


def _can_fuse_sums(problem: Problem) -> bool:
    """Whether the gradient of the bias needs no more than sums of the scores' gradients, as that of gates."""
    return isinstance(problem.bias, DecayBias) and problem.bias.rates is None and abs(problem.scale) >= 2.0**-60


def _can_fuse(problem: Problem) -> bool:
    return problem.q.device.type == "cpu" and piece_kernels.has_fused() and not problem.dropout
