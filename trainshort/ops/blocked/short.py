"""Short causal rows on a CPU that visit all of their past: one call of torch's kernel.

There is nothing to skip, so what counts is to do little besides the kernel. It leaves out by itself what lies above
the diagonal, and splits one call among its threads as well as anyone.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from trainshort.ops.bias import LinearBias
from trainshort.ops.blocked import piece_kernels
from trainshort.ops.problem import BLOCK, Problem

LONGEST = 2 * BLOCK  # beyond, pieces that follow the diagonal are as fast
SMALL_BIAS = 2**20  # elements of a bias that may be made whole, however few the queries are


def fits(problem: Problem, windows: Tensor | None) -> bool:
    """Whether one kernel call computes the problem, with a bias no larger than the queries."""
    q, k, v = problem.q, problem.k, problem.v
    _, heads, queries, _ = q.shape
    return (
        windows is None
        and isinstance(problem.bias, LinearBias)
        and not problem.bias.differs_by_row
        and problem.causal
        and not problem.dropout
        and piece_kernels.can_hide_future(problem.scale)
        and q.device.type == "cpu"
        and q.dtype in (torch.float32, torch.float64)
        and k.shape == q.shape
        and 0 < queries <= LONGEST
        and heads * queries * queries <= max(q.numel(), SMALL_BIAS)
        and problem.key_padding_mask is None
        and problem.cu_seqlens is None
        and problem.query_start is None
        and all(piece_kernels.has_plain_rows(tensor) for tensor in (q, k, v))
        and piece_kernels.has_fused()
        # 0 * inf is not 0: such values of blocks that a query block does not visit are to be kept from it.
        and (queries <= BLOCK or math.isfinite(v.sum().item()))
    )


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, or a NonFiniteScoresError."""
    return piece_kernels.fused_forward(_inputs(problem))


def backward(problem: Problem, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out, grad = (t if piece_kernels.has_plain_rows(t) else t.contiguous() for t in (out, grad))
    gradients = piece_kernels.fused_backward(_inputs(problem), grad, out, lse)
    return gradients.q, gradients.k, gradients.v


def _inputs(problem: Problem) -> piece_kernels.Inputs:
    return piece_kernels.Inputs(problem.q, problem.k, problem.v, _bias(problem), problem.scale, causal=True)


def _bias(problem: Problem) -> Tensor:
    return _bias_of(tuple(problem.linear.slopes.tolist()), problem.q.shape[2], problem.q.dtype)


@lru_cache(maxsize=1)  # for all layers of a model, and both passes
def _bias_of(slopes: tuple[float, ...], length: int, dtype: torch.dtype) -> Tensor:
    """The bias of every key for every query, [1, H, T, T]; what lies in the future is never read."""
    position = torch.arange(length, dtype=dtype, device="cpu")
    return (torch.tensor(slopes, dtype=dtype, device="cpu")[:, None, None] * (position - position[:, None]))[None]
