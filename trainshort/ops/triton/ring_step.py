"""Launching the kernels of ring.py: one token of one layer over its rings. Importing this needs Triton.

Nothing is read back and no number of the host changes from step to step, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from trainshort.ops.ring_step import RingStep
from trainshort.ops.triton import launch, ring
from trainshort.ops.triton.cache import CACHE
from trainshort.ops.triton.config import block_dim
from trainshort.ops.triton.driver import Kernel
from trainshort.ops.triton.run import on_device
from trainshort.ops.triton.shapes import rows_contiguous


def attend(q: Tensor, k: Tensor, v: Tensor, step: RingStep) -> Tensor:
    """Store k and v [B, Hkv, D], and return the output [B, H, D] of q over all keys that can matter."""
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    batch, heads, dim = q.shape
    kv_heads, slots = k.shape[1], step.rings.keys.shape[1]
    splits = launch.splits_for(batch, kv_heads)
    padded = step.padding is not None
    out = torch.empty((batch, heads, dim), dtype=q.dtype, device=q.device)
    values = {
        "Q": q, "K": k, "V": v, "OUT": out,
        "KEYS": step.rings.keys, "VALUES": step.rings.values, "NORMS": step.rings.norms,
        "CENTER": step.center, "LONGEST": step.longest, "BEFORE": step.before, "X": step.x, "LSE": step.lse,
        "PLACE": step.place, "CAPACITY": step.capacity, "FIRST": step.first, "OFFSET": step.offset,
        "PADDING": step.padding, "SLOPES": step.slopes,
        "PARTIAL": torch.empty((batch, heads, splits, dim), dtype=torch.float32, device=q.device),
        "SUMS": torch.empty((batch, heads, splits), dtype=torch.float32, device=q.device),
        "slots": slots, "scale": step.scale, "budget": -math.log(step.tolerance),
    }  # fmt: skip
    # Slices of one tensor for all layers begin anywhere: kernels are compiled for where in 16 bytes that is.
    aligned = tuple(value.data_ptr() % 16 == 0 for value in values.values() if isinstance(value, Tensor))
    key = ("ring", q.shape, kv_heads, q.stride(), k.stride(), v.stride(), aligned, splits, padded, q.dtype, q.device)
    kernels = CACHE.get(key)
    if kernels is None:
        kernels = CACHE.put(key, launch.Launch(_kernels(q, k, v, splits, padded), {}))
    with on_device(q):
        kernels.run(values)
    return out


def _kernels(q: Tensor, k: Tensor, v: Tensor, splits: int, padded: bool) -> list[Kernel]:
    """Of tensors only the layouts count."""
    batch, heads, dim = q.shape
    kv_heads = k.shape[1]
    wide = q.element_size() == 4
    values: dict[str, Any] = {
        "stride_qb": q.stride(0),
        "stride_qh": q.stride(1),
        "stride_kb": k.stride(0),
        "stride_kh": k.stride(1),
        "stride_vb": v.stride(0),
        "stride_vh": v.stride(1),
        "H": heads,
        "Hkv": kv_heads,
        "group": heads // kv_heads,
        "D": dim,
        "BD": block_dim(dim),
        "BM": max(16, triton.next_power_of_2(heads // kv_heads)),
        "BN": 32 if wide else 64,
        "PADDED": padded,
        "SPLITS": splits,
        "STAGES": 1 if wide else 3,
    }
    warps = {"num_warps": 4}
    return [
        Kernel(ring.append_kernel, (kv_heads, batch, 1), values, {"num_warps": 1}),
        Kernel(ring.split_kernel, (splits, kv_heads, batch), values, warps),
        Kernel(ring.join_kernel, (heads, batch, 1), values, warps),
    ]
