"""Attention without any bias: torch's own fused kernels, wherever they say exactly what is asked for."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from trainshort.attention.problem import Problem


def fits(problem: Problem) -> bool:
    """Whether scaled_dot_product_attention computes this problem, in linear memory."""
    if problem.bias is not None or problem.q.shape[1] != problem.k.shape[1]:
        return False
    if problem.key_padding_mask is not None or problem.cu_seqlens is not None or problem.k.shape[2] == 0:
        return False
    if not problem.causal:
        return True
    start, queries, keys = problem.start, problem.q.shape[2], problem.k.shape[2]
    if isinstance(start, Tensor):
        return False
    return start == keys - queries and queries in (1, keys)  # one query that sees everything, or a square


def _causal(problem: Problem) -> bool:
    return problem.causal and problem.q.shape[2] > 1


def attend(problem: Problem) -> Tensor:
    return F.scaled_dot_product_attention(
        problem.q, problem.k, problem.v, is_causal=_causal(problem), scale=problem.scale
    )
