"""Decoding on a CPU: one query a row, straight to the keys of its window.

With a single query there is nothing to tile or to merge. What counts is to do little besides reading the keys that
can matter, so this is the blocked backend without its planning: a window in O(1) from the norms that a cache keeps,
and one kernel call for heads with windows of a similar length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainshort.attention import pieces as engine
from trainshort.attention.bias import LinearBias
from trainshort.attention.norms import UNDERFLOW
from trainshort.attention.problem import BLOCK, Problem


def fits(problem: Problem) -> bool:
    """One causal query a row under ALiBi, at the last of its keys, on a CPU, with norms and an unconverted cache."""
    mask, start = problem.key_padding_mask, problem.start
    return (
        problem.q.shape[2] == 1
        and problem.causal
        and problem.key_norms is not None
        and isinstance(problem.bias, LinearBias)
        and problem.q.device.type == "cpu"
        and problem.q.dtype in (torch.float32, torch.float64)
        and problem.cu_seqlens is None
        and not isinstance(start, Tensor)
        and start == problem.k.shape[2] - 1 >= 0
        and (mask is None or bool(mask[:, -1].all()))
        and all(t.stride(-1) == 1 and t.stride(-2) >= t.shape[-1] for t in (problem.k, problem.v))
        and engine.has_fused()
    )


def first_blocks(problem: Problem) -> Tensor | None:
    """The first key block of each lane, int64 [B, H]; None to visit everything.

    The geometric tail with the largest norm so far, against the query's own key:
    W >= (s‖q‖K - s q.k_own + ln(1/tolerance) - ln(1 - e^-m)) / m.
    """
    if problem.tolerance <= 0.0 or problem.key_norms is None:
        return None
    q, norms = problem.q.detach()[:, :, 0], problem.key_norms.detach()
    group, dim = q.shape[1] // problem.k.shape[1], q.shape[2]
    longest = norms if norms.dim() == 2 else norms.amax(-1)  # [B, Hkv]
    tiny = dim**0.5 * UNDERFLOW
    own = problem.k.detach()[:, :, -1]
    if group > 1:
        longest, own = longest.repeat_interleave(group, dim=1), own.repeat_interleave(group, dim=1)
    slopes = problem.slopes(torch.float64)[0].detach()  # [B or 1, H]
    # Twice the rounding of a norm and of an inner product, relative to s‖q‖K.
    slack = 1.0 + 4 * (dim + 4) * 2.0**-23
    reach = (torch.linalg.vector_norm(q, dim=-1).double() + tiny) * (longest.double() + tiny)
    reach = reach * (abs(problem.scale) * slack)
    score = (q * own).sum(-1).double() * problem.scale
    nats = reach - score - math.log(problem.tolerance) - torch.log(-torch.expm1(-slopes)) + 1e-5
    first = torch.floor((problem.k.shape[2] - nats / slopes) / BLOCK)
    return first.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp_min(0.0).long()


def windows_of(problem: Problem) -> Tensor:
    """The windows of this path in the form of certified windows: int32 [B, H, 1, 2]."""
    first = first_blocks(problem)
    if first is None:
        first = torch.zeros(problem.q.shape[:2], dtype=torch.int64)
    if problem.key_padding_mask is not None:
        first = torch.maximum(first, problem.key_runs()[0][:, :1] // BLOCK)
    last = torch.full_like(first, -(-problem.k.shape[2] // BLOCK))
    return torch.stack((first, last), dim=-1)[:, :, None].to(torch.int32)


def forward(problem: Problem, windows: Tensor) -> tuple[Tensor, Tensor] | None:
    """Output [B, H, 1, D] and log-sum-exp [B, H, 1] of the scores of visited keys.

    None where numbers that are not finite came up: hidden keys weigh nothing, but 0 * inf is not 0.
    """
    if problem.key_padding_mask is None:
        rows = [_some_rows(problem, windows, slice(0, None), 0)]
    else:  # row by row, so that padding is not even multiplied by zero
        begins = problem.key_runs()[0][:, 0].tolist()
        rows = [_some_rows(problem, windows, slice(row, row + 1), begin) for row, begin in enumerate(begins)]
    out, lse = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*rows, strict=True))
    if not math.isfinite(out.sum().item() + lse.sum().item()):
        return None
    return out.flatten(1, 2)[:, :, None], lse.flatten(1, 2)[:, :, None]


def _some_rows(problem: Problem, windows: Tensor, rows: slice, begin: int) -> tuple[Tensor, Tensor]:
    """Output [rows, Hkv, G, D] and log-sum-exp of rows of the batch whose keys start at `begin`."""
    k, v = problem.k.detach()[rows], problem.v.detach()[rows]
    keys, kv_heads = k.shape[2], k.shape[1]
    q = problem.q.detach()[rows, :, 0].unflatten(1, (kv_heads, -1))  # the queries of a group as rows: [B, Hkv, G, D]
    slopes = problem.slopes(q.dtype)[0].detach()
    slopes = slopes[rows if slopes.shape[0] > 1 else slice(0, 1)].unflatten(1, (kv_heads, -1))[..., None]
    low = (windows[rows, :, 0, 0].unflatten(1, (kv_heads, -1)) * BLOCK).clamp_min(begin)  # [B, Hkv, G]
    parts, sums = [], []
    for first, end, start in _similar(low.amin((0, 2)).tolist(), keys):
        index = torch.arange(start, keys)
        bias = slopes[:, first:end] * (index - (keys - 1)).to(q.dtype)  # [B or 1, heads, G, W]
        bias = bias.masked_fill(index < low[:, first:end, :, None], -math.inf)
        part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[:, first:end],
            k[:, first:end, start:],
            v[:, first:end, start:],
            0.0,
            False,
            attn_mask=bias,
            scale=problem.scale,
        )
        parts.append(part)
        sums.append(part_lse)
    return torch.cat(parts, dim=1), torch.cat(sums, dim=1)


def _similar(lows: list[int], keys: int) -> list[tuple[int, int, int]]:
    """Neighbouring key heads that may share a call: (first, end, first key), where little is read in vain."""
    groups: list[tuple[int, int, int]] = []
    needed = 0
    for head, low in enumerate(lows):
        if groups:
            first, _, start = groups[-1]
            widest = keys - min(start, low)
            if widest * (head + 1 - first) <= 2 * (needed + keys - low) + 8 * BLOCK:
                groups[-1] = (first, head + 1, min(start, low))
                needed += keys - low
                continue
        groups.append((head, head + 1, low))
        needed = keys - low
    return groups
