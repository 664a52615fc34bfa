"""One token over rings of keys (ops/rings.py): it is stored, attends, and leaves what its certificate needs.

`append_kernel` writes the token's key and value over the oldest and hands on the norm of the key that was there.
`split_kernel` is one program for one split of the keys of one key head, as in decode.py: the queries of its group
are the rows of its tile, and it finds the keys that can matter by itself. `join_kernel` merges the splits and writes
X and LSE for the certificate. How many tokens there are stands on the device, so every step is the same launch.

    PLACE            tokens before this one; position p of its query
    CAPACITY FIRST OFFSET  by key head: slots, first key that was stored, first slot
    PADDING          by row: leading tokens that are none
    CENTER LONGEST   by row and key head: the vector c taken from keys, and the largest ‖k - c‖ so far
    BEFORE           by row and key head: the norm of the key that was overwritten
    X LSE            by row and head: |scale| ‖q‖, and the log-sum-exp less scale q.c

Otherwise the legend is that of tiles.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trainshort.ops.triton.tiles import UNIT
from trainshort.ops.triton.windows import UNDERFLOW, lengths

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["slots"])
def append_kernel(
    K, V, KEYS, VALUES, NORMS, CENTER, LONGEST, BEFORE, PLACE, CAPACITY, OFFSET, slots,
    stride_kb, stride_kh, stride_vb, stride_vh, Hkv, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    hk = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BD)
    inside = d < D
    slot = tl.load(OFFSET + hk) + tl.load(PLACE) % tl.load(CAPACITY + hk)
    row = b * slots + slot
    head = b * Hkv + hk
    v = tl.load(V + b * stride_vb + hk * stride_vh + d, mask=inside, other=0.0)
    k = tl.load(K + b * stride_kb + hk * stride_kh + d, mask=inside, other=0.0)
    tl.store(VALUES + row * D + d, v, mask=inside)
    tl.store(KEYS + row * D + d, k, mask=inside)
    center = tl.load(CENTER + head * D + d, mask=inside, other=0.0)
    norm = tl.max(lengths((k.to(tl.float32) - center)[None, :], D), 0)
    norm = tl.where(tl.sum(tl.where(k == k, 0, 1), 0) > 0, float("nan"), norm)  # maxima drop NaN
    tl.store(BEFORE + head, tl.load(NORMS + row))
    tl.store(NORMS + row, norm)
    longest = tl.load(LONGEST + head)
    odd = (norm != norm) | (longest != longest)
    tl.store(LONGEST + head, tl.where(odd, float("nan"), tl.maximum(longest, norm)))


@triton.jit(do_not_specialize=["slots"])
def split_kernel(
    Q, KEYS, VALUES, PARTIAL, SUMS, SLOPES, CENTER, LONGEST, PLACE, CAPACITY, FIRST, OFFSET, PADDING, slots, scale,
    budget, stride_qb, stride_qh, H, Hkv, group,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PADDED: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    hk = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    i = tl.arange(0, BM)
    d = tl.arange(0, BD)
    rows = i < group
    h = hk * group + i
    tile = rows[:, None] & (d < D)[None, :]
    q = tl.load(Q + b * stride_qb + h[:, None].to(tl.int64) * stride_qh + d[None, :], mask=tile, other=0.0)
    slope = tl.load(SLOPES + h, mask=rows, other=1.0)
    p = tl.load(PLACE).to(tl.int32)
    capacity = tl.load(CAPACITY + hk).to(tl.int32)
    base = b * slots + tl.load(OFFSET + hk)
    low = tl.maximum(tl.load(FIRST + hk).to(tl.int32), p + 1 - capacity)
    if PADDED:
        low = tl.maximum(low, tl.load(PADDING + b).to(tl.int32))

    # Of the keys there are, those that can matter, as in decode.py: by norms, against the query's own key.
    head = b * Hkv + hk
    center = tl.load(CENTER + head * D + d, mask=d < D, other=0.0)
    own = tl.load(KEYS + (base + p % capacity) * D + d, mask=d < D, other=0.0).to(tl.float32) - center
    wide = q.to(tl.float32)
    near = tl.sum(wide * own[None, :], 1) * scale
    x = lengths(wide, D) * tl.abs(scale)
    longest = tl.load(LONGEST + head)
    slack = 1.0 + 4.0 * (D + 8) * 1.1920929e-7
    geometric = tl.where(slope < 1e-4, -tl.log(slope) + slope, -tl.log(1.0 - tl.exp(-slope)))
    width = (x * (longest + D * UNDERFLOW) * slack - near + budget + geometric + 0.01) / slope
    back = tl.where((width > 0.0) & (width < 16777216.0), tl.ceil(width).to(tl.int32) + 1, 1 << 30)  # NaN: all
    low = tl.maximum(low, tl.maximum(tl.min(tl.where(rows, p - back, p), 0), 0) // UNIT * UNIT)

    per = ((p + 1 - low + SPLITS - 1) // SPLITS + BN - 1) // BN * BN
    low = low + split * per
    high = tl.minimum(low + per, p + 1)
    acc = tl.zeros([BM, BD], tl.float32)
    l = tl.zeros([BM], tl.float32)
    row_max = tl.full([BM], -float("inf"), tl.float32)
    for start in tl.range(low, high, BN, num_stages=STAGES):
        j = start + tl.arange(0, BN)
        at = (base + j % capacity)[:, None] * D + d[None, :]
        inside = (j < high)[:, None] & (d < D)[None, :]
        k = tl.load(KEYS + at, mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        s += (slope * LOG2E)[:, None] * (j - p)[None, :].to(tl.float32)
        s = tl.where((j < high)[None, :], s, -float("inf"))
        new = tl.maximum(row_max, tl.max(s, 1))
        shift = tl.where(new == -float("inf"), 0.0, new)
        w = tl.exp2(s - shift[:, None])
        fade = tl.exp2(row_max - shift)
        l = l * fade + tl.sum(w, 1)
        v = tl.load(VALUES + at, mask=inside, other=0.0)
        acc = tl.dot(w.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        row_max = new
    out = (b * H + h) * SPLITS + split
    done = tile & (i * 0 + low < high)[:, None]
    tl.store(SUMS + out, tl.where(low < high, row_max + tl.log2(l), -float("inf")), mask=rows)
    tl.store(PARTIAL + out[:, None] * D + d[None, :], acc / l[:, None], mask=done)


@triton.jit
def join_kernel(
    Q, CENTER, PARTIAL, SUMS, OUT, X, LSE, scale, stride_qb, stride_qh, H, Hkv, group,
    D: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, BD)
    row = b * H + h
    at = row * SPLITS + split
    sums = tl.load(SUMS + at)
    odd = tl.sum(tl.where(sums != sums, 1, 0), 0) > 0  # maxima drop NaN
    row_max = tl.max(sums, 0)
    weight = tl.where(sums > -float("inf"), tl.exp2(sums - row_max), 0.0)
    total = tl.sum(weight, 0)
    inside = (weight > 0.0)[:, None] & (d < D)[None, :]
    partial = tl.load(PARTIAL + at[:, None] * D + d[None, :], mask=inside, other=0.0)
    out = tl.sum(partial * weight[:, None], 0) / total
    out = tl.where(odd, float("nan"), out)
    tl.store(OUT + row * D + d, out.to(OUT.dtype.element_ty), mask=d < D)
    q = tl.load(Q + b * stride_qb + h * stride_qh + d, mask=d < D, other=0.0).to(tl.float32)
    center = tl.load(CENTER + (b * Hkv + h // group) * D + d, mask=d < D, other=0.0)
    lse = (row_max + tl.log2(total)) / LOG2E - tl.sum(q * center, 0) * scale
    tl.store(LSE + row, tl.where(odd, float("nan"), lse))
    x = tl.max(lengths(q[None, :], D), 0) * tl.abs(scale)
    tl.store(X + row, tl.where(tl.sum(tl.where(q == q, 0, 1), 0) > 0, float("nan"), x))
