"""Lengths of queries and keys: what certified windows are proved from.

Bounds are from above, with slack for the rounding of the sums: a length that is not known counts as infinite.
Nothing here is a matrix product: those may round to TF32 or bfloat16 where torch's settings allow it, and the slack
is that of float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from trainshort.ops.problem import BLOCK, Problem

UNDERFLOW = 2.0**-63  # the square of a smaller number is lost in float32
AT_ONCE = 2**20  # elements of a temporary tensor, so that it stays in a core's cache
AT_ONCE_ON_GPU = 2**24  # there a few large kernels take less time than many small ones


def row_norms(rows: Tensor) -> Tensor:
    """Lengths of the rows, in at least float32; never less than they are for want of exponents."""
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(rows, dim=-1, dtype=dtype) + rows.shape[-1] ** 0.5 * UNDERFLOW


def portions(tensor: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of a tensor [B, H, ...]: whole rows of at most AT_ONCE elements together, or one head at a time."""
    rows, heads = tensor.shape[:2]
    at_once = (AT_ONCE if tensor.device.type == "cpu" else AT_ONCE_ON_GPU) // max(tensor[:1].numel(), 1)
    for row in range(0, rows, max(at_once, 1)):
        for head in range(0, heads, heads if at_once else 1):
            yield slice(row, row + max(at_once, 1)), slice(head, head + (heads if at_once else 1))


def center_of(problem: Problem) -> Tensor | None:
    """A vector to take from every key, [B, Hkv, D]: the mean of a sample where that makes them shorter.

    Any vector is sound. Keys of trained models share a large common part, which says nothing of where
    attention goes and would only widen the windows.
    """
    k = problem.k
    if problem.key_norms is not None:
        return None  # the norms given are those of the keys as they are
    step = max(1, k.shape[2] // 64)
    sample = k[:, :, ::step].to(torch.float32 if k.dtype != torch.float64 else k.dtype)  # [B, Hkv, S, D]
    real = real_keys(problem)
    if real is not None:
        sample = sample.masked_fill(~real[:, None, ::step, None], 0.0)
    mean = sample.mean(2)
    shorter = row_norms(sample - mean[:, :, None]).sum(-1) < 0.9 * row_norms(sample).sum(-1)
    if k.device.type == "cpu" and not bool(shorter.any()):
        return None
    return torch.where(shorter[..., None] & torch.isfinite(mean), mean, 0.0)


def real_keys(problem: Problem) -> Tensor | None:
    """Keys that some query may see: bool [B or 1, Tk], or None where that is all of them."""
    mask = problem.key_padding_mask
    keys, queries = problem.k.shape[2], problem.q.shape[2]
    start = problem.start
    if not problem.causal or (isinstance(start, int) and start + queries >= keys):
        return mask
    index = torch.arange(keys, device=problem.k.device)
    written = index <= problem.positions()[:, -1:]
    return written if mask is None else mask & written


def block_norms_of(problem: Problem, block: int, slack: float) -> Tensor | None:
    """Upper bounds of ‖k‖ for blocks of keys, [B, Hkv, key blocks], where the caller gave just that.

    Keys that nobody sees may stand in the last block or under padding: they only widen windows.
    """
    given = problem.key_norms
    if given is None or block != BLOCK or not (given.dim() == 2 or given.shape[2] < problem.k.shape[2]):
        return None
    norms = (given.detach().float() + problem.k.shape[3] ** 0.5 * UNDERFLOW) * slack
    norms = torch.where(torch.isnan(norms), math.inf, norms)
    return norms if norms.dim() == 3 else norms[..., None].expand(-1, -1, -(-problem.k.shape[2] // block))


def key_norms_of(problem: Problem, center: Tensor | None, slack: float) -> Tensor:
    """Upper bounds of ‖k_j - c‖: [B, Hkv, Tk], -inf for keys that nobody sees."""
    k, given = problem.k, problem.key_norms
    keys = k.shape[2]
    if given is not None:
        norms = given.detach().to(torch.float64 if k.dtype == torch.float64 else torch.float32)
        if norms.dim() == 2:
            norms = norms[..., None].expand(-1, -1, keys)
        elif norms.shape[2] != keys:
            norms = norms.repeat_interleave(BLOCK, dim=2)[:, :, :keys]
        norms = (norms + k.shape[3] ** 0.5 * UNDERFLOW) * slack
    elif center is None:
        norms = row_norms(k) * slack
    else:
        # The difference itself, not ‖k‖² - 2 k.c + ‖c‖²: that would cancel where keys have a large common part.
        norms = torch.empty(k.shape[:3], dtype=center.dtype, device=k.device)
        for part in portions(k):
            norms[part] = row_norms(k[part] - center[part][:, :, None])
        norms = norms * slack
    norms = torch.where(torch.isnan(norms), math.inf, norms)
    real = real_keys(problem)
    return norms if real is None else norms.masked_fill(~real[:, None], -math.inf)
