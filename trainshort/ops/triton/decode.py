"""Decoding: a few queries after many cached keys. Split over keys, reading only what can matter.

`split_kernel` is one program for one split of the keys of one key head; the queries of its group (and, with a few
queries a row, all of them) are the rows of its tile. Each program finds the window by itself, in O(1) from the norms
that a cache keeps, so heads of short windows have few splits to do and the rest return at once. `join_kernel` merges
the splits: PARTIAL is the output of each, SUMS its log-sum-exp. The window, for a slope m:
W >= (x K - score of the nearest key + ln(1/tolerance) - ln(1 - e^-m)) / m, as in the proof.
For a decay all whole units may go whose last key has c_j - c_p >= x K - that score + ln(1/tolerance) + ln(keys),
found by a search in c that looks at PROBES units at a time: at 65,536 keys twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trainshort.ops.triton.tiles import BUCKET, DECAY, FAR, LINEAR, LOG2E, UNIT, among_keys, position
from trainshort.ops.triton.windows import UNDERFLOW, lengths

PROBES = tl.constexpr(32)


@triton.jit
def probed(LEVELS, level_at, level, found, span, units, rows):
    """Of every so many-th unit from `found` on, whose last keys are looked at: which there are, in a span of 0 none,
    and how far above `level` their c lies. By row."""
    probe = found[:, None] + (tl.arange(0, PROBES) + 1)[None, :] * ((span + PROBES - 1) // PROBES)
    inside = rows[:, None] & (probe > found[:, None]) & (probe <= units)
    return inside, tl.load(LEVELS + level_at[:, None] + probe * UNIT - 1, mask=inside, other=0.0) - level[:, None]


@triton.jit
def units_beyond(LEVELS, level_at, level, fall, units, rows, looked, above):
    """How many units, of so many, end with keys whose c lies `fall` or more above `level`; c never rises. By row.
    looked, above: of the first look, which needs no `fall` and so can be taken before it is known."""
    found = tl.zeros_like(level_at).to(tl.int32)
    span = units
    while span > 0:  # the answer is one of [found, found + span]
        step = (span + PROBES - 1) // PROBES
        found += step * tl.sum((looked & (above >= fall[:, None])).to(tl.int32), 1)
        span = step - 1
        if span > 0:
            looked, above = probed(LEVELS, level_at, level, found, span, units, rows)
    return found


@triton.jit(do_not_specialize=["start", "Tk", "norm_count", "stride_level", "stride_level_head"])
def split_kernel(
    Q, K, V, PARTIAL, SUMS, SLOPES, LINE, LEVELS, GATE_FIRST, NORMS, SEQ, norm_count, Tk, start, scale, budget,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_nb, stride_nh, stride_slope, stride_level, stride_level_head, H, group, Tq, max_distance,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, GATES: tl.constexpr,
    WINDOWS: tl.constexpr, RAGGED: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, CHUNK: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    hk = tl.program_id(1)
    b = tl.program_id(2)
    k0, nk = b * 0, b * 0 + Tk
    if RAGGED:
        at = SEQ + 5 * b
        k0, nk, start = tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    i = tl.arange(0, BM)
    d = tl.arange(0, BD)
    rows = i < group * Tq
    h = hk * group + i // Tq
    p = position(start, i % Tq, nk, max_distance, True)
    q_at = b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh + (i % Tq).to(tl.int64) * stride_qt
    q = tl.load(Q + q_at[:, None] + d[None, :], mask=rows[:, None] & (d < D)[None, :], other=0.0)
    k_base = b.to(tl.int64) * stride_kb + hk.to(tl.int64) * stride_kh + k0.to(tl.int64) * stride_kt
    v_base = b.to(tl.int64) * stride_vb + hk.to(tl.int64) * stride_vh + k0.to(tl.int64) * stride_vt
    slope = tl.zeros([BM], tl.float32)
    if BIAS == LINEAR:
        slope = tl.load(SLOPES + b * stride_slope + h, mask=rows, other=1.0)
    end = tl.minimum(tl.max(tl.where(rows, p, -1), 0) + 1, nk)
    first = b * 0
    border = i * 0
    if BIAS == DECAY:
        level_at = b.to(tl.int64) * stride_level + h.to(tl.int64) * stride_level_head + k0
        level = tl.load(LEVELS + level_at + among_keys(p, nk), mask=rows, other=0.0)
        if GATES:
            border = tl.load(GATE_FIRST + level_at + among_keys(p, nk), mask=rows, other=0) - k0
            first = tl.maximum(tl.minimum(tl.min(tl.where(rows, border, FAR), 0), end), 0) // UNIT * UNIT
    if WINDOWS:
        nearest = tl.minimum(p, nk - 1)
        seen = rows & (nearest >= 0)
        if BIAS == DECAY:
            units = end // UNIT
            looked, above = probed(LEVELS, level_at, level, i * 0, units, units, seen)
        k_at = nearest.to(tl.int64) * stride_kt
        own = tl.load(K + k_base + k_at[:, None] + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0)
        wide = q.to(tl.float32)
        x = lengths(wide, D) * tl.abs(scale)
        norm = b * 0.0
        odd = b * 0
        for chunk in range(0, norm_count, CHUNK):
            index = chunk + tl.arange(0, CHUNK)
            norms = tl.load(NORMS + b * stride_nb + hk * stride_nh + index, mask=index < norm_count, other=0.0)
            norm = tl.maximum(norm, tl.max(norms, 0))
            odd += tl.sum(tl.where(norms < 1e30, 0, 1), 0)  # NaN compares false
        near = tl.sum(wide * own.to(tl.float32), 1) * scale - slope * (p - nearest).to(tl.float32)
        slack = 1.0 + 4.0 * (D + 4) * 1.1920929e-7
        if BIAS == DECAY:
            fall = x * (norm + D * UNDERFLOW) * slack - near + budget + tl.log(nk.to(tl.float32)) + 0.01
            fall = tl.where((fall > 0.0) & (fall < 1e30), fall, float("inf"))  # NaN compares false
            beyond = units_beyond(LEVELS, level_at, level, fall.to(tl.float64), units, seen, looked, above)
            lowest = tl.min(tl.where(seen, beyond * UNIT, FAR), 0)
            first = tl.maximum(first, tl.where(odd > 0, 0, tl.minimum(lowest, end) // UNIT * UNIT))
        else:
            geometric = tl.where(slope < 1e-4, -tl.log(slope) + slope, -tl.log(1.0 - tl.exp(-slope)))
            width = (x * (norm + D * UNDERFLOW) * slack - near + budget + geometric + 0.01) / slope
            back = tl.where((width > 0.0) & (width < 16777216.0), tl.ceil(width).to(tl.int32) + 1, 1 << 30)
            lowest = tl.min(tl.where(seen, p - back, 1 << 30), 0)
            first = tl.where(odd > 0, 0, tl.minimum(tl.maximum(lowest, 0), end) // UNIT * UNIT)
    total = tl.maximum(end - first, 0)
    per = ((total + SPLITS - 1) // SPLITS + BN - 1) // BN * BN
    low = first + split * per
    high = tl.minimum(low + per, end)

    acc = tl.zeros([BM, BD], tl.float32)
    l = tl.zeros([BM], tl.float32)
    row_max = tl.full([BM], -float("inf"), tl.float32)
    for key in tl.range(low, high, BN, num_stages=STAGES):
        j = key + tl.arange(0, BN)
        inside = (j < end)[:, None] & (d < D)[None, :]
        j_at = j[:, None].to(tl.int64)
        k = tl.load(K + k_base + j_at * stride_kt + d[None, :], mask=inside, other=0.0)
        s = tl.dot(q, k.T, input_precision=PRECISION) * (scale * 1.4426950408889634)
        away = j[None, :] - p[:, None]
        if BIAS == LINEAR:
            s += (slope * 1.4426950408889634)[:, None] * away.to(tl.float32)
        if BIAS == BUCKET:
            line = tl.minimum(tl.maximum(away, -max_distance), max_distance) + max_distance
            s += tl.load(LINE + (h * (2 * max_distance + 1))[:, None] + line, mask=rows[:, None], other=0.0)
        if BIAS == DECAY and ALONE:
            c = tl.load(LEVELS + tl.min(level_at, 0) + j, mask=j < end, other=0.0)
            s += ((tl.sum(level, 0) - c).to(tl.float32) * LOG2E)[None, :]  # other rows have a level of 0
        elif BIAS == DECAY:
            of_key = rows[:, None] & (j < end)[None, :]
            c = tl.load(LEVELS + level_at[:, None] + j[None, :], mask=of_key, other=0.0)
            s += (level[:, None] - c).to(tl.float32) * LOG2E
        s = tl.where((away <= 0) & (j < end)[None, :], s, -float("inf"))
        if GATES:
            s = tl.where(j[None, :] >= border[:, None], s, -float("inf"))
        new = tl.maximum(row_max, tl.max(s, 1))
        shift = tl.where(new == -float("inf"), 0.0, new)
        w = tl.exp2(s - shift[:, None])
        fade = tl.exp2(row_max - shift)
        l = l * fade + tl.sum(w, 1)
        v = tl.load(V + v_base + j_at * stride_vt + d[None, :], mask=inside, other=0.0)
        acc = tl.dot(w.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        row_max = new
    at = ((b * H + h).to(tl.int64) * Tq + i % Tq) * SPLITS + split
    done = rows & (i * 0 + low < high)
    tl.store(SUMS + at, tl.where(low < high, row_max + tl.log2(l), -float("inf")), mask=rows)
    tl.store(PARTIAL + at[:, None] * D + d[None, :], acc / l[:, None], mask=done[:, None] & (d < D)[None, :])


@triton.jit
def join_kernel(
    PARTIAL, SUMS, OUT, stride_ob, stride_oh, stride_ot, H, Tq,
    D: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, BD)
    at = ((b * H + h).to(tl.int64) * Tq + t) * SPLITS + split
    lse = tl.load(SUMS + at)
    odd = tl.sum(tl.where(lse != lse, 1, 0), 0) > 0  # the maximum drops NaN
    row_max = tl.max(lse, 0)
    weight = tl.where(lse > -float("inf"), tl.exp2(lse - tl.where(row_max > -float("inf"), row_max, 0.0)), 0.0)
    weight = tl.where(lse != lse, 1.0, weight)
    inside = (weight > 0.0)[:, None] & (d < D)[None, :]
    partial = tl.load(PARTIAL + at[:, None] * D + d[None, :], mask=inside, other=0.0)
    total = tl.sum(weight, 0)
    out = tl.sum(partial * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    out = tl.where(odd, float("nan"), out)
    base = b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh + t.to(tl.int64) * stride_ot
    tl.store(OUT + base + d, out.to(OUT.dtype.element_ty), mask=d < D)
