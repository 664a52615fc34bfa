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
    start = problem.query_start
    square = problem.q.shape[2] == problem.k.shape[2]
    return square and (start is None or (not isinstance(start, Tensor) and start == 0))


def attend(problem: Problem) -> Tensor:
    return F.scaled_dot_product_attention(
        problem.q, problem.k, problem.v, is_causal=problem.causal, scale=problem.scale
    )
