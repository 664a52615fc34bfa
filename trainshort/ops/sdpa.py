"""Attention without any bias: torch's own fused kernels, wherever they say exactly what is asked for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainshort.ops.problem import Problem

# On a GPU, the first of these that can: torch's own order has the second first, which is slower on Hopper.
FASTEST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def holds(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds; where a program for all lengths is exported, for every one of them."""
    if not torch.compiler.is_exporting():
        return True if condition else False  # noqa: SIM210  bool() of a symbol stays one in a compiler
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def fits(problem: Problem) -> bool:
    """Whether scaled_dot_product_attention computes this problem, in linear memory."""
    if problem.bias is not None or (problem.q.shape[1] != problem.k.shape[1] and not problem.q.is_cuda):
        return False
    if problem.key_padding_mask is not None or problem.cu_seqlens is not None or problem.k.shape[2] == 0:
        return False
    if not problem.causal:
        return True
    start, queries, keys = problem.start, problem.q.shape[2], problem.k.shape[2]
    if isinstance(start, Tensor):
        return False
    aligned = problem.query_start is None or holds(start == keys - queries)
    return aligned and (holds(queries == 1) or holds(queries == keys))  # one query that sees everything, or a square


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
