"""Which keys can matter, on the GPU: first and one-past-last key unit of every query unit, in three small kernels.

The proof is that of docs/attention.md, with bounds that need no pass over pairs. In nats, for a query of length
x = scale |q| at position p, and keys counted from their sequence's centre:

    what is skipped   sum over j < f of exp(score)  <=  exp(x K + m (f - 1 - p)) / (1 - e^-m)
    what is there     log-sum-exp  >=  ln sum over runs of R near keys of R exp(scale q.mean - m mean distance)

K is not the largest norm but an effective one. Over a unit of keys with weights w_j = e^(m j) / sum, the function
x -> ln sum w_j exp(x n_j) is convex and zero at zero, so below any X it lies under its chord: at most x K with
K = ln sum w_j exp(X n_j) / X. Beyond X it rises by at most the largest norm. X is taken from a sample of queries.
This says nothing of a part of a unit, so f is a multiple of it.

    sample_kernel    the centre of the keys, and X, from a few rows
    bounds_kernel    reads k once: K and the largest norm of each unit of keys, means of runs
    search_kernel    reads q once: the first and last unit that each query unit cannot do without

After the forward pass, which finds narrower ones (see forward.py), comes one more for the backward pass:

    order_kernel     makes them rise with the query, and turns them round: which query units visit a key unit

A number that is not finite, anywhere, means: visit everything.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trainshort.attention.triton.tiles import FAR, ROWS, UNIT, load_rows, place, sees_of

SAMPLE = tl.constexpr(32)  # rows
RUNS = tl.constexpr(32)  # runs of near keys that are looked at
STEEP = tl.constexpr(0.09)  # slopes from here on have runs of 8 keys, gentler ones of 32


@triton.jit
def _lengths(rows, D: tl.constexpr):
    """Lengths of rows, never less than they are: slack for the rounding of the sum, and for what underflows."""
    return tl.sqrt(tl.sum(rows * rows, 1)) * (1.0 + (D + 8) * 1.1920929e-7) + D * 1.0842022e-19


@triton.jit
def _sample(X, base, first, n, stride, D: tl.constexpr, BD: tl.constexpr):
    """A few rows of a sequence, evenly spaced: [SAMPLE, BD]."""
    d = tl.arange(0, BD)
    rows = first + tl.arange(0, SAMPLE).to(tl.int64) * n // SAMPLE
    inside = (rows < first + n)[:, None] & (d < D)[None, :]
    return tl.load(X + base + rows[:, None] * stride + d[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _run_length(SLOPES, FUTURES, b, hk, stride_slope, group):
    """Keys of a run, for all heads that share their keys: few for steep slopes."""
    steepest = b * 0.0
    for member in range(group):
        at = b * stride_slope + hk * group + member
        steepest = tl.maximum(steepest, tl.maximum(tl.load(SLOPES + at), tl.load(FUTURES + at)))
    return tl.where(steepest > STEEP, 8, 32)


@triton.jit
def _units(values):
    """[ROWS] -> [units, UNIT]"""
    return values.reshape(ROWS // UNIT, UNIT)


@triton.jit
def _effective(n, norm, inside, x, m, away):
    """K of each unit: ln of the mean of exp(x n), weighted by exp(-m away), over x. n: [units, UNIT]."""
    weight = tl.maximum(tl.exp(-m * away.to(tl.float32)), 1e-30)[
        None, :
    ]  # an outlier must not vanish with its weight
    mean = tl.sum(tl.where(inside, weight * tl.exp(x * (n - norm[:, None])), 0.0), 1) / tl.sum(weight, 1)
    effective = norm + tl.log(mean) / x
    return tl.where(effective <= norm, effective, norm)  # NaN as well


@triton.jit(do_not_specialize=["start"])
def sample_kernel(
    Q, K, CENTER, COMMON, REACH, SEQ, start, scale,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, H, Hk, group, Tq, Tk,
    D: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    hk = tl.program_id(1)
    b = sequence * 0 if PACKED else sequence
    q0, nq, k0, nk = b * 0, Tq, b * 0, b * 0 + Tk
    if RAGGED or PACKED:
        at = SEQ + 5 * sequence
        q0, nq, k0, nk, start = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    if CAUSAL:
        nk = tl.maximum(tl.minimum(nk, start + nq), 0)
    d = tl.arange(0, BD)
    sample = _sample(K, b.to(tl.int64) * stride_kb + hk.to(tl.int64) * stride_kh, k0, nk, stride_kt, D, BD)
    center = tl.sum(sample, 0) / SAMPLE
    # Worth taking off where it is a good part of the keys; the mean of keys that have nothing in common is noise.
    length = tl.sum(center * center, 0)
    alike = length > 0.1 * tl.sum(tl.sum(sample * sample, 1), 0) / SAMPLE
    tl.store(CENTER + (sequence * Hk + hk) * D + d, tl.where(alike, center, 0.0), mask=d < D)
    tl.store(COMMON + sequence * Hk + hk, tl.where(alike, tl.sqrt(length), 0.0))
    for member in range(group):
        h = hk * group + member
        sample = _sample(Q, b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh, q0, nq, stride_qt, D, BD)
        x = tl.max(tl.sqrt(tl.sum(sample * sample, 1)), 0) * tl.abs(scale)
        tl.store(REACH + sequence * H + h, tl.where((x > 1e-6) & (x < 1e30), x, 1e-6))


@triton.jit(do_not_specialize=["start"])
def bounds_kernel(
    K, SLOPES, FUTURES, CENTER, REACH, NORM, PASTS, AHEADS, MEANS, SEQ, BLOCKS, start,
    stride_kb, stride_kh, stride_kt, stride_slope, H, Hk, group, Tq, Tk, blocks,
    D: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, RUN_ROWS: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    b = tl.program_id(1)
    hk = tl.program_id(2)
    block, _q0, _nq, k0, nk, _s = place(SEQ, BLOCKS, b, entry, Tq, Tk, start, CAUSAL, RAGGED, PACKED)
    sequence = tl.load(BLOCKS + 2 * entry) if PACKED else b
    row = block * ROWS
    if row >= nk:
        return
    d = tl.arange(0, BD)
    r = tl.arange(0, ROWS)
    base = b.to(tl.int64) * stride_kb + hk.to(tl.int64) * stride_kh + k0.to(tl.int64) * stride_kt
    k = load_rows(K, b, hk, row, base, stride_kt, nk, D, BD, ROWS, TMA)
    center = tl.load(CENTER + (sequence * Hk + hk) * D + d, mask=d < D, other=0.0)
    # Sums over runs as a product with zeros and ones, which is exact; of an unfinished run nothing is used.
    R = _run_length(SLOPES, FUTURES, b, hk, stride_slope, group)
    run = tl.arange(0, RUN_ROWS)
    member_of = (r[None, :] // R == run[:, None]).to(k.dtype)
    mean = tl.dot(member_of, k, input_precision=PRECISION) / R.to(tl.float32) - center[None, :]
    at = (b * Hk + hk).to(tl.int64) * blocks * (ROWS // 8) + block * ((R * 0 + ROWS) // R) + run
    if PACKED:
        at += (entry - block).to(tl.int64) * (ROWS // 8)
    tl.store(
        MEANS + at[:, None] * D + d[None, :], mean.to(k.dtype), mask=(run * R < ROWS)[:, None] & (d < D)[None, :]
    )

    inside = _units(row + r < nk)
    n = _units(_lengths(k.to(tl.float32) - center[None, :], D))
    norm = tl.max(tl.where(inside, tl.where(n < 1e30, n, float("inf")), 0.0), 1)  # NaN compares false
    unit = entry * (ROWS // UNIT) + tl.arange(0, ROWS // UNIT)
    units = blocks * (ROWS // UNIT)
    step = tl.arange(0, UNIT)
    tl.store(NORM + (b * Hk + hk) * units + unit, norm)
    for member in range(group):
        h = hk * group + member
        x = tl.load(REACH + sequence * H + h)
        at_head = (b * H + h) * units + unit
        mp = tl.load(SLOPES + b * stride_slope + h)
        tl.store(PASTS + at_head, _effective(n, norm, inside, x, mp, -step + (UNIT - 1)))
        if not CAUSAL:
            mf = tl.load(FUTURES + b * stride_slope + h)
            tl.store(AHEADS + at_head, _effective(n, norm, inside, x, mf, step))


@triton.jit(do_not_specialize=["start"])
def search_kernel(
    Q, SLOPES, FUTURES, SEES, REACH, COMMON, NORM, PASTS, AHEADS, MEANS, FIRST, LAST, SEQ, BLOCKS, UNIT0,
    start, scale, budget,
    stride_qb, stride_qh, stride_qt, stride_slope, stride_window,
    H, Hk, group, Tq, Tk, blocks, offset,
    D: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr, SIDED: tl.constexpr, RAGGED: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, COARSE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    b = tl.program_id(1)
    h = tl.program_id(2)
    hk = h // group
    block, q0, nq, _k0, nk, start = place(SEQ, BLOCKS, b, entry, Tq, Tk, start, CAUSAL, RAGGED, PACKED)
    sequence = tl.load(BLOCKS + 2 * entry) if PACKED else b
    if block * ROWS >= nq:
        return
    d = tl.arange(0, BD)
    sees = sees_of(SEES, h, CAUSAL, SIDED)
    mp = tl.load(SLOPES + b * stride_slope + h)
    mf = tl.load(FUTURES + b * stride_slope + h)
    base = b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh + q0.to(tl.int64) * stride_qt
    R = _run_length(SLOPES, FUTURES, b, hk, stride_slope, group)
    outer = -((R * 0 + ROWS) // R) + RUNS  # runs that do not lie among the queries themselves
    before = outer if CAUSAL else outer // 2
    means = (b * Hk + hk).to(tl.int64) * blocks * (ROWS // 8)
    entry0 = entry - block if PACKED else b * 0
    row = block * ROWS
    origin = start + row  # positions are counted from here, so that float32 holds them exactly
    i = tl.arange(0, ROWS)
    p = origin + i
    q = load_rows(Q, b, h, row, base, stride_qt, nq, D, BD, ROWS, TMA)
    means += entry0.to(tl.int64) * (ROWS // 8)

    # What could be missed: the longest keys on either side of these queries.
    common = tl.load(COMMON + sequence * Hk + hk)
    X = tl.load(REACH + sequence * H + h)
    reach_unit = tl.minimum(tl.maximum(origin + ROWS - 1, 0), tl.maximum(nk - 1, 0)) // UNIT
    norms = NORM + ((b * Hk + hk) * blocks + entry0) * (ROWS // UNIT)
    pasts = PASTS + ((b * H + h) * blocks + entry0) * (ROWS // UNIT)
    key_units = (nk + UNIT - 1) // UNIT
    norm, past = b * 0.0, b * 0.0
    for chunk in range(0, reach_unit + 1, CHUNK):
        index = chunk + tl.arange(0, CHUNK)
        norm = tl.maximum(norm, tl.max(tl.load(norms + index, mask=index <= reach_unit, other=0.0), 0))
        past = tl.maximum(past, tl.max(tl.load(pasts + index, mask=index <= reach_unit, other=0.0), 0))
    outlier = past > 1.1 * tl.load(pasts + reach_unit)
    longest = norm
    norm_ahead, ahead = b * 0.0, b * 0.0
    if not CAUSAL:
        aheads = AHEADS + ((b * H + h) * blocks + entry0) * (ROWS // UNIT)
        from_unit = tl.minimum(tl.maximum(origin, 0), tl.maximum(nk - 1, 0)) // UNIT
        for chunk in range(from_unit, key_units, CHUNK):
            index = chunk + tl.arange(0, CHUNK)
            norm_ahead = tl.maximum(norm_ahead, tl.max(tl.load(norms + index, mask=index < key_units, other=0.0), 0))
            ahead = tl.maximum(ahead, tl.max(tl.load(aheads + index, mask=index < key_units, other=0.0), 0))
        longest = tl.maximum(norm, norm_ahead)
    past_tail = tl.where(mp < 1e-4, -tl.log(mp) + mp, -tl.log(1.0 - tl.exp(-mp)))
    future_tail = tl.where(mf < 1e-4, -tl.log(mf) + mf, -tl.log(1.0 - tl.exp(-mf)))
    unit0 = (b * H + h) * stride_window
    if PACKED:
        unit0 += tl.load(UNIT0 + sequence)
    unit = tl.arange(0, ROWS // UNIT)

    # What is there: runs of R near keys.
    run = tl.minimum(tl.maximum(origin, 0), nk) // R - before + tl.arange(0, RUNS)
    whole = (run >= 0) & ((run + 1) * R <= nk)
    inside = whole[:, None] & (d < D)[None, :]
    mean = tl.load(MEANS + (means + run)[:, None] * D + d[None, :], mask=inside, other=0.0)
    score = tl.dot(q, mean.T, input_precision=PRECISION) * scale
    wide = q.to(tl.float32)
    x = _lengths(wide, D) * tl.abs(scale)
    away = (i - 0.5 * (R - 1))[:, None] - (run * R - origin)[None, :].to(tl.float32)
    usable = whole[None, :] & ((run * R + R - 1)[None, :] <= p[:, None])
    cost = mp * away
    if not CAUSAL:
        usable = usable & (sees != 2)
        after = whole[None, :] & ((run * R)[None, :] > p[:, None]) & (sees != 1)
        cost = tl.where(after, mf * (-away - offset), cost)
        usable = usable | after
    gain = tl.where(usable, score - cost, -float("inf"))
    top = tl.max(gain, 1)
    top = tl.where(top > -float("inf"), top, 0.0)
    near = top + tl.log(tl.sum(tl.exp(gain - top[:, None]), 1) * R)  # -inf where there is none
    # Rounding: of the products, and of the means to the keys' own dtype.
    near -= x * ((D + 40) * 1.1920929e-7 * (longest + 2.0 * common) + COARSE * longest) + 0.002
    x = tl.where((x < 1e30) & (near > -1e30), x, float("inf"))

    hi = tl.zeros_like(p) + nk
    lo = tl.zeros_like(p)
    hi = tl.where(sees == 1, tl.minimum(hi, p + 1), hi)
    lo = tl.where(sees == 2, tl.maximum(lo, p), lo)
    some = (row + i < nq) & (hi > lo)
    kept = row + unit * UNIT < nq

    # Keys before `first` hold too little: by row with one K for all units,
    stretch = tl.where(x <= X, x * past, X * past + (x - X) * norm)
    first = i.to(tl.float32) - (stretch * 1.000001 - near + budget + past_tail + 0.01) / mp
    first = tl.where((first > -16777216.0) & (first < 16777216.0), tl.floor(first).to(tl.int32), -FAR)
    first = tl.where(some, tl.maximum(origin + first, 0), FAR)
    best = tl.min(_units(first), 1) // UNIT
    # and, where some unit's K stands out, by query unit with each key unit's own: an outlier counts where it is.
    if outlier:
        most = tl.max(_units(tl.where(some, x, 0.0)), 1)
        least = tl.min(_units(tl.where(some, near + mp * i.to(tl.float32), float("inf"))), 1)
        step_cost = mp * UNIT * 0.5  # of the decay from unit to unit, half is for the sum over units
        within = tl.log(1.0 - tl.exp(-mp * UNIT)) + past_tail
        within = tl.where(mp * UNIT < 1e-3, tl.log(UNIT * 1.0) + 0.001, within)
        series = tl.where(step_cost < 1e-4, -tl.log(step_cost) + step_cost, -tl.log(1.0 - tl.exp(-step_cost)))
        spare = least - budget - series - within - 0.01
        allowed = tl.zeros_like(unit) + FAR
        for chunk in range(0, reach_unit + 1, CHUNK):
            index = chunk + tl.arange(0, CHUNK)
            own_norm = tl.load(norms + index, mask=index <= reach_unit, other=0.0)
            own_past = tl.load(pasts + index, mask=index <= reach_unit, other=0.0)
            reach = tl.where(
                most[:, None] <= X,
                most[:, None] * own_past[None, :],
                X * own_past[None, :] + (most[:, None] - X) * own_norm[None, :],
            )
            end = (index * UNIT + UNIT - 1 - origin).to(tl.float32)
            rounding = 1e-6 * (reach + mp * tl.abs(end)[None, :])
            room = (spare[:, None] - reach - (mp * end)[None, :] - rounding) / step_cost
            room = tl.where((room > 0.0) & (room < 16777216.0), room, tl.where(room > 0.0, 16777216.0, -1.0))
            unit_end = index[None, :] + 1 + tl.floor(room * 0.9999).to(tl.int32)
            unit_end = tl.where(room >= 0.0, unit_end, index[None, :])
            unit_end = tl.where((index <= reach_unit)[None, :], unit_end, FAR)
            allowed = tl.minimum(allowed, tl.min(unit_end, 1))
        best = tl.maximum(best, tl.minimum(allowed, key_units))
    best = tl.where(sees == 2, 0, tl.minimum(best, key_units))
    tl.store(FIRST + unit0 + row // UNIT + unit, best, mask=kept)
    if not CAUSAL:
        stretch = tl.where(x <= X, x * ahead, X * ahead + (x - X) * norm_ahead)
        last = i.to(tl.float32) + (stretch * 1.000001 - near + budget + future_tail + 0.01) / mf + offset
        last = tl.where((last > -16777216.0) & (last < 16777216.0), tl.ceil(last).to(tl.int32) + 1, FAR)
        last = tl.where(some, tl.minimum(origin + last, FAR), 0)
        best = (tl.minimum(tl.max(_units(last), 1), nk) + UNIT - 1) // UNIT
        best = tl.where(sees == 1, key_units, tl.maximum(best, 0))
        tl.store(LAST + unit0 + row // UNIT + unit, best, mask=kept)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _count(sorted_values, n, key, b):
    """How many of n values in rising order are at most `key`."""
    low = tl.zeros_like(key)
    high = tl.zeros_like(key) + n
    size = b * 0 + n
    while size > 0:
        middle = (low + high) // 2
        undecided = low < high
        below = tl.load(sorted_values + middle, mask=undecided, other=0) <= key
        low = tl.where(undecided & below, middle + 1, low)
        high = tl.where(undecided & ~below, middle, high)
        size = size // 2
    return low


@triton.jit
def order_kernel(
    FOUND_FIRST, FOUND_LAST, FIRST, LAST, UNTIL, SINCE, SEQ, UNIT0, stride_found, stride_window, H, Tq, Tk,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """FIRST and LAST from what the forward pass found, in PARTS of a unit, made to rise with the query: so that query
    units [SINCE, UNTIL) are those that visit a key unit."""
    sequence = tl.program_id(0)
    h = tl.program_id(1)
    b = sequence * 0 if PACKED else sequence
    nq, nk = Tq, Tk
    if RAGGED or PACKED:
        nq, nk = tl.load(SEQ + 5 * sequence + 1), tl.load(SEQ + 5 * sequence + 3)
    at = (b * H + h) * stride_window
    found_at = (b * H + h) * stride_found
    if PACKED:
        at += tl.load(UNIT0 + sequence)
        found_at += tl.load(UNIT0 + sequence) * PARTS
    units = (nq + UNIT - 1) // UNIT
    found_count = (nq + UNIT // PARTS - 1) // (UNIT // PARTS)
    key_units = (nk + UNIT - 1) // UNIT
    chunks = (units + CHUNK - 1) // CHUNK
    carry = b * 0 + FAR
    for back in range(chunks):
        index = (chunks - 1 - back) * CHUNK + tl.arange(0, CHUNK)
        value = tl.zeros_like(index) + key_units
        for part in tl.static_range(PARTS):
            place_found = index * PARTS + part
            found = tl.load(FOUND_FIRST + found_at + place_found, mask=place_found < found_count, other=FAR)
            value = tl.minimum(value, found)
        value = tl.minimum(tl.associative_scan(value, 0, _smaller, reverse=True), carry)
        carry = tl.min(value, 0)
        tl.store(FIRST + at + index, value, mask=index < units)
    if not CAUSAL:
        carry = b * 0
        for chunk in range(chunks):
            index = chunk * CHUNK + tl.arange(0, CHUNK)
            value = tl.zeros_like(index)
            for part in tl.static_range(PARTS):
                place_found = index * PARTS + part
                found = tl.load(FOUND_LAST + found_at + place_found, mask=place_found < found_count, other=0)
                value = tl.maximum(value, found)
            value = tl.maximum(tl.associative_scan(value, 0, _larger), carry)
            carry = tl.max(value, 0)
            tl.store(LAST + at + index, value, mask=index < units)
    tl.debug_barrier()
    for chunk in range((key_units + CHUNK - 1) // CHUNK):
        key = chunk * CHUNK + tl.arange(0, CHUNK)
        tl.store(UNTIL + at + key, _count(FIRST + at, units, key, b), mask=key < key_units)
        if not CAUSAL:
            tl.store(SINCE + at + key, _count(LAST + at, units, key, b), mask=key < key_units)
