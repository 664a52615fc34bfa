"""Attention without any bias: torch's own fused kernels, wherever they say exactly what is asked for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainshort.ops.problem import Problem, holds

# On a GPU, the first of these that can: torch's own order has the second first, which is slower on Hopper.
FASTEST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def why_not(problem: Problem) -> str | None:
    """Why scaled_dot_product_attention does not compute a problem in linear memory, in words; None where it does."""
    if problem.bias is not None:
        return "it takes no bias"
    if problem.dropout:
        return "its dropout is another one on each device"
    if problem.q.shape[1] != problem.k.shape[1] and not problem.q.is_cuda:
        return "on a CPU it takes no grouped queries"
    if problem.key_padding_mask is not None or problem.cu_seqlens is not None:
        return "it takes neither key_padding_mask nor cu_seqlens"
    if problem.k.shape[2] == 0:
        return "there are no keys"
    if not problem.causal:
        return None
    start, queries, keys = problem.start, problem.q.shape[2], problem.k.shape[2]
    if isinstance(start, Tensor) or not (problem.query_start is None or holds(start == keys - queries)):
        return "it takes causal queries at the end of the keys only"
    if holds(queries == 1) or holds(queries == keys):
        return None
    return "it takes one causal query, or as many as there are keys"


def _causal(problem: Problem) -> bool:
    return problem.causal and not holds(problem.q.shape[2] == 1)


def attend(problem: Problem) -> Tensor:
    q, k, v = problem.q, problem.k, problem.v
    grouped = not holds(q.shape[1] == k.shape[1])
    if q.is_cuda and q.element_size() == 2 and not torch.compiler.is_compiling():
        with sdpa_kernel(FASTEST, set_priority=True):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=_causal(problem), scale=problem.scale, enable_gqa=grouped
            )
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=_causal(problem), scale=problem.scale, enable_gqa=grouped
    )
