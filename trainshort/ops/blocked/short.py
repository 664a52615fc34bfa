"""Short causal rows on a CPU that visit all of their past: torch's kernel as it is, for as many heads as possible.

There is nothing to skip, so what counts is to do little besides the kernel. It leaves out by itself what lies above
the diagonal, and splits one call among its threads as well as anyone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from trainshort.ops.bias import LinearBias
from trainshort.ops.blocked import pieces as engine
from trainshort.ops.problem import BLOCK, Problem

LONGEST = 2 * BLOCK  # beyond, pieces that follow the diagonal are as fast
SMALL_BIAS = 2**20  # elements of a bias that are made at once, however few the queries are


def fits(problem: Problem, windows: Tensor | None) -> bool:
    """Whether this path takes the problem."""
    q, k = problem.q, problem.k
    queries = q.shape[2]
    return (
        windows is None
        and isinstance(problem.bias, LinearBias)
        and problem.bias.slopes.dim() == 1
        and problem.causal
        and problem.scale > 0  # see fused_forward
        and q.device.type == "cpu"
        and q.dtype in (torch.float32, torch.float64)
        and k.shape == q.shape
        and 0 < queries <= LONGEST
        and problem.key_padding_mask is None
        and problem.cu_seqlens is None
        and problem.query_start is None
        and all(t.stride(-1) == 1 and t.stride(-2) >= t.shape[-1] for t in (q, k, problem.v))
        and engine.has_fused()
        # 0 * inf is not 0: such values of blocks that a query block does not visit are to be kept from it.
        and (queries <= BLOCK or math.isfinite(problem.v.sum().item()))
    )


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, or a SuspiciousError."""
    parts = [
        engine.fused_forward(q, k, v, bias, problem.scale, causal=True)
        for (q, k, v), bias in _calls(problem, problem.q, problem.k, problem.v)
    ]
    if len(parts) == 1:
        return parts[0]
    outs, sums = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(sums, dim=1)


def backward(problem: Problem, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad if grad.stride(-1) == 1 and grad.stride(-2) >= grad.shape[-1] else grad.contiguous()
    parts = [
        engine.fused_backward(grad, q, k, v, out, lse, bias, problem.scale, causal=True)
        for (grad, q, k, v, out, lse), bias in _calls(problem, grad, problem.q, problem.k, problem.v, out, lse)
    ]
    if len(parts) == 1:
        return parts[0].q, parts[0].k, parts[0].v
    return (
        torch.cat([part.q for part in parts], dim=1),
        torch.cat([part.k for part in parts], dim=1),
        torch.cat([part.v for part in parts], dim=1),
    )


def _calls(problem: Problem, *tensors: Tensor) -> Iterator[tuple[Sequence[Tensor], Tensor]]:
    """Heads whose bias together is no larger than all queries: their part of the tensors, and their bias."""
    assert isinstance(problem.bias, LinearBias)
    slopes, length = problem.bias.slopes.tolist(), problem.q.shape[2]
    most = max(problem.q.numel(), SMALL_BIAS) // length**2
    for head in range(0, len(slopes), most):
        bias = _bias_of(tuple(slopes[head : head + most]), length, problem.q.dtype)
        yield (tensors if most >= len(slopes) else [t[:, head : head + most] for t in tensors]), bias


@lru_cache(maxsize=1)  # for all layers of a model, and both passes
def _bias_of(slopes: tuple[float, ...], length: int, dtype: torch.dtype) -> Tensor:
    """The bias of every key for every query, [1, H, T, T]; what lies in the future is never read."""
    position = torch.arange(length, dtype=dtype, device="cpu")
    return (torch.tensor(slopes, dtype=dtype, device="cpu")[:, None, None] * (position - position[:, None]))[None]
