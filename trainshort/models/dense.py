"""Attention as it was computed before fused kernels: the table of all scores, its softmax, and that times the values.

To be measured beside the kernels, and for nothing else: its memory grows with the square of the length. What is
added to the scores (the bias, -inf in the future) is one table in float32, made once for all layers that share it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainshort.ops.bias import Bias


def score_table(bias: Bias | None, length: int, *, causal: bool, like: Tensor) -> Tensor:
    """What is added to the scores of every pair: [B or 1, H or 1, T, T], in float32 or what `like` has beyond it."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    place = torch.arange(length, device=like.device)
    query, key = place[None, None, :, None], place[None, None, None]
    table = torch.zeros(1, 1, length, length, dtype=dtype, device=like.device)
    if bias is not None:
        table = bias.between(query, key, dtype)
        if (hidden := bias.hides(query, key)) is not None:
            table = table.masked_fill(hidden, float("-inf"))
    return table.masked_fill(key > query, float("-inf")) if causal else table


def dense_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
    """Of q [B, H, T, D], k and v [B, Hkv, T, D]: products in their dtype, the softmax in at least float32."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    weights = torch.softmax(scale * (q @ k.transpose(-2, -1)) + table, dim=-1)
    return torch.dropout(weights, dropout, train=dropout > 0).to(v.dtype) @ v
