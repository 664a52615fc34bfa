"""What a span of a longer sequence tells of its keys, and what its rows need of those before it: one pass over k, one
over q. For causal attention with slopes; what the numbers are, ops/context/bounds.py says.

    keys_kernel     of each block of keys: f(0), f(X), H and the largest norm; and the means of tiles of 32 keys
    queries_kernel  of each tile of 32 queries: the largest x, and a lower bound of the log-sum-exp
    needed_kernel   from both: how many blocks of earlier ranks may be left out, and which rows need any of them
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
HUGE = tl.constexpr(1e300)


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
    K, CENTER, SLOPES, LARGEST, AT_ZERO, AT_MOST, HEIGHT, NORMS, MEANS, stride_b, stride_h, stride_t, stride_slope,
    Hk, group, T, D: tl.constexpr, BD: tl.constexpr,
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
    last = tl.minimum(block * BLOCK + BLOCK, T) - 1
    away = (last - row).to(tl.float32)
    for member in range(group):
        h = hk * group + member
        height = tl.load(SLOPES + b * stride_slope + h).to(tl.float64) * last
        slope = tl.load(SLOPES + b * stride_slope + h).to(tl.float32)
        x = tl.load(LARGEST + b * Hk * group + h).to(tl.float32)
        at_head = (b * Hk * group + h) * blocks + block
        tl.store(HEIGHT + at_head, height)
        tl.store(AT_ZERO + at_head, _log_sum(-slope * away, inside))
        tl.store(AT_MOST + at_head, _log_sum(x * n * (1.0 + ROUNDING) - slope * away, inside))


@triton.jit(do_not_specialize=["before"])
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
    fade = tl.load(SLOPES + b * stride_slope + h).to(tl.float32) * (1.0 + ROUNDING)
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


@triton.jit
def _log_add(a, b):
    most = tl.maximum(a, b)
    return most + tl.log(1.0 + tl.exp(tl.minimum(a, b) - most))


@triton.jit
def _running_sums(x, X, longest, low, high, height, before, spare, inside):
    """The number of blocks up to which all weigh little for queries of length x, and ln of what all weigh. before: of
    the blocks before these."""
    share = tl.minimum(x / X, 1.0)
    sums = low + share * (high - low) + tl.maximum(x - X, 0.0) * longest + height
    sums = tl.where((sums > -HUGE) & (sums < HUGE), sums, HUGE)  # NaN compares false
    sums = tl.where(inside & (low > -HUGE), sums, -HUGE)
    sums = _log_add(tl.associative_scan(sums, 0, _log_add), before)
    return tl.sum((inside & (sums <= spare)).to(tl.int32), 0), tl.max(sums, 0)


@triton.jit(do_not_specialize=["ranks", "earlier"])
def needed_kernel(
    X, LEAST, ZERO, MOST, HEIGHT, BASE, LARGEST, LONGEST, CENTER, SLOPES, SKIP, NEEDING, budget, length,
    stride_slope, stride_rank, stride_base, ranks, earlier, B, H, group, tiles, blocks,
    D: tl.constexpr, BD: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    b = tl.program_id(1)
    hk = h // group
    index = tl.arange(0, TOGETHER)
    d = tl.arange(0, BD)
    nothing = tl.load(LARGEST + b * H + h).to(tl.float64) * 0.0
    longest = nothing
    for rank in range(ranks):
        longest = tl.maximum(longest, tl.load(LONGEST + (rank * B + b) * (H // group) + hk).to(tl.float64))
    center = tl.load(CENTER + (b * (H // group) + hk) * D + d, mask=d < D, other=0.0).to(tl.float64)
    slack = (D + 36) * 2.0**-23 * (longest + 2.0 * tl.sqrt(tl.sum(center * center, 0)) * (1.0 + ROUNDING))
    slope = tl.load(SLOPES + b * stride_slope + h).to(tl.float64)
    largest = tl.load(LARGEST + b * H + h).to(tl.float64)
    # Rounding of heights, which are at most slope * length, and of a running sum over all blocks.
    spare = budget - 1e-5 - (earlier * blocks + 64) * 2.0**-51 * slope * length
    at = (b * H + h) * tiles
    top = nothing
    for first in range(0, tiles, TOGETHER):
        x = tl.load(X + at + first + index, mask=first + index < tiles, other=0.0).to(tl.float64)
        top = tl.maximum(top, tl.max(tl.where(x < 1e30, x, 0.0), 0))
    # Queries are looked at in three groups, by their length.
    edge0, edge1 = 0.75 * top, 0.9 * top
    least0, least1, least2, stuck = nothing + HUGE, nothing + HUGE, nothing + HUGE, h * 0
    for first in range(0, tiles, TOGETHER):
        inside = first + index < tiles
        x = tl.load(X + at + first + index, mask=inside, other=0.0).to(tl.float64)
        near = tl.load(LEAST + at + first + index, mask=inside, other=0.0).to(tl.float64)
        known = (x < 1e30) & (near > -1e30) & (near < 1e30)
        stuck = tl.maximum(stuck, tl.max((inside & ~known).to(tl.int32), 0))
        reach = tl.where(inside & known, near - slack * x + slope * ((first + index) * NEAR), HUGE)
        least0 = tl.minimum(least0, tl.min(tl.where(x <= edge0, reach, HUGE), 0))
        least1 = tl.minimum(least1, tl.min(tl.where((x > edge0) & (x <= edge1), reach, HUGE), 0))
        least2 = tl.minimum(least2, tl.min(tl.where(x > edge1, reach, HUGE), 0))
    skip0, skip1, skip2 = h * 0, h * 0, h * 0
    sum0, sum1, sum2 = nothing - HUGE, nothing - HUGE, nothing - HUGE
    for rank in range(earlier):
        base = tl.load(BASE + rank * stride_rank + b * stride_base + h)
        for first in range(0, blocks, TOGETHER):
            inside = first + index < blocks
            place = ((rank * B + b) * H + h) * blocks + first + index
            low = tl.load(ZERO + place, mask=inside, other=0.0).to(tl.float64)
            high = tl.load(MOST + place, mask=inside, other=0.0).to(tl.float64)
            height = tl.load(HEIGHT + place, mask=inside, other=0.0) + base
            count, sum0 = _running_sums(edge0, largest, longest, low, high, height, sum0, spare + least0, inside)
            skip0 += count
            count, sum1 = _running_sums(edge1, largest, longest, low, high, height, sum1, spare + least1, inside)
            skip1 += count
            count, sum2 = _running_sums(top, largest, longest, low, high, height, sum2, spare + least2, inside)
            skip2 += count
    skip = tl.where(stuck > 0, 0, tl.minimum(tl.minimum(skip0, skip1), skip2))
    tl.store(SKIP + b * H + h, skip.to(tl.int64))
    rows = h * 0
    for first in range(0, tiles, TOGETHER):
        inside = first + index < tiles
        x = tl.load(X + at + first + index, mask=inside, other=0.0).to(tl.float64)
        near = tl.load(LEAST + at + first + index, mask=inside, other=0.0).to(tl.float64)
        known = (x < 1e30) & (near > -1e30) & (near < 1e30)
        reach = spare + near - slack * x + slope * ((first + index) * NEAR)
        total = tl.where(x <= edge0, sum0, tl.where(x <= edge1, sum1, sum2))
        needs = inside & ~(known & (reach >= total))
        rows = tl.maximum(rows, tl.max(tl.where(needs, (first + index + 1) * NEAR, 0), 0))
    tl.store(NEEDING + b * H + h, rows.to(tl.int64))


class Keys(NamedTuple):
    """Of blocks of keys."""

    at_zero: Tensor  # f(0), float32 [B, H, blocks]; -inf beyond the last key
    at_most: Tensor  # f(X)
    height: Tensor  # H, float64 [B, H, blocks]
    longest: Tensor  # the largest norm, float32 [B, Hkv, blocks]
    means: Tensor  # of tiles of NEAR keys, float32 [B, Hkv, tiles, D]; only those of whole tiles mean anything


def keys(k: Tensor, center: Tensor, slopes: Tensor, largest: Tensor, blocks: int) -> Keys:
    """center: [B, Hkv, D]; slopes: [H] or [B, H]; largest: X, [B, H]; blocks: room for those of the longest span."""
    k = rows_contiguous(k.detach())
    batch, kv_heads, length, dim = k.shape
    heads = largest.shape[1]
    zero, most = (torch.empty((batch, heads, blocks), dtype=torch.float32, device=k.device) for _ in range(2))
    height = torch.empty_like(zero, dtype=torch.float64)
    longest = zero.new_empty((batch, kv_heads, blocks))
    means = zero.new_empty((batch, kv_heads, blocks * (ROWS // near.NEAR), dim))
    slopes = slopes.detach().contiguous()
    with on_device(k):
        keys_kernel[(blocks, kv_heads, batch)](
            K=k, CENTER=center.contiguous(), SLOPES=slopes, LARGEST=largest.contiguous(), AT_ZERO=zero, AT_MOST=most,
            HEIGHT=height, NORMS=longest, MEANS=means, stride_slope=heads if slopes.dim() == 2 else 0, Hk=kv_heads,
            group=heads // kv_heads, T=length, **_rows(k),
        )  # fmt: skip
    return Keys(zero, most, height, longest, means)


def queries(
    q: Tensor, means: Tensor, before: int, center: Tensor, slopes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Of each tile of NEAR queries: the largest x, and the least lower bound of a log-sum-exp, as if each row stood
    where the first of its tile does; float32 [B, H, tiles].

    means: of BEFORE tiles in front of the span, of which the last `before` count, then of its own.
    """
    q = rows_contiguous(q.detach())
    batch, heads, length, _ = q.shape
    blocks = -(-length // ROWS)
    x, least = (
        torch.empty((batch, heads, blocks * (ROWS // near.NEAR)), dtype=torch.float32, device=q.device)
        for _ in range(2)
    )
    slopes = slopes.detach().contiguous()
    with on_device(q):
        queries_kernel[(blocks, heads, batch)](
            Q=q, MEANS=means.contiguous(), CENTER=center.contiguous(), SLOPES=slopes, X=x, LEAST=least,
            scale=float(scale), stride_slope=heads if slopes.dim() == 2 else 0, H=heads,
            group=heads // means.shape[1], T=length, before=before, tiles=means.shape[2] - BEFORE, **_rows(q),
        )  # fmt: skip
    tiles = -(-length // near.NEAR)
    return x[..., :tiles], least[..., :tiles]


class Others(NamedTuple):
    """What ranks have told, [ranks, ...] each, and how this rank stands to them: Bounds and Levels say more."""

    at_zero: Tensor  # [ranks, 1, B, H, blocks]
    at_most: Tensor
    height: Tensor
    longest: Tensor  # [ranks, B, Hkv]
    bases: Tensor  # float64 [ranks, B or 1, H], counted from this rank's
    earlier: int  # ranks in front of this one
    length: int  # of the whole sequence
    budget: float  # ln of what may be left out


def needed(
    x: Tensor, least: Tensor, others: Others, center: Tensor, largest: Tensor, slopes: Tensor
) -> tuple[Tensor, Tensor]:
    """How many of the furthest blocks of earlier ranks no row needs, and how many rows it takes to hold all that need
    some: int64 [B, H] each. x, least: what `queries` returned; largest: X."""
    ranks, _, batch, heads, blocks = others.at_zero.shape
    slopes, bases = slopes.detach().contiguous(), others.bases.contiguous()
    skip, needing = (torch.empty((batch, heads), dtype=torch.int64, device=x.device) for _ in range(2))
    tiles, dim = x.shape[2], center.shape[2]
    with on_device(x):
        needed_kernel[(heads, batch)](
            X=x.contiguous(), LEAST=least.contiguous(), ZERO=others.at_zero, MOST=others.at_most,
            HEIGHT=others.height, BASE=bases, LARGEST=largest.contiguous(), LONGEST=others.longest,
            CENTER=center.contiguous(), SLOPES=slopes, SKIP=skip, NEEDING=needing, budget=others.budget,
            length=float(others.length), stride_slope=heads if slopes.dim() == 2 else 0, stride_rank=bases.stride(0),
            stride_base=heads if bases.shape[1] > 1 else 0, ranks=ranks, earlier=others.earlier, B=batch, H=heads,
            group=heads // center.shape[1], tiles=tiles, blocks=blocks, D=dim, BD=block_dim(dim),
            TOGETHER=min(1024, triton.next_power_of_2(max(tiles, blocks))), num_warps=4,
        )  # fmt: skip
    return skip, needing


def _rows(tensor: Tensor) -> dict[str, int]:
    """How rows [B, H, T, D] are read."""
    dim = tensor.shape[3]
    strides = dict(zip(("stride_b", "stride_h", "stride_t"), tensor.stride()[:3], strict=True))
    return {**strides, "D": dim, "BD": block_dim(dim), "num_warps": 4 if dim <= 64 else 8}
