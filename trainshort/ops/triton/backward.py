"""Backward: two kernels that visit the same tiles, those that mattered in the forward pass, without atomics.

`query_kernel` goes like the forward pass: one program for BM queries, which collects dq, the row sums
delta = do.o that the other kernel needs, and a partial sum of the gradient of slopes or table. `key_kernel` is one
program for BN keys, at most a unit of them, which collects dk and dv over all queries that visit them, and over the
heads of its group.

With p_ij the softmax weights: dv_j = sum_i p_ij do_i;  ds_ij = p_ij (do_i.v_j - delta_i);
dq_i = scale sum_j ds_ij k_j;  dk_j = scale sum_i ds_ij q_i;  dm = sum_ij ds_ij (j - i) for a past slope m.
For gates, dc_t = sum_j ds_tj - sum_i ds_it: `query_kernel` stores the first sums, `key_kernel` the second.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trainshort.ops.triton.forward import key_ranges
from trainshort.ops.triton.tiles import (
    BUCKET,
    CLOSE,
    DECAY,
    FUTURE,
    LINEAR,
    LN2,
    MASKED,
    NO_BIAS,
    ONE,
    PAST,
    ROWS,
    UNIT,
    among_keys,
    close_bias,
    close_by,
    fall,
    full_bias,
    halves,
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
    unit_end,
)


@triton.jit
def _query_range(
    dq, dpast, dfuture, dtable, q, do, delta, lse, K, V, LINE, BUCKETS, LEVELS, AHEAD, FALLS, RESTS, FALLS_AHEAD, b,
    hk, k_base, v_base, stride_kt, stride_vt, nk, nq, start, sees, first, end, p, lo, hi, ref, anchor, row_term, mp,
    mf, offset, max_distance, log2_scale, s0, s1, key0,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr,
    GATES: tl.constexpr, SIDE: tl.constexpr, SIDED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, DBIAS: tl.constexpr, NB: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Take in the key tiles of one range: dq, and sums of ds for the gradient of the bias.
    anchor, row_term: of a decay, on the side of this range."""
    for key in tl.range(first, end, BN, num_stages=STAGES):
        j = key + tl.arange(0, BN)
        k = load_rows(K, b, hk, key, k_base, stride_kt, nk, D, BD, BN, TMA)
        v = load_rows(V, b, hk, key, v_base, stride_vt, nk, D, BD, BN, TMA)
        s = tl.dot(q, k.T, input_precision=PRECISION) * log2_scale
        if SIDE == MASKED or SIDE == CLOSE:
            if SIDE == CLOSE:
                s += close_bias(LEVELS, FALLS, RESTS, p, key, j, nk)
            elif BIAS != NO_BIAS:
                s += full_bias(
                    LINE, LEVELS, AHEAD, p[:, None], j[None, :], nk, mp, mf, offset, max_distance, BIAS, CAUSAL
                )
            s -= lse[:, None]
            s = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None]), s, -float("inf"))
        elif BIAS == DECAY:
            column = key_term(LEVELS, AHEAD, FALLS, FALLS_AHEAD, key, j, nk, anchor, SIDE)
            s += column[None, :]
            s += (row_term - lse)[:, None]
        else:
            row, column = split_bias(LINE, p, j, ref, mp, mf, offset, max_distance, BIAS, SIDE)
            s += column[None, :]
            s += (row - lse)[:, None]
        w = tl.exp2(s)
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        if DROPOUT > 0:
            kept = is_kept(s0[:, None], s1[:, None], (key0 + j)[None, :], DROPOUT)
            dp = tl.where(kept, dp * (ONE / (ONE - DROPOUT)), 0.0)
        ds = w * (dp - delta[:, None])
        if SIDE == MASKED or SIDE == CLOSE:  # a weight of zero times a value that is not finite
            ds = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None]), ds, 0.0)
            if SIDED:
                k = tl.where(some_sees(j, start, nq, nk, sees)[:, None], k, 0.0).to(k.dtype)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        if DBIAS and BIAS == LINEAR:
            d = (j[None, :] - p[:, None]).to(tl.float32)
            if SIDE == PAST or CAUSAL:
                dpast += tl.sum(ds * d, 1)
            elif SIDE == FUTURE:
                dfuture += tl.sum(ds * (offset - d), 1)
            else:
                dpast += tl.sum(ds * tl.where(d > 0, 0.0, d), 1)
                dfuture += tl.sum(ds * tl.where(d > 0, offset - d, 0.0), 1)
        if DBIAS and BIAS == DECAY:
            if GATES:
                if SIDE == PAST or CAUSAL:
                    dpast += tl.sum(ds, 1)
                elif SIDE == FUTURE:
                    dfuture += tl.sum(ds, 1)
                else:
                    later = j[None, :] > p[:, None]
                    dpast += tl.sum(tl.where(later, 0.0, ds), 1)
                    dfuture += tl.sum(tl.where(later, ds, 0.0), 1)
            elif SIDE == MASKED or SIDE == CLOSE:
                bias = full_bias(
                    LINE, LEVELS, AHEAD, p[:, None], j[None, :], nk, mp, mf, offset, max_distance, BIAS, CAUSAL
                )
                dpast += tl.sum(ds * bias, 1)
            else:
                dpast += tl.sum(ds * (row_term[:, None] + column[None, :]), 1)
        if DBIAS and BIAS == BUCKET:
            if SIDE == MASKED:
                d = j[None, :] - p[:, None]
                bucket = tl.load(BUCKETS + tl.minimum(tl.maximum(d, -max_distance), max_distance) + max_distance)
                index = tl.arange(0, NB)
                for n in range(NB):
                    part = tl.sum(tl.sum(tl.where(bucket == n, ds, 0.0), 1), 0)
                    dtable += tl.where(index == n, part, 0.0)
            else:
                bucket = tl.load(BUCKETS + (0 if SIDE == PAST else 2 * max_distance))
                dtable += tl.where(tl.arange(0, NB) == bucket, tl.sum(tl.sum(ds, 1), 0), 0.0)
    return dq, dpast, dfuture, dtable


@triton.jit(do_not_specialize=["start", "stride_window"])
def query_kernel(
    Q, K, V, DO, OUT, LSE, DLSE, DELTA, SEED, TERMS, TERMS_AHEAD, DQ, DSLOPES, DFUTURES, DTABLE, ROW_SUMS,
    ROW_SUMS_AHEAD, SLOPES, FUTURES, SEES, LINE, BUCKETS, LEVELS, AHEAD, FALLS, RESTS, FALLS_AHEAD, GATE_FIRST,
    AHEAD_END, FIRST, LAST, SEQ, BLOCKS, ORDER, UNIT0,
    start, log2_scale, scale,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot, stride_dob, stride_doh, stride_dot, stride_dqb, stride_dqh, stride_dqt,
    stride_slope, stride_level, stride_level_head, stride_window,
    H, group, Tq, Tk, offset, max_distance,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr,
    GATES: tl.constexpr, SIDED: tl.constexpr, WINDOWS: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    ORDERED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, DBIAS: tl.constexpr,
    NB: tl.constexpr, GROUP: tl.constexpr, HAS_DLSE: tl.constexpr, DROPOUT: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b = tl.program_id(1)
    h = tl.num_programs(2) - 1 - tl.program_id(2)
    if ORDERED:
        h = tl.load(ORDER + h)
    block, q0, nq, k0, nk, start = place(SEQ, BLOCKS, b, tile * BM // ROWS, Tq, Tk, start, CAUSAL, RAGGED, PACKED)
    row = block * ROWS + tile * BM % ROWS
    if row >= nq:
        return
    hk = h // group
    q_base = b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh + q0.to(tl.int64) * stride_qt
    k_base = b.to(tl.int64) * stride_kb + hk.to(tl.int64) * stride_kh + k0.to(tl.int64) * stride_kt
    v_base = b.to(tl.int64) * stride_vb + hk.to(tl.int64) * stride_vh + k0.to(tl.int64) * stride_vt
    o_base = b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh + q0.to(tl.int64) * stride_ot
    do_base = b.to(tl.int64) * stride_dob + h.to(tl.int64) * stride_doh + q0.to(tl.int64) * stride_dot
    dq_base = b.to(tl.int64) * stride_dqb + h.to(tl.int64) * stride_dqh + q0.to(tl.int64) * stride_dqt
    mp, mf = 0.0, 0.0
    if BIAS == LINEAR:
        mp = tl.load(SLOPES + b * stride_slope + h) * 1.4426950408889634
        mf = tl.load(FUTURES + b * stride_slope + h) * 1.4426950408889634
    if BIAS == BUCKET:
        LINE += h * (2 * max_distance + 1)
    if BIAS == DECAY:
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
    unit0 = (b * H + h) * stride_window
    if PACKED:
        unit0 += tl.load(UNIT0 + tl.load(BLOCKS + 2 * (tile * BM // ROWS)))
    r = row + tl.arange(0, BM)
    p = position(start, r, nk, max_distance, CAUSAL)
    sees = sees_of(SEES, h, CAUSAL, SIDED)
    lo, hi, some = sight(
        r, nq, nk, start, sees, FIRST, LAST, unit0, GATE_FIRST, AHEAD_END, k0, CAUSAL, WINDOWS, GATES
    )
    ref = position(start, row, nk, max_distance, CAUSAL)
    anchor, row_term, anchor_ahead, row_term_ahead = 0.0, 0.0, 0.0, 0.0
    if BIAS == DECAY:  # between the queries and what they look back to, or ahead
        anchor = tl.load(LEVELS + among_keys(ref, nk))
        row_term = query_term(LEVELS, AHEAD, p, nk, anchor, PAST)
        if not CAUSAL:
            last_row = tl.minimum(row + BM, nq) - 1
            anchor_ahead = tl.load(AHEAD + among_keys(start + last_row, nk))
            row_term_ahead = query_term(LEVELS, AHEAD, p, nk, anchor_ahead, FUTURE)
    c0, u0, n1, n2, u1, c1 = key_ranges(lo, hi, some, p, max_distance, BN, BIAS, CAUSAL)

    q = load_rows(Q, b, h, row, q_base, stride_qt, nq, D, BD, BM, TMA)
    do = load_rows(DO, b, h, row, do_base, stride_dot, nq, D, BD, BM, TMA)
    o = load_rows(OUT, b, h, row, o_base, stride_ot, nq, D, BD, BM, False)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    at = (b * H + h).to(tl.int64) * Tq + q0 + r
    if HAS_DLSE:
        delta -= tl.load(DLSE + at, mask=r < nq, other=0.0)
    delta = tl.where(some, delta, 0.0)
    tl.store(DELTA + at, delta, mask=r < nq)
    lse = tl.load(LSE + at, mask=r < nq, other=float("inf"))
    if BIAS == DECAY:  # for key_kernel, whose tiles have GROUP rows
        first_row = r // GROUP * GROUP
        of_group = tl.load(LEVELS + among_keys(start + first_row, nk))
        tl.store(TERMS + at, query_term(LEVELS, AHEAD, p, nk, of_group, PAST) - lse, mask=r < nq)
        if not CAUSAL:
            of_group = tl.load(AHEAD + among_keys(start + tl.minimum(first_row + GROUP, nq) - 1, nk))
            tl.store(TERMS_AHEAD + at, query_term(LEVELS, AHEAD, p, nk, of_group, FUTURE) - lse, mask=r < nq)
    s0, s1, key0 = 0, 0, 0
    if DROPOUT > 0:
        s0, s1, query0, key0 = head_numbers(SEED, b, h, H, q0, k0, PART)
        s0, s1 = query_numbers(s0, s1, query0 + r)
    dq = tl.zeros([BM, BD], tl.float32)
    dpast = tl.zeros([BM], tl.float32)
    dfuture = tl.zeros([BM], tl.float32)
    dtable = tl.zeros([NB], tl.float32)
    dq, dpast, dfuture, dtable = _query_range(
        dq, dpast, dfuture, dtable, q, do, delta, lse, K, V, LINE, BUCKETS, LEVELS, AHEAD, FALLS, RESTS, FALLS_AHEAD,
        b, hk, k_base, v_base, stride_kt, stride_vt, nk, nq, start, sees, c0, u0, p, lo, hi, ref, anchor, row_term,
        mp, mf, offset, max_distance, log2_scale, s0, s1, key0, D, BD, BN, BIAS, CAUSAL, GATES, MASKED, SIDED, TMA,
        PRECISION, 1, DBIAS, NB, DROPOUT,
    )  # fmt: skip
    dq, dpast, dfuture, dtable = _query_range(
        dq, dpast, dfuture, dtable, q, do, delta, lse, K, V, LINE, BUCKETS, LEVELS, AHEAD, FALLS, RESTS, FALLS_AHEAD,
        b, hk, k_base, v_base, stride_kt, stride_vt, nk, nq, start, sees, u0, n1, p, lo, hi, ref, anchor, row_term,
        mp, mf, offset, max_distance, log2_scale, s0, s1, key0, D, BD, BN, BIAS, CAUSAL, GATES, PAST, SIDED, TMA,
        PRECISION, STAGES, DBIAS, NB, DROPOUT,
    )  # fmt: skip
    close = n1
    if BIAS == DECAY and CAUSAL:
        close = tl.where(close_by(LEVELS, n1, n2, nk), n2, n1)
        dq, dpast, dfuture, dtable = _query_range(
            dq, dpast, dfuture, dtable, q, do, delta, lse, K, V, LINE, BUCKETS, LEVELS, AHEAD, FALLS, RESTS,
            FALLS_AHEAD, b, hk, k_base, v_base, stride_kt, stride_vt, nk, nq, start, sees, n1, close, p, lo, hi, ref,
            anchor, row_term, mp, mf, offset, max_distance, log2_scale, s0, s1, key0, D, BD, BN, BIAS, CAUSAL, GATES,
            CLOSE, SIDED, TMA, PRECISION, STAGES, DBIAS, NB, DROPOUT,
        )  # fmt: skip
    dq, dpast, dfuture, dtable = _query_range(
        dq, dpast, dfuture, dtable, q, do, delta, lse, K, V, LINE, BUCKETS, LEVELS, AHEAD, FALLS, RESTS, FALLS_AHEAD,
        b, hk, k_base, v_base, stride_kt, stride_vt, nk, nq, start, sees, close, n2, p, lo, hi, ref, anchor,
        row_term, mp, mf, offset, max_distance, log2_scale, s0, s1, key0, D, BD, BN, BIAS, CAUSAL, GATES, MASKED,
        SIDED, TMA, PRECISION, STAGES, DBIAS, NB, DROPOUT,
    )  # fmt: skip
    if not CAUSAL:
        dq, dpast, dfuture, dtable = _query_range(
            dq, dpast, dfuture, dtable, q, do, delta, lse, K, V, LINE, BUCKETS, LEVELS, AHEAD, FALLS, RESTS,
            FALLS_AHEAD, b, hk, k_base, v_base, stride_kt, stride_vt, nk, nq, start, sees, n2, u1, p, lo, hi, ref,
            anchor_ahead, row_term_ahead, mp, mf, offset, max_distance, log2_scale, s0, s1, key0, D, BD, BN, BIAS,
            CAUSAL, GATES, FUTURE, SIDED, TMA, PRECISION, STAGES, DBIAS, NB, DROPOUT,
        )  # fmt: skip
        dq, dpast, dfuture, dtable = _query_range(
            dq, dpast, dfuture, dtable, q, do, delta, lse, K, V, LINE, BUCKETS, LEVELS, AHEAD, FALLS, RESTS,
            FALLS_AHEAD, b, hk, k_base, v_base, stride_kt, stride_vt, nk, nq, start, sees, u1, c1, p, lo, hi, ref,
            anchor, row_term, mp, mf, offset, max_distance, log2_scale, s0, s1, key0, D, BD, BN, BIAS, CAUSAL, GATES,
            MASKED, SIDED, TMA, PRECISION, 1, DBIAS, NB, DROPOUT,
        )  # fmt: skip
    dq = tl.where(some[:, None], dq * scale, 0.0)
    store_rows(DQ, dq, row, dq_base, stride_dqt, nq, D, BD, BM)
    if DBIAS:
        partial = (b * H + h) * tl.num_programs(0) + tile
        if BIAS == LINEAR:
            tl.store(DSLOPES + partial, tl.sum(tl.where(some, dpast, 0.0), 0))
            if not CAUSAL:
                tl.store(DFUTURES + partial, tl.sum(tl.where(some, dfuture, 0.0), 0))
        if BIAS == BUCKET:
            tl.store(DTABLE + partial * NB + tl.arange(0, NB), dtable)
        if BIAS == DECAY:
            if GATES:
                tl.store(ROW_SUMS + at, tl.where(some, dpast, 0.0), mask=r < nq)
                if not CAUSAL:
                    tl.store(ROW_SUMS_AHEAD + at, tl.where(some, dfuture, 0.0), mask=r < nq)
            else:  # of ds times the bias
                tl.store(DSLOPES + partial, tl.sum(tl.where(some, dpast, 0.0), 0) * LN2)


@triton.jit
def _key_range(
    dk, dv, past, future, k, v, Q, DO, LSE, DELTA, TERMS, FIRST, LAST, LINE, LEVELS, AHEAD, FALLS, RESTS, GATE_FIRST,
    AHEAD_END, b, h, q_base, do_base, at, stride_qt, stride_dot, unit0, k0, nq, nk, first, end, j, start, sees, ref,
    anchor, own_term, mp, mf, offset, max_distance, log2_scale, s0, s1, query0, key0,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr,
    GATES: tl.constexpr, WINDOWS: tl.constexpr, SIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, BLIND: tl.constexpr, DBIAS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Take in the query tiles of one range. past, future: of gates, sums of ds over the queries that look back to
    each key, or ahead to it. TERMS, anchor, own_term: of a decay, on the side of this range."""
    tl.static_assert(SIDE != CLOSE or BM <= UNIT)
    if SIDE == CLOSE:  # the rows stand in the unit of the keys and in the next one, each counted from its unit's end
        next_unit = tl.min(j, 0) // UNIT * UNIT + UNIT
        far_end, own_end = among_keys(next_unit + UNIT - 1, nk), unit_end(next_unit - UNIT, nk)
        step, step_rest = halves(tl.load(LEVELS + far_end) - tl.load(LEVELS + own_end))
        own, own_rest = tl.load(FALLS + j)[:, None], tl.load(RESTS + j)[:, None]
    for row in tl.range(first, end, BM, num_stages=STAGES):
        r = row + tl.arange(0, BM)
        p = position(start, r, nk, max_distance, CAUSAL)
        q = load_rows(Q, b, h, row, q_base, stride_qt, nq, D, BD, BM, TMA)
        do = load_rows(DO, b, h, row, do_base, stride_dot, nq, D, BD, BM, TMA)
        if BIAS != DECAY or SIDE == MASKED or SIDE == CLOSE:
            lse = tl.load(LSE + at + r, mask=r < nq, other=float("inf"))
        delta = tl.load(DELTA + at + r, mask=r < nq, other=0.0)
        if SIDE == MASKED or SIDE == CLOSE:
            lo, hi, some = sight(
                r, nq, nk, start, sees, FIRST, LAST, unit0, GATE_FIRST, AHEAD_END, k0, CAUSAL, WINDOWS, GATES
            )
            if BLIND:  # what stands in queries that see nothing must not even be multiplied by zero
                q = tl.where(some[:, None], q, 0.0).to(q.dtype)
                do = tl.where(some[:, None], do, 0.0).to(do.dtype)
        s = tl.dot(k, q.T, input_precision=PRECISION) * log2_scale  # [BN, BM]
        if SIDE == MASKED or SIDE == CLOSE:
            seen = (j[:, None] >= lo[None, :]) & (j[:, None] < hi[None, :]) & some[None, :]
            if SIDE == CLOSE:
                at_key = among_keys(p, nk)
                fallen, rest = tl.zeros_like(r).to(tl.float32), tl.zeros_like(r).to(tl.float32)
                if row >= 0:
                    fallen, rest = tl.load(FALLS + at_key), tl.load(RESTS + at_key)
                fallen = tl.where(at_key >= next_unit, step, 0.0) - fallen
                rest = tl.where(at_key >= next_unit, step_rest, 0.0) - rest
                s += (own + fallen[None, :]) + (own_rest + rest[None, :])
            elif BIAS != NO_BIAS:
                s += full_bias(
                    LINE, LEVELS, AHEAD, p[None, :], j[:, None], nk, mp, mf, offset, max_distance, BIAS, CAUSAL
                )
            w = tl.exp2(tl.where(seen, s - lse[None, :], -float("inf")))
        elif BIAS == DECAY:
            # From the anchor of the keys to that of the tile's rows, and from there to each row, less its lse.
            if SIDE == PAST:
                between = query_term(LEVELS, AHEAD, start + row, nk, anchor, SIDE)
            else:
                between = query_term(LEVELS, AHEAD, start + tl.minimum(row + BM, nq) - 1, nk, anchor, SIDE)
            term = tl.load(TERMS + at + r, mask=r < nq, other=-float("inf")) + between
            s += own_term[:, None]
            w = tl.exp2(s + term[None, :])
        else:
            row, column = split_bias(LINE, p, j, ref, mp, mf, offset, max_distance, BIAS, SIDE)
            s += column[:, None]
            w = tl.exp2(s + (row - lse)[None, :])
        kept_w = w
        if DROPOUT > 0:
            r0, r1 = query_numbers(s0, s1, query0 + r)
            kept = is_kept(r0[None, :], r1[None, :], (key0 + j)[:, None], DROPOUT)
            kept_w = tl.where(kept, w, 0.0)
        dv = tl.dot(kept_w.to(do.dtype), do, dv, input_precision=PRECISION)
        dp = tl.dot(v, do.T, input_precision=PRECISION)
        if DROPOUT > 0:
            dp = tl.where(kept, dp * (ONE / (ONE - DROPOUT)), 0.0)
        ds = w * (dp - delta[None, :])
        if SIDE == MASKED or SIDE == CLOSE:
            ds = tl.where(seen, ds, 0.0)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        if DBIAS:
            if SIDE == PAST or CAUSAL:
                past += tl.sum(ds, 1)
            elif SIDE == FUTURE:
                future += tl.sum(ds, 1)
            else:
                later = j[:, None] > p[None, :]
                past += tl.sum(tl.where(later, 0.0, ds), 1)
                future += tl.sum(tl.where(later, ds, 0.0), 1)
    return dk, dv, past, future


@triton.jit
def _rows_up_to(BORDERS, limit, first, end, start, nk):
    """The first row of [first, end) whose border, which rises, lies beyond `limit`: `end` where none does."""
    low, high = first, tl.maximum(end, first)
    # Borders are rare: most of the time all rows are on one side of them.
    low = tl.where(tl.load(BORDERS + among_keys(start + high - 1, nk)) <= limit, high, low)
    high = tl.where(tl.load(BORDERS + among_keys(start + low, nk)) > limit, low, high)
    while low < high:
        middle = (low + high) // 2
        inside = tl.load(BORDERS + among_keys(start + middle, nk)) <= limit
        low = tl.where(inside, middle + 1, low)
        high = tl.where(inside, high, middle)
    return low


@triton.jit(do_not_specialize=["start", "stride_window"])
def key_kernel(
    Q, K, V, DO, LSE, DELTA, SEED, TERMS, TERMS_AHEAD, DK, DV, COLUMN_SUMS, COLUMN_SUMS_AHEAD, SLOPES, FUTURES, SEES,
    LINE, LEVELS, AHEAD, FALLS, RESTS, GATE_FIRST, AHEAD_END, FIRST, LAST, UNTIL, SINCE, SEQ, BLOCKS, ORDER, UNIT0,
    start, log2_scale, scale,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_dob, stride_doh, stride_dot, stride_dkb, stride_dkh, stride_dkt, stride_dvb, stride_dvh, stride_dvt,
    stride_slope, stride_level, stride_level_head, stride_window,
    H, group, Tq, Tk, offset, max_distance,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr,
    GATES: tl.constexpr, SIDED: tl.constexpr, WINDOWS: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    ORDERED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, BLIND: tl.constexpr,
    DBIAS: tl.constexpr, DROPOUT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    b = tl.program_id(1)
    hk = tl.num_programs(2) - 1 - tl.program_id(2)
    if ORDERED:  # where every head has keys of its own
        hk = tl.load(ORDER + hk)
    block, q0, nq, k0, nk, start = place(SEQ, BLOCKS, b, tile * BN // ROWS, Tq, Tk, start, CAUSAL, RAGGED, PACKED)
    key = block * ROWS + tile * BN % ROWS
    if key >= nk:
        return
    k_base = b.to(tl.int64) * stride_kb + hk.to(tl.int64) * stride_kh + k0.to(tl.int64) * stride_kt
    v_base = b.to(tl.int64) * stride_vb + hk.to(tl.int64) * stride_vh + k0.to(tl.int64) * stride_vt
    k = load_rows(K, b, hk, key, k_base, stride_kt, nk, D, BD, BN, TMA)
    v = load_rows(V, b, hk, key, v_base, stride_vt, nk, D, BD, BN, TMA)
    j = key + tl.arange(0, BN)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BD], tl.float32)
    key_last = tl.minimum(key + BN, nk) - 1
    near = max_distance if BIAS == BUCKET else 0
    for member in range(group):
        h = hk * group + member
        q_base = b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh + q0.to(tl.int64) * stride_qt
        do_base = b.to(tl.int64) * stride_dob + h.to(tl.int64) * stride_doh + q0.to(tl.int64) * stride_dot
        at = (b * H + h).to(tl.int64) * Tq + q0
        mp, mf = 0.0, 0.0
        line = LINE
        if BIAS == LINEAR:
            mp = tl.load(SLOPES + b * stride_slope + h) * 1.4426950408889634
            mf = tl.load(FUTURES + b * stride_slope + h) * 1.4426950408889634
        if BIAS == BUCKET:
            line += h * (2 * max_distance + 1)
        levels, ahead, gate_first, ahead_end = LEVELS, AHEAD, GATE_FIRST, AHEAD_END
        falls, rests = FALLS, RESTS
        anchor, own_term, anchor_ahead, own_term_ahead = 0.0, 0.0, 0.0, 0.0
        if BIAS == DECAY:
            level_at = b.to(tl.int64) * stride_level + h.to(tl.int64) * stride_level_head + k0
            levels += level_at
            if CAUSAL:
                falls += (b * H + h).to(tl.int64) * Tk + k0
                rests += (b * H + h).to(tl.int64) * Tk + k0
            else:
                ahead += level_at
            if GATES:
                gate_first += level_at
            if GATES and not CAUSAL:
                ahead_end += level_at
            anchor = tl.load(levels + key_last)
            own_term = -fall(levels, j, nk, anchor)
            if not CAUSAL:
                anchor_ahead = tl.load(ahead + key)
                own_term_ahead = fall(ahead, j, nk, anchor_ahead)
        past = tl.zeros([BN], tl.float32)
        future = tl.zeros([BN], tl.float32)
        s0, s1, query0, key0 = 0, 0, 0, 0
        if DROPOUT > 0:
            s0, s1, query0, key0 = head_numbers(SEED, b, h, H, q0, k0, PART)
        sees = sees_of(SEES, h, CAUSAL, SIDED)
        unit0 = (b * H + h) * stride_window
        until0 = (b * H + h) * stride_window + key // UNIT
        if PACKED:
            document = tl.load(BLOCKS + 2 * (tile * BN // ROWS))
            unit0 += tl.load(UNIT0 + document)
            until0 += tl.load(UNIT0 + document)
        # Rows that may see these keys: [r0, r1). In front of n1 they look ahead to all of them, from n2 on back.
        r0 = tl.maximum(key - start, 0) // BM * BM
        r1 = b * 0 + nq
        n2 = key_last - start + near
        if not CAUSAL:
            n1 = tl.maximum(key - near - start, 0) // BM * BM
            r0 = tl.where(sees == 1, r0, 0)
            r1 = tl.where(sees == 2, tl.maximum(tl.minimum(key_last - start + 1, nq), 0), nq)
        if WINDOWS:
            r1 = tl.minimum(r1, tl.load(UNTIL + until0) * UNIT)
            if not CAUSAL:
                r0 = tl.maximum(r0, tl.load(SINCE + until0) * UNIT // BM * BM)
        r1 = (tl.maximum(r1, r0) + BM - 1) // BM * BM
        n2 = tl.minimum(tl.maximum((tl.maximum(n2, 0) + BM - 1) // BM * BM, r0), r1)
        m0 = r0
        if not CAUSAL:
            if SIDED:
                n2 = tl.where(sees == 2, r1, n2)
            n1 = tl.where(sees == 1, r0, tl.minimum(tl.maximum(n1, r0), n2))
            if GATES:  # rows in front of a border see a part of these keys, those further in front none
                sees_some = _rows_up_to(ahead_end, k0 + key, r0, n1, start, nk)
                sees_all = _rows_up_to(ahead_end, k0 + key_last, sees_some, n1, start, nk)
                n0 = tl.minimum((sees_all + BM - 1) // BM * BM, n1)
                r0 = sees_some // BM * BM
                dk, dv, past, future = _key_range(
                    dk, dv, past, future, k, v, Q, DO, LSE, DELTA, TERMS, FIRST, LAST, line, levels, ahead, falls,
                    rests, gate_first, ahead_end, b, h, q_base, do_base, at, stride_qt, stride_dot, unit0, k0, nq,
                    nk, r0, n0, j, start, sees, key, anchor_ahead, own_term_ahead, mp, mf, offset, max_distance,
                    log2_scale, s0, s1, query0, key0, D, BD, BM, BIAS, CAUSAL, GATES, WINDOWS, MASKED, TMA,
                    PRECISION, STAGES, BLIND, DBIAS, DROPOUT,
                )  # fmt: skip
                r0 = n0
            dk, dv, past, future = _key_range(
                dk, dv, past, future, k, v, Q, DO, LSE, DELTA, TERMS_AHEAD, FIRST, LAST, line, levels, ahead, falls,
                rests, gate_first, ahead_end, b, h, q_base, do_base, at, stride_qt, stride_dot, unit0, k0, nq, nk,
                r0, n1, j, start, sees, key, anchor_ahead, own_term_ahead, mp, mf, offset, max_distance, log2_scale,
                s0, s1, query0, key0, D, BD, BM, BIAS, CAUSAL, GATES, WINDOWS, FUTURE, TMA, PRECISION, STAGES, BLIND,
                DBIAS, DROPOUT,
            )  # fmt: skip
            m0 = n1
        if BIAS == DECAY and CAUSAL:
            close = tl.where(close_by(levels, key, start + n2, nk), n2, m0)
            dk, dv, past, future = _key_range(
                dk, dv, past, future, k, v, Q, DO, LSE, DELTA, TERMS, FIRST, LAST, line, levels, ahead, falls, rests,
                gate_first, ahead_end, b, h, q_base, do_base, at, stride_qt, stride_dot, unit0, k0, nq, nk, m0, close,
                j, start, sees, key, anchor, own_term, mp, mf, offset, max_distance, log2_scale, s0, s1, query0, key0,
                D, BD, BM, BIAS, CAUSAL, GATES, WINDOWS, CLOSE, TMA, PRECISION, STAGES, BLIND, DBIAS, DROPOUT,
            )  # fmt: skip
            m0 = close
        dk, dv, past, future = _key_range(
            dk, dv, past, future, k, v, Q, DO, LSE, DELTA, TERMS, FIRST, LAST, line, levels, ahead, falls, rests,
            gate_first, ahead_end, b, h, q_base, do_base, at, stride_qt, stride_dot, unit0, k0, nq, nk, m0, n2, j,
            start, sees, key, anchor, own_term, mp, mf, offset, max_distance, log2_scale, s0, s1, query0, key0, D,
            BD, BM, BIAS, CAUSAL, GATES, WINDOWS, MASKED, TMA, PRECISION, STAGES, BLIND, DBIAS, DROPOUT,
        )  # fmt: skip
        n3 = r1
        if GATES:  # rows behind a border see a part of these keys, those further behind none
            rows = tl.minimum(r1, nq)
            if tl.load(gate_first + among_keys(start + rows - 1, nk)) > k0 + key:  # there is one
                sees_all = _rows_up_to(gate_first, k0 + key, n2, rows, start, nk)
                sees_some = _rows_up_to(gate_first, k0 + key_last, sees_all, rows, start, nk)
                n3 = tl.where(sees_all < rows, sees_all // BM * BM, r1)
                r1 = tl.where(sees_some < rows, (sees_some + BM - 1) // BM * BM, r1)
        dk, dv, past, future = _key_range(
            dk, dv, past, future, k, v, Q, DO, LSE, DELTA, TERMS, FIRST, LAST, line, levels, ahead, falls, rests,
            gate_first, ahead_end, b, h, q_base, do_base, at, stride_qt, stride_dot, unit0, k0, nq, nk, n2, n3, j,
            start, sees, key + BN, anchor, own_term, mp, mf, offset, max_distance, log2_scale, s0, s1, query0, key0,
            D, BD, BM, BIAS, CAUSAL, GATES, WINDOWS, PAST, TMA, PRECISION, STAGES, BLIND, DBIAS, DROPOUT,
        )  # fmt: skip
        if GATES:
            dk, dv, past, future = _key_range(
                dk, dv, past, future, k, v, Q, DO, LSE, DELTA, TERMS, FIRST, LAST, line, levels, ahead, falls, rests,
                gate_first, ahead_end, b, h, q_base, do_base, at, stride_qt, stride_dot, unit0, k0, nq, nk, n3, r1,
                j, start, sees, key, anchor, own_term, mp, mf, offset, max_distance, log2_scale, s0, s1, query0,
                key0, D, BD, BM, BIAS, CAUSAL, GATES, WINDOWS, MASKED, TMA, PRECISION, STAGES, BLIND, DBIAS, DROPOUT,
            )  # fmt: skip
        if DBIAS:
            sums_at = (b * H + h).to(tl.int64) * Tk + k0 + j
            tl.store(COLUMN_SUMS + sums_at, past, mask=j < nk)
            if not CAUSAL:
                tl.store(COLUMN_SUMS_AHEAD + sums_at, future, mask=j < nk)
    dk_base = b.to(tl.int64) * stride_dkb + hk.to(tl.int64) * stride_dkh + k0.to(tl.int64) * stride_dkt
    dv_base = b.to(tl.int64) * stride_dvb + hk.to(tl.int64) * stride_dvh + k0.to(tl.int64) * stride_dvt
    if DROPOUT > 0:
        dv *= ONE / (ONE - DROPOUT)
    store_rows(DK, dk * scale, key, dk_base, stride_dkt, nk, D, BD, BN)
    store_rows(DV, dv, key, dv_base, stride_dvt, nk, D, BD, BN)
