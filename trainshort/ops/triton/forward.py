"""Forward: one program for BM queries of one head, which visits the keys of its window and no others.

Key tiles fall into five ranges, of which causal attention has the first three:

    [k0, u0) masked | [u0, n1) past | [n1, n2) masked, near the diagonal | [n2, u1) future | [u1, k1) masked

Only masked tiles compare positions. In the others the bias is a term of the query plus a term of the key, and in
causal attention the query's term is left out beyond the nearest keys: it cancels in the softmax. The log-sum-exp of
the nearest keys is kept apart while that is so, because a steep slope's term would drown it.

The nearest keys come first, and a unit more than the diagonal. What they sum to is known before any far key is
visited, and with the norms of the keys says which of them can matter at all: those outside [FROM, TO) are never read
(windows.py). Of the others it turns out whether they did: FOUND is the last tile outwards beyond which no query of
this program has more softmax mass than `mass`, and all that the backward pass needs to visit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trainshort.ops.triton.tiles import (
    BUCKET,
    CLOSE,
    DECAY,
    FAR,
    FUTURE,
    LINEAR,
    LN2,
    LOG2E,
    MASKED,
    NEAR,
    NO_BIAS,
    ONE,
    PAST,
    ROWS,
    UNIT,
    among_keys,
    close_bias,
    close_by,
    full_bias,
    head_numbers,
    is_kept,
    key_term,
    load_rows,
    place,
    position,
    query_numbers,
    query_term,
    sees_of,
    sight,
    some_sees,
    split_bias,
    store_rows,
)
from trainshort.ops.triton.windows import (
    first_needed,
    first_needed_by_levels,
    last_needed,
    last_needed_by_levels,
    lengths,
)


@triton.jit
def key_ranges(lo, hi, some, p, max_distance, BN: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr):
    """The borders k0, u0, n1, n2, u1, k1 of the five ranges for these rows, all multiples of BN. Those about the
    diagonal are multiples of UNIT under a decay, which counts a unit of keys from the end nearest to the queries."""
    tl.static_assert(BIAS != DECAY or BN <= UNIT)
    NEAR_STEP: tl.constexpr = UNIT if BIAS == DECAY else BN
    k0 = tl.min(tl.where(some, lo, FAR)) // BN * BN
    k1 = (tl.max(tl.where(some, hi, 0)) + BN - 1) // BN * BN
    k0 = tl.minimum(k0, k1)
    near = max_distance if BIAS == BUCKET else 0
    p_first = tl.min(tl.where(some, p, FAR))
    n1 = tl.minimum(tl.min(tl.where(some, hi, FAR)), p_first + 1 - near)
    n1 = tl.minimum(tl.maximum(n1 // NEAR_STEP * NEAR_STEP, k0), k1)
    n1 = tl.where(n1 < 0, 0, n1)
    u0 = (tl.max(tl.where(some, lo, 0)) + BN - 1) // BN * BN
    u0 = tl.minimum(u0, n1)
    if CAUSAL:
        n2, u1 = k1, k1
    else:
        p_last = tl.max(tl.where(some, p, -FAR))
        n2 = (tl.maximum(p_last + 1 + near, 0) + NEAR_STEP - 1) // NEAR_STEP * NEAR_STEP
        n2 = tl.minimum(tl.maximum(n2, n1), k1)
        u1 = tl.min(tl.where(some, hi, FAR)) // BN * BN
        u1 = tl.minimum(tl.maximum(u1, n2), k1)
    return k0, tl.maximum(u0, k0), n1, n2, u1, k1


@triton.jit
def mean_fall(LEVELS, first, end, nk):
    """What c falls by from key to key of a range, in units of log2: on average, and at least a little."""
    fallen = tl.abs(tl.load(LEVELS + among_keys(first, nk)) - tl.load(LEVELS + among_keys(end, nk))).to(tl.float32)
    return tl.maximum(fallen * LOG2E / tl.maximum(end - first, 1).to(tl.float32), 1e-5)


@triton.jit
def _visit(
    acc, l, row_max, rest, found, q, K, V, LINE, LEVELS, AHEAD, FALLS, RESTS, FALLS_AHEAD, b, hk, k_base, v_base,
    stride_kt, stride_vt, nk, nq, start, sees, first, end, p, lo, hi, ref, anchor, row_term, mp, mf, offset,
    max_distance, log2_scale, mass, grow, s0, s1, key0,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr,
    SIDE: tl.constexpr, SIDED: tl.constexpr, DOWN: tl.constexpr, TRACK: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Take in the key tiles of one range, upwards or DOWN. rest: the mass since the tile in `found`, if TRACKed.
    anchor, row_term: of a decay, on the side of this range."""
    for step in tl.range(first, end, BN, num_stages=STAGES):
        key = step
        if DOWN:
            key = end - BN - (step - first)
        j = key + tl.arange(0, BN)
        k = load_rows(K, b, hk, key, k_base, stride_kt, nk, D, BD, BN, TMA)
        s = tl.dot(q, k.T, input_precision=PRECISION) * log2_scale
        if SIDE == MASKED or SIDE == NEAR or SIDE == CLOSE:
            if SIDE == CLOSE:
                s += close_bias(LEVELS, FALLS, RESTS, p, key, j, nk)
            elif CAUSAL and BIAS == LINEAR and SIDE == MASKED:
                s += (mp * (j - ref).to(tl.float32))[None, :]
            elif CAUSAL and BIAS == DECAY and SIDE == MASKED:
                s += key_term(LEVELS, AHEAD, FALLS, FALLS_AHEAD, key, j, nk, anchor, PAST)[None, :]
            elif BIAS != NO_BIAS:
                s += full_bias(
                    LINE, LEVELS, AHEAD, p[:, None], j[None, :], nk, mp, mf, offset, max_distance, BIAS, CAUSAL
                )
            s = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None]), s, -float("inf"))
        elif BIAS == DECAY:
            s += key_term(LEVELS, AHEAD, FALLS, FALLS_AHEAD, key, j, nk, anchor, SIDE)[None, :]
            if not CAUSAL:
                s += row_term[:, None]
        else:
            row, column = split_bias(LINE, p, j, ref, mp, mf, offset, max_distance, BIAS, SIDE)
            if BIAS != NO_BIAS:
                s += column[None, :]
            if BIAS == LINEAR and not CAUSAL:
                s += row[:, None]
        top = tl.maximum(row_max, tl.max(s, 1))
        shift = tl.where(top == -float("inf"), 0.0, top)
        w = tl.exp2(s - shift[:, None])
        fade = tl.exp2(row_max - shift)
        weight = tl.sum(w, 1)
        l = l * fade + weight
        if TRACK:
            rest = rest * fade + weight
            # Far tiles fade by the same factor each: one that with all beyond it could make up `mass` is marked at
            # once, not when that much has come together, many tiles later.
            matters = ~((rest <= mass * l) & (weight * grow <= mass * l))  # NaN does
            found = tl.where(matters, key if DOWN else key + BN, found)
            rest = tl.where(matters, 0.0, rest)
        if DROPOUT > 0:
            w = tl.where(is_kept(s0[:, None], s1[:, None], (key0 + j)[None, :], DROPOUT), w, 0.0)
        acc = acc * fade[:, None]
        v = load_rows(V, b, hk, key, v_base, stride_vt, nk, D, BD, BN, TMA)
        if SIDED and SIDE != PAST and SIDE != FUTURE:  # a weight of zero times a value that is not finite
            v = tl.where(some_sees(j, start, nq, nk, sees)[:, None], v, 0.0).to(v.dtype)
        acc = tl.dot(w.to(v.dtype), v, acc, input_precision=PRECISION)
        row_max = top
    return acc, l, row_max, rest, found


@triton.jit(do_not_specialize=["start", "units", "blocks"])
def forward_kernel(
    Q, K, V, OUT, LSE, SEED, SLOPES, FUTURES, SEES, LINE, LEVELS, AHEAD, FALLS, RESTS, FALLS_AHEAD, GATE_FIRST,
    AHEAD_END, QUERY_NORM, COMMON, CENTER, NORM, PASTS, AHEADS, NORM_PAST, MOST_PAST, NORM_AHEAD, MOST_AHEAD,
    REACH_PAST, REACH_AHEAD, FROM, TO, FOUND_FIRST, FOUND_LAST, SEQ, BLOCKS, ORDER, UNIT0,
    start, log2_scale, scale, budget, mass,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot, stride_slope, stride_level, stride_level_head, units, blocks,
    H, group, Tq, Tk, offset, max_distance,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr,
    GATES: tl.constexpr, SIDED: tl.constexpr, WINDOWS: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    ORDERED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, TRACK: tl.constexpr,
    COARSE: tl.constexpr, DROPOUT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # later queries see more: first come the longest
    b = tl.program_id(1)
    h = tl.num_programs(2) - 1 - tl.program_id(2)
    if ORDERED:
        h = tl.load(ORDER + h)
    entry = tile * BM // ROWS
    block, q0, nq, k0, nk, start = place(SEQ, BLOCKS, b, entry, Tq, Tk, start, CAUSAL, RAGGED, PACKED)
    row = block * ROWS + tile * BM % ROWS
    if row >= nq:
        return
    hk = h // group
    q_base = b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh + q0.to(tl.int64) * stride_qt
    k_base = b.to(tl.int64) * stride_kb + hk.to(tl.int64) * stride_kh + k0.to(tl.int64) * stride_kt
    v_base = b.to(tl.int64) * stride_vb + hk.to(tl.int64) * stride_vh + k0.to(tl.int64) * stride_vt
    o_base = b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh + q0.to(tl.int64) * stride_ot
    mp, mf = 0.0, 0.0
    if BIAS == LINEAR:
        past_slope = tl.load(SLOPES + b * stride_slope + h)
        future_slope = tl.load(FUTURES + b * stride_slope + h)
        mp, mf = past_slope * 1.4426950408889634, future_slope * 1.4426950408889634
    if BIAS == BUCKET:
        LINE += h * (2 * max_distance + 1)
    if BIAS == DECAY:  # of this head, from the first key of the sequence on
        level_at = b.to(tl.int64) * stride_level + h.to(tl.int64) * stride_level_head + k0
        LEVELS += level_at
        fall_at = (b * H + h).to(tl.int64) * Tk + k0
        FALLS += fall_at
        if CAUSAL:
            RESTS += fall_at
        else:
            AHEAD += level_at
            FALLS_AHEAD += fall_at
        if GATES:
            GATE_FIRST += level_at
        if GATES and not CAUSAL:
            AHEAD_END += level_at
    r = row + tl.arange(0, BM)
    p = position(start, r, nk, max_distance, CAUSAL)
    sees = sees_of(SEES, h, CAUSAL, SIDED)
    lo, hi, some = sight(r, nq, nk, start, sees, FROM, TO, 0, GATE_FIRST, AHEAD_END, k0, CAUSAL, False, GATES)
    ref = position(start, row, nk, max_distance, CAUSAL)
    after = (p - ref).to(tl.float32)
    anchor, row_term, anchor_ahead, row_term_ahead = 0.0, after, 0.0, after
    if BIAS == DECAY:  # between the queries and what they look back to, or ahead
        anchor = tl.load(LEVELS + among_keys(ref, nk))
        row_term = query_term(LEVELS, AHEAD, p, nk, anchor, PAST)
        if not CAUSAL:
            last_row = tl.minimum(row + BM, nq) - 1
            anchor_ahead = tl.load(AHEAD + among_keys(position(start, last_row, nk, max_distance, CAUSAL), nk))
            row_term_ahead = query_term(LEVELS, AHEAD, p, nk, anchor_ahead, FUTURE)
    c0, u0, n1, n2, u1, c1 = key_ranges(lo, hi, some, p, max_distance, BN, BIAS, CAUSAL)
    near0, near1 = n1, n2
    if WINDOWS:
        near0 = tl.maximum(n1 - UNIT, u0)
        if not CAUSAL:
            near1 = tl.minimum(n2 + UNIT, u1)

    q = load_rows(Q, b, h, row, q_base, stride_qt, nq, D, BD, BM, TMA)
    if WINDOWS:  # what is known of the queries and of the keys that they may see
        sequence = tl.load(BLOCKS + 2 * entry) if PACKED else b
        entry0 = entry - block if PACKED else b * 0
        kv_heads = H // group
        d = tl.arange(0, BD)
        center = tl.load(CENTER + (sequence * kv_heads + hk) * D + d, mask=d < D, other=0.0)
        wide = q.to(tl.float32)
        x = lengths(wide, D) * tl.abs(scale)
        centered = tl.sum(wide * center[None, :], 1) * scale
        common = tl.load(COMMON + sequence * kv_heads + hk)
        X = tl.load(QUERY_NORM + sequence * H + h)
        key_units = (nk + UNIT - 1) // UNIT
        last_key = tl.maximum(nk - 1, 0)
        last_unit = tl.minimum(tl.maximum(ref + BM - 1, 0), last_key) // UNIT
        in_key_head = ((b * kv_heads + hk) * blocks + entry0) * (ROWS // UNIT)
        in_head = ((b * H + h) * blocks + entry0) * (ROWS // UNIT)
        norm = tl.load(NORM_PAST + in_key_head + last_unit)
        past = tl.load(MOST_PAST + in_head + last_unit)
        own = tl.load(PASTS + in_head + last_unit)
        longest = norm
        if not CAUSAL:
            from_unit = tl.minimum(tl.maximum(ref, 0), last_key) // UNIT
            norm_ahead = tl.load(NORM_AHEAD + in_key_head + from_unit)
            ahead = tl.load(MOST_AHEAD + in_head + from_unit)
            longest = tl.maximum(norm, norm_ahead)

    acc = tl.zeros([BM, BD], tl.float32)
    l = tl.zeros([BM], tl.float32)
    row_max = tl.full([BM], -float("inf"), tl.float32)
    rest = tl.zeros([BM], tl.float32)
    found = tl.zeros([BM], tl.int32) + near0
    grow = 1.0
    s0, s1, key0 = 0, 0, 0
    if DROPOUT > 0:
        s0, s1, query0, key0 = head_numbers(SEED, b, h, H, q0, k0, PART)
        s0, s1 = query_numbers(s0, s1, query0 + r)
    # What is read of a decay takes shared memory too, and the programs of an SM have just enough.
    near_stages: tl.constexpr = min(STAGES, 2) if BIAS == DECAY else STAGES
    close = near0
    if BIAS == DECAY and CAUSAL:
        close = tl.where(close_by(LEVELS, near0, near1, nk), near1, near0)
        acc, l, row_max, rest, found = _visit(
            acc, l, row_max, rest, found, q, K, V, LINE, LEVELS, AHEAD, FALLS, RESTS, FALLS_AHEAD, b, hk, k_base,
            v_base, stride_kt, stride_vt, nk, nq, start, sees, near0, close, p, lo, hi, ref, anchor, row_term, mp,
            mf, offset, max_distance, log2_scale, mass, grow, s0, s1, key0, D, BD, BN, BIAS, CAUSAL, CLOSE, SIDED,
            True, False, TMA, PRECISION, near_stages, DROPOUT,
        )  # fmt: skip
    acc, l, row_max, rest, found = _visit(
        acc, l, row_max, rest, found, q, K, V, LINE, LEVELS, AHEAD, FALLS, RESTS, FALLS_AHEAD, b, hk, k_base, v_base,
        stride_kt, stride_vt, nk, nq, start, sees, close, near1, p, lo, hi, ref, anchor, row_term, mp, mf, offset,
        max_distance, log2_scale, mass, grow, s0, s1, key0, D, BD, BN, BIAS, CAUSAL, NEAR, SIDED, True, False, TMA,
        PRECISION, near_stages, DROPOUT,
    )  # fmt: skip
    if WINDOWS:
        near = (row_max + tl.log2(l)) * 0.6931471805599453 - centered
        # Rounding, of the scores.
        near -= x * ((D + 40) * 1.1920929e-7 * (longest + 2.0 * common) + COARSE * (longest + common)) + 0.002
        x = tl.where((x < 1e30) & (near > -1e30), x, float("inf"))
        if BIAS == DECAY:
            first = first_needed_by_levels(
                x, near, some, row_term * LN2, anchor, near0 // UNIT, LEVELS, REACH_PAST + in_head, PASTS + in_head,
                NORM_PAST + in_key_head, X, norm, past, budget, nk,
            )  # fmt: skip
        else:
            first = first_needed(
                x, near, some, ref, after, NORM + in_key_head, PASTS + in_head, X, norm, past, past > 1.1 * own,
                past_slope, budget, last_unit, key_units,
            )  # fmt: skip
        c0, u0 = tl.maximum(c0, first * UNIT), tl.maximum(u0, first * UNIT)
        if not CAUSAL:
            if BIAS == DECAY:
                last = last_needed_by_levels(
                    x, near, some, row_term_ahead * LN2, anchor_ahead, (near1 + UNIT - 1) // UNIT, AHEAD,
                    REACH_AHEAD + in_head, AHEADS + in_head, NORM_AHEAD + in_key_head, X, norm_ahead, ahead, budget,
                    key_units,
                )  # fmt: skip
            else:
                last = last_needed(x, near, some, ref, after, X, norm_ahead, ahead, future_slope, offset, budget, nk)
            c1, u1 = tl.minimum(c1, last * UNIT), tl.minimum(u1, last * UNIT)
    if TRACK:
        if BIAS == DECAY:  # the mean over the keys that will be visited
            mp = mean_fall(LEVELS, c0, near0, nk)
        grow = 1.75 / (1.0 - tl.exp2(-mp * BN))
    near_max, far_max = row_max, row_max
    if CAUSAL and BIAS == LINEAR:  # from here on without the query's term of the bias
        row_max += mp * after
        far_max = row_max
    if CAUSAL and BIAS == DECAY:
        row_max -= row_term
        far_max = row_max
    acc, l, row_max, rest, found = _visit(
        acc, l, row_max, rest, found, q, K, V, LINE, LEVELS, AHEAD, FALLS, RESTS, FALLS_AHEAD, b, hk, k_base, v_base,
        stride_kt, stride_vt, nk, nq, start, sees, u0, near0, p, lo, hi, ref, anchor, row_term, mp, mf, offset,
        max_distance, log2_scale, mass, grow, s0, s1, key0, D, BD, BN, BIAS, CAUSAL, PAST, SIDED, True, TRACK, TMA,
        PRECISION, STAGES, DROPOUT,
    )  # fmt: skip
    acc, l, row_max, rest, found = _visit(
        acc, l, row_max, rest, found, q, K, V, LINE, LEVELS, AHEAD, FALLS, RESTS, FALLS_AHEAD, b, hk, k_base, v_base,
        stride_kt, stride_vt, nk, nq, start, sees, c0, u0, p, lo, hi, ref, anchor, row_term, mp, mf, offset,
        max_distance, log2_scale, mass, grow, s0, s1, key0, D, BD, BN, BIAS, CAUSAL, MASKED, SIDED, True, TRACK, TMA,
        PRECISION, 1, DROPOUT,
    )  # fmt: skip
    if CAUSAL and BIAS == LINEAR:
        row_max = tl.where(row_max == far_max, near_max, row_max - mp * after)
    if CAUSAL and BIAS == DECAY:
        row_max = tl.where(row_max == far_max, near_max, row_max + row_term)
    if TRACK:
        G: tl.constexpr = BM if BM < UNIT else UNIT
        unit0 = (b * H + h) * units
        if PACKED:
            unit0 += tl.load(UNIT0 + sequence)
        at = unit0 * (UNIT // G) + row // G + tl.arange(0, BM // G)
        written = row + tl.arange(0, BM // G) * G < nq
        least = tl.min(tl.where(some, found, FAR).reshape(BM // G, G), 1)
        tl.store(FOUND_FIRST + at, least // UNIT, mask=written)
        tl.store(FROM + at, least * 0 + tl.minimum(c0, near0) // UNIT, mask=written)
    if not CAUSAL:
        rest = tl.zeros([BM], tl.float32)
        found = tl.zeros([BM], tl.int32) + near1
        if TRACK:
            if BIAS == DECAY:
                mf = mean_fall(AHEAD, near1, c1, nk)
            grow = 1.75 / (1.0 - tl.exp2(-mf * BN))
        acc, l, row_max, rest, found = _visit(
            acc, l, row_max, rest, found, q, K, V, LINE, LEVELS, AHEAD, FALLS, RESTS, FALLS_AHEAD, b, hk, k_base,
            v_base, stride_kt, stride_vt, nk, nq, start, sees, near1, u1, p, lo, hi, ref, anchor_ahead,
            row_term_ahead, mp, mf, offset, max_distance, log2_scale, mass, grow, s0, s1, key0, D, BD, BN, BIAS,
            CAUSAL, FUTURE, SIDED, False, TRACK, TMA, PRECISION, STAGES, DROPOUT,
        )  # fmt: skip
        acc, l, row_max, rest, found = _visit(
            acc, l, row_max, rest, found, q, K, V, LINE, LEVELS, AHEAD, FALLS, RESTS, FALLS_AHEAD, b, hk, k_base,
            v_base, stride_kt, stride_vt, nk, nq, start, sees, u1, c1, p, lo, hi, ref, anchor_ahead, row_term_ahead,
            mp, mf, offset, max_distance, log2_scale, mass, grow, s0, s1, key0, D, BD, BN, BIAS, CAUSAL, MASKED,
            SIDED, False, TRACK, TMA, PRECISION, 1, DROPOUT,
        )  # fmt: skip
        if TRACK:
            most = tl.max(tl.where(some, found, 0).reshape(BM // G, G), 1)
            tl.store(FOUND_LAST + at, (most + UNIT - 1) // UNIT, mask=written)
            tl.store(TO + at, most * 0 + (tl.maximum(c1, near1) + UNIT - 1) // UNIT, mask=written)

    if DROPOUT > 0:
        acc *= ONE / (ONE - DROPOUT)
    out = tl.where(some[:, None], acc / l[:, None], 0.0)
    store_rows(OUT, out, row, o_base, stride_ot, nq, D, BD, BM)
    lse = row_max + tl.log2(l)
    # A query that sees nothing: no weight on any key in the backward pass.
    lse = tl.where(some, lse, float("inf"))
    tl.store(LSE + (b * H + h).to(tl.int64) * Tq + q0 + r, lse, mask=r < nq)
