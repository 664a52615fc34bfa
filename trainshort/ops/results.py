"""What attention can return besides its output: the log-sum-exp of the scores, and which keys were visited.

Backends give both as they have them: a log-sum-exp that leaves out what all scores of a query have in common where it
stands beyond all keys (`Problem.positions`), and windows of whole blocks. Here they become what is promised.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainshort.ops.bias import LinearBias
from trainshort.ops.decay import DecayBias
from trainshort.ops.problem import Problem, holds
from trainshort.ops.windows import visible_keys


class Windows(NamedTuple):
    """The keys that each query visited: first <= j < end; (0, 0) where it sees none.

    Args:
        first: int32 [B, H, Tq].
        end: One past the last, int32 [B, H, Tq].

    Example:
        >>> result = ts.attention(q, k, v, bias=ts.LinearBias(ts.alibi_slopes(8)), return_windows=True)
        >>> visited = (result.windows.end - result.windows.first).sum()
    """

    first: Tensor
    end: Tensor


class AttentionOutput(NamedTuple):
    """What `attention` returns where more than the output is asked for. What was not is None.

    Args:
        out: The output, [B, H, Tq, D].
        lse: The natural log-sum-exp of the scores, [B, H, Tq].
        windows: The keys that were visited.

    Example:
        >>> out, lse, windows = ts.attention(q, k, v, return_lse=True)
        >>> windows is None
        True
    """

    out: Tensor
    lse: Tensor | None
    windows: Windows | None


def finished_lse(problem: Problem, lse: Tensor) -> Tensor:
    """lse: as a backend gives it, natural, [B, H, Tq]."""
    left_out = _left_out(problem, lse.dtype)
    first, end = visible_keys(problem)
    return (lse if left_out is None else lse + left_out).masked_fill(end <= first, -math.inf)


def finished_windows(problem: Problem, visited: tuple[Tensor, Tensor] | None) -> Windows:
    """visited: first and one-past-last key of each query's window, in sight or not; None: everything."""
    first, end = visible_keys(problem)
    if visited is not None:
        first, end = torch.maximum(first, visited[0]), torch.minimum(end, visited[1])
    blind = end <= first
    return Windows(*(limit.masked_fill(blind, 0).to(torch.int32) for limit in (first, end)))


def _left_out(problem: Problem, dtype: torch.dtype) -> Tensor | None:
    """What the bias of all keys has in common for queries beyond all of them, [B or 1, H, Tq]: None where it is 0."""
    bias, padded = problem.bias, problem.key_padding_mask is not None
    if isinstance(bias, DecayBias):
        if not padded:  # beyond the last key c is not known: queries there take its place
            return None
        return bias.between(problem.true_positions()[:, None], problem.bias_positions()[:, None], dtype)
    if not isinstance(bias, LinearBias) or problem.cu_seqlens is not None:
        return None
    start, queries, keys = problem.start, problem.q.shape[2], problem.k.shape[2]
    if not (padded or isinstance(start, Tensor)) and holds(start >= -1) and holds(start + queries - 1 <= keys):
        return None
    beyond = (problem.true_positions() - problem.positions())[:, None].to(dtype)  # [B or 1, 1, Tq]
    past, future = (slopes[..., None] for slopes in bias.both_slopes(dtype))
    return -past * beyond.clamp_min(0) - future * (-beyond).clamp_min(0)
