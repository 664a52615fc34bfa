"""What a span of a longer sequence tells of its keys, and what its rows need of those before it: one pass over k, one
over q. For causal attention with slopes; what the numbers are, ops/context/bounds.py says.

    keys_kernel     of each block of keys: f(0), f(X) and the largest norm; and the means of tiles of 32 keys
    queries_kernel  of each tile of 32 queries: the largest x, and a lower bound of the log-sum-exp
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainshort.ops import near
from trainshort.ops.triton.config import block_dim
from trainshort.ops.triton.run import on_device
from trainshort.ops.triton.shapes import ROWS, rows_contiguous
from trainshort.ops.triton.windows import lengths

BLOCK = tl.constexpr(ROWS)
NEAR = tl.constexpr(near.NEAR)
SHORT, LONG = (tl.constexpr(run) for run in near.RUNS)
BEFORE = max(near.RUNS) // near.NEAR  # tiles of keys in front of a span that its first rows are compared with
TILES_BEFORE = tl.constexpr(BEFORE)
ROUNDING = tl.constexpr(2.0**-20)  # of a few operations in float32, relative


@triton.jit
def _tiles(values, BD: tl.constexpr):
    """[BLOCK, BD] -> [tiles, NEAR, BD]"""
    return values.reshape(BLOCK // NEAR, NEAR, BD)


@triton.jit
def _log_sum(exponent, inside):
    """ln of the sum of exp(exponent), and not less for want of digits; infinite where one of them is."""
    most = tl.max(tl.where(inside, exponent, -float("inf")), 0)
    total = most + tl.log(tl.sum(tl.where(inside, tl.exp(exponent - most), 0.0), 0))
    total += ROUNDING * tl.abs(total) + 3e-5
    return tl.where((most > -float("inf")) & (most < float("inf")), total, most)


@triton.jit
def keys_kernel(
    K, CENTER, SLOPES, LARGEST, AT_ZERO, AT_MOST, NORMS, MEANS, stride_b, stride_h, stride_t, stride_slope, Hk, group,
    T, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    hk = tl.program_id(1)
    b = tl.program_id(2)
    r = tl.arange(0, BLOCK)
    d = tl.arange(0, BD)
    row = block * BLOCK + r
    inside = row < T
    at = b.to(tl.int64) * stride_b + hk.to(tl.int64) * stride_h + row[:, None].to(tl.int64) * stride_t + d[None, :]
    k = tl.load(K + at, mask=inside[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    center = tl.load(CENTER + (b * Hk + hk) * D + d, mask=d < D, other=0.0)
    n = lengths(k - center[None, :], D)
    n = tl.where(n < 1e30, n, float("inf"))  # NaN compares false
    at_block = (b * Hk + hk) * blocks + block
    tl.store(NORMS + at_block, tl.max(tl.where(inside, n, 0.0), 0))
    tiles = tl.arange(0, BLOCK // NEAR)
    means = tl.sum(_tiles(k, BD), 1) / NEAR
    at = (at_block * (BLOCK // NEAR) + tiles)[:, None].to(tl.int64) * D + d[None, :]
    tl.store(MEANS + at, means, mask=(d < D)[None, :] & (tiles >= 0)[:, None])
    away = (tl.minimum(block * BLOCK + BLOCK, T) - 1 - row).to(tl.float32)
    for member in range(group):
        h = hk * group + member
        slope = tl.load(SLOPES + b * stride_slope + h)
        x = tl.load(LARGEST + b * Hk * group + h)
        at_head = (b * Hk * group + h) * blocks + block
        tl.store(AT_ZERO + at_head, _log_sum(-slope * away, inside))
        tl.store(AT_MOST + at_head, _log_sum(x * n * (1.0 + ROUNDING) - slope * away, inside))


@triton.jit
def queries_kernel(
    Q, MEANS, CENTER, SLOPES, X, LEAST, scale, stride_b, stride_h, stride_t, stride_slope, H, group, T, before, tiles,
    D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """MEANS: of the tiles in front of the span, of which the last `before` count, and of its own."""
    block = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    r = tl.arange(0, BLOCK)
    d = tl.arange(0, BD)
    row = block * BLOCK + r
    at = b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + row[:, None].to(tl.int64) * stride_t + d[None, :]
    q = tl.load(Q + at, mask=(row < T)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    x = lengths(q, D) * tl.abs(scale)
    hk = h // group
    in_head = (b * (H // group) + hk).to(tl.int64) * (tiles + TILES_BEFORE)
    tile = block * (BLOCK // NEAR) + tl.arange(0, BLOCK // NEAR)
    total = tl.zeros([BLOCK // NEAR, BD], tl.float32)
    nearest = tl.zeros([BLOCK // NEAR, BD], tl.float32)
    for step in tl.static_range(TILES_BEFORE):  # TILES_BEFORE places further on lies the tile itself
        index = (in_head + tl.minimum(tile, tiles) + step)[:, None]
        nearest = tl.load(MEANS + index * D + d[None, :], mask=(d < D)[None, :] & (tile >= 0)[:, None], other=0.0)
        total += nearest
    center = tl.load(CENTER + (b * (H // group) + hk) * D + d, mask=d < D, other=0.0)
    fade = tl.load(SLOPES + b * stride_slope + h) * (1.0 + ROUNDING)
    wide = _tiles(q, BD)
    # A row's term of the bias cancels against that of its height, which is counted from the tile's first row.
    score = tl.sum(wide * (nearest - center[None, :])[:, None, :], 2) * scale
    score += tl.where(tile + before >= 1, tl.log(SHORT * 1.0) - fade * ((SHORT + 1) * 0.5), -float("inf"))[:, None]
    other = tl.sum(wide * (total / TILES_BEFORE - center[None, :])[:, None, :], 2) * scale
    reaches = tile + before >= TILES_BEFORE
    other += tl.where(reaches, tl.log(LONG * 1.0) - fade * ((LONG + 1) * 0.5), -float("inf"))[:, None]
    known = (score == score) & (other == other) & (x < 1e30).reshape(BLOCK // NEAR, NEAR)
    least = tl.where(known, tl.maximum(score, other), -float("inf"))
    inside = (row < T).reshape(BLOCK // NEAR, NEAR)
    x = tl.where(x < 1e30, x, float("inf")).reshape(BLOCK // NEAR, NEAR)
    at = (b * H + h) * tl.num_programs(0) * (BLOCK // NEAR) + tile
    tl.store(X + at, tl.max(tl.where(inside, x, 0.0), 1))
    tl.store(LEAST + at, tl.min(tl.where(inside, least, float("inf")), 1))


class Keys(NamedTuple):
    """Of blocks of keys."""

    at_zero: Tensor  # f(0), float32 [B, H, blocks]; -inf beyond the last key
    at_most: Tensor  # f(X)
    longest: Tensor  # the largest norm, float32 [B, Hkv, blocks]
    means: Tensor  # of tiles of NEAR keys, float32 [B, Hkv, tiles, D]; only those of whole tiles mean anything


def keys(k: Tensor, center: Tensor, slopes: Tensor, largest: Tensor, blocks: int) -> Keys:
    """center: [B, Hkv, D]; slopes: [H] or [B, H]; largest: X, [B, H]; blocks: room for those of the longest span."""
    k = rows_contiguous(k.detach())
    batch, kv_heads, length, dim = k.shape
    heads = largest.shape[1]
    zero, most = (torch.empty((batch, heads, blocks), dtype=torch.float32, device=k.device) for _ in range(2))
    longest = zero.new_empty((batch, kv_heads, blocks))
    means = zero.new_empty((batch, kv_heads, blocks * (ROWS // near.NEAR), dim))
    slopes = slopes.detach().float().contiguous()
    with on_device(k):
        keys_kernel[(blocks, kv_heads, batch)](
            k, center.float().contiguous(), slopes, largest.float().contiguous(), zero, most, longest, means,
            k.stride(0), k.stride(1), k.stride(2), heads if slopes.dim() == 2 else 0, kv_heads, heads // kv_heads,
            length, D=dim, BD=block_dim(dim), num_warps=4,
        )  # fmt: skip
    return Keys(zero, most, longest, means)


def queries(
    q: Tensor, means: Tensor, before: int, center: Tensor, slopes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Of each tile of NEAR queries: the largest x, and the least lower bound of a log-sum-exp, as if each row stood
    where the first of its tile does; float32 [B, H, tiles].

    means: of BEFORE tiles in front of the span, of which the last `before` count, then of its own.
    """
    q = rows_contiguous(q.detach())
    batch, heads, length, dim = q.shape
    blocks = -(-length // ROWS)
    x, least = (
        torch.empty((batch, heads, blocks * (ROWS // near.NEAR)), dtype=torch.float32, device=q.device)
        for _ in range(2)
    )
    slopes = slopes.detach().float().contiguous()
    with on_device(q):
        queries_kernel[(blocks, heads, batch)](
            q, means.contiguous(), center.float().contiguous(), slopes, x, least, scale, q.stride(0), q.stride(1),
            q.stride(2), heads if slopes.dim() == 2 else 0, heads, heads // means.shape[1], length, before,
            means.shape[2] - BEFORE, D=dim, BD=block_dim(dim), num_warps=4,
        )  # fmt: skip
    tiles = -(-length // near.NEAR)
    return x[..., :tiles], least[..., :tiles]
