"""Which keys can matter, on the GPU.

The proof is that of docs/proof.md, with bounds that need no pass over pairs. In nats, for a slope m, a query of
length x = scale |q| at position p, and keys counted from their sequence's centre:

    what is skipped   sum over j < f of exp(score)  <=  exp(x K + m (f - 1 - p)) / (1 - e^-m)
    what is there     log-sum-exp  >=  log-sum-exp over the nearest keys, which the forward pass visits first

K is not the largest norm but an effective one. Over a unit of keys with weights w_j = e^(m j) / sum, the function
x -> ln sum w_j exp(x n_j) is convex and zero at zero, so below any X it lies under its chord: at most x K with
K = ln sum w_j exp(X n_j) / X. Beyond X it rises by at most the largest norm. X is taken from a sample of queries.
This says nothing of a part of a unit, so f is a multiple of it.

Under a decay -c_j stands for m j, and all keys up to a unit are weighed together: `_running_sums`, and the README.

    falls_kernel      of a decay: c of every key, counted from an end of its unit
    sample_kernel     the centre of the keys, and X, from a few rows
    bounds_kernel     reads k once: K and the largest norm of each unit of keys
    largest_kernel    the largest of these up to each unit, and from each unit on
    first_needed      inside the forward pass: the first unit that its queries cannot do without, and last_needed
    first_needed_by_levels, last_needed_by_levels   the same for a decay
    order_kernel      after it, for the backward pass: makes what the forward pass found rise with the query, and
                      turns it round: which query units visit a key unit

A number that is not finite, anywhere, means: visit everything. Scratch memory, of which the forward pass reads most:

    QUERY_NORM              X, by sequence and head
    CENTER COMMON           the centre of the keys, and its length, by sequence and key head
    NORM NORM_PAST NORM_AHEAD   by unit and key head: the largest norm, and the largest up to here and from here on
    PASTS MOST_PAST         by unit and head: K for queries behind the unit, and the largest up to here
    AHEADS MOST_AHEAD       the same for queries in front of it, and the largest from here on
    REACH_PAST REACH_AHEAD  of a decay, by unit and head: ln of the sum of e^(c_U - c_j) over all keys up to it, or
                            from it on, with c_U that of its key nearest to the queries; K is then that of them all
    FROM TO                 by part of a query unit: the key units that the forward pass visited
    FOUND_FIRST FOUND_LAST  and those of them that mattered
"""

from __future__ import annotations

import triton
import triton.language as tl

from trainshort.ops.triton.tiles import DECAY, FAR, ROWS, UNIT, extent, halves, load_rows, place, unit_end

SAMPLE = tl.constexpr(32)  # rows
CHUNK = tl.constexpr(128)  # units that are looked at together
ROUNDING = tl.constexpr(2.0**-20)  # of a few operations in float32, relative
UNDERFLOW = tl.constexpr(2.0**-63)  # the square of a smaller number is lost in float32


@triton.jit
def lengths(rows, D: tl.constexpr):
    """Lengths of rows, never less than they are: slack for the rounding of the sum, and for what underflows."""
    return tl.sqrt(tl.sum(rows * rows, 1)) * (1.0 + (D + 8) * 1.1920929e-7) + D * UNDERFLOW


@triton.jit
def _sample(X, base, first, n, stride, D: tl.constexpr, BD: tl.constexpr):
    """A few rows of a sequence, evenly spaced: [SAMPLE, BD]."""
    d = tl.arange(0, BD)
    rows = first + tl.arange(0, SAMPLE).to(tl.int64) * n // SAMPLE
    inside = (rows < first + n)[:, None] & (d < D)[None, :]
    return tl.load(X + base + rows[:, None] * stride + d[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _units(values):
    """[ROWS] -> [units, UNIT]"""
    return values.reshape(ROWS // UNIT, UNIT)


@triton.jit
def _effective(n, norm, inside, x, slope, away):
    """K of each unit: ln of the mean of exp(x n), weighted by exp(-slope away), over x. n: [units, UNIT]."""
    # An outlier must not vanish with its weight.
    weight = tl.maximum(tl.exp(-slope * away.to(tl.float32)), 1e-30)[None, :]
    mean = tl.sum(tl.where(inside, weight * tl.exp(x * (n - norm[:, None])), 0.0), 1) / tl.sum(weight, 1)
    effective = norm + tl.log(mean) / x
    return tl.where(effective <= norm, effective, norm)  # NaN as well


@triton.jit
def _log_sum(exponent, inside):
    """ln of the sum of exp(exponent) of each unit, infinite where one is. Units without keys: NaN, never read."""
    most = tl.max(tl.where(inside, exponent, -float("inf")), 1)
    total = tl.log(tl.sum(tl.where(inside, tl.exp(exponent - most[:, None]), 0.0), 1))
    return tl.where(most < float("inf"), most + total, float("inf"))


@triton.jit
def _weigh_units(LEVELS, n, inside, keys, nearest, x, nk):
    """Of each unit, ln of the sum over its keys of e^-away and of e^(x n - away), with away the fall of c between a
    key and that of the unit which is nearest to the queries. keys: positions, [ROWS]; nearest: [units]."""
    level = _units(tl.load(LEVELS + keys, mask=keys < nk, other=0.0))
    away = tl.abs(level - tl.load(LEVELS + nearest)[:, None]).to(tl.float32)
    # Each product and difference is rounded to 2^-24 of itself.
    longest = tl.where(n < 1e30, x * n * (1.0 + ROUNDING), float("inf"))  # NaN compares false
    weighed = longest - away * (1.0 - ROUNDING)
    return _log_sum(-away, inside), _log_sum(weighed, inside)


@triton.jit(do_not_specialize=["start"])
def falls_kernel(
    LEVELS, AHEAD, FALLS, RESTS, FALLS_AHEAD, SEQ, BLOCKS, start, stride_level, stride_level_head, H, Tq, Tk,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """For the others, which read a key many times: differences in float64 are dear, and so is to round them."""
    b = tl.program_id(1)
    h = tl.program_id(2)
    block, _q0, _nq, k0, nk, _s = place(SEQ, BLOCKS, b, tl.program_id(0), Tq, Tk, start, CAUSAL, RAGGED, PACKED)
    j = block * ROWS + tl.arange(0, ROWS)
    begin = j // UNIT * UNIT
    inside = j < nk
    level_at = b.to(tl.int64) * stride_level + h.to(tl.int64) * stride_level_head + k0
    at = (b * H + h).to(tl.int64) * Tk + k0 + j
    last = tl.load(LEVELS + level_at + unit_end(begin, nk), mask=inside, other=0.0)
    high, low = halves(last - tl.load(LEVELS + level_at + j, mask=inside, other=0.0))
    tl.store(FALLS + at, high, mask=inside)
    if CAUSAL:
        tl.store(RESTS + at, low, mask=inside)
    else:
        first = tl.load(AHEAD + level_at + begin, mask=inside, other=0.0)
        high, _low = halves(tl.load(AHEAD + level_at + j, mask=inside, other=0.0) - first)
        tl.store(FALLS_AHEAD + at, high, mask=inside)


@triton.jit(do_not_specialize=["start"])
def sample_kernel(
    Q, K, CENTER, COMMON, QUERY_NORM, SEQ, start, scale,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, H, Hk, group, Tq, Tk,
    D: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    hk = tl.program_id(1)
    b = sequence * 0 if PACKED else sequence
    q0, nq, k0, nk, _s = extent(SEQ, sequence, Tq, Tk, start, CAUSAL, RAGGED or PACKED)
    d = tl.arange(0, BD)
    sample = _sample(K, b.to(tl.int64) * stride_kb + hk.to(tl.int64) * stride_kh, k0, nk, stride_kt, D, BD)
    center = tl.sum(sample, 0) / SAMPLE
    # Worth taking off where it is a good part of the keys; the mean of keys that have nothing in common is noise.
    length = tl.sum(center * center, 0)
    alike = length > 0.1 * tl.sum(tl.sum(sample * sample, 1), 0) / SAMPLE
    tl.store(CENTER + (sequence * Hk + hk) * D + d, tl.where(alike, center, 0.0), mask=d < D)
    common = tl.sqrt(length) * (1.0 + (D + 8) * 1.1920929e-7) + D * UNDERFLOW
    tl.store(COMMON + sequence * Hk + hk, tl.where(alike, common, 0.0))
    for member in range(group):
        h = hk * group + member
        sample = _sample(Q, b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh, q0, nq, stride_qt, D, BD)
        x = tl.max(tl.sqrt(tl.sum(sample * sample, 1)), 0) * tl.abs(scale)
        tl.store(QUERY_NORM + sequence * H + h, tl.where((x > 1e-6) & (x < 1e30), x, 1e-6))


@triton.jit(do_not_specialize=["start", "blocks"])
def bounds_kernel(
    K, SLOPES, FUTURES, LEVELS, AHEAD, CENTER, QUERY_NORM, NORM, PASTS, AHEADS, REACH_PAST, REACH_AHEAD, SEQ, BLOCKS,
    start, stride_kb, stride_kh, stride_kt, stride_slope, stride_level, stride_level_head,
    H, Hk, group, Tq, Tk, blocks,
    D: tl.constexpr, BD: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    PACKED: tl.constexpr, TMA: tl.constexpr,
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
    inside = _units(row + r < nk)
    n = _units(lengths(k.to(tl.float32) - center[None, :], D))
    norm = tl.max(tl.where(inside, tl.where(n < 1e30, n, float("inf")), 0.0), 1)  # NaN compares false
    unit = entry * (ROWS // UNIT) + tl.arange(0, ROWS // UNIT)
    units = blocks * (ROWS // UNIT)
    step = tl.arange(0, UNIT)
    tl.store(NORM + (b * Hk + hk) * units + unit, norm)
    for member in range(group):
        h = hk * group + member
        x = tl.load(QUERY_NORM + sequence * H + h)
        at_head = (b * H + h) * units + unit
        if BIAS == DECAY:
            level_at = b.to(tl.int64) * stride_level + h.to(tl.int64) * stride_level_head + k0
            begin = row + tl.arange(0, ROWS // UNIT) * UNIT
            reach, past = _weigh_units(LEVELS + level_at, n, inside, row + r, unit_end(begin, nk), x, nk)
            tl.store(REACH_PAST + at_head, reach)
            tl.store(PASTS + at_head, past)
            if not CAUSAL:
                nearest = tl.minimum(begin, nk - 1)
                reach, ahead = _weigh_units(AHEAD + level_at, n, inside, row + r, nearest, x, nk)
                tl.store(REACH_AHEAD + at_head, reach)
                tl.store(AHEADS + at_head, ahead)
        else:
            past_slope = tl.load(SLOPES + b * stride_slope + h)
            tl.store(PASTS + at_head, _effective(n, norm, inside, x, past_slope, -step + (UNIT - 1)))
            if not CAUSAL:
                future_slope = tl.load(FUTURES + b * stride_slope + h)
                tl.store(AHEADS + at_head, _effective(n, norm, inside, x, future_slope, step))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _running_largest(VALUES, MOST, n, b, BACK: tl.constexpr, TOGETHER: tl.constexpr):
    """Of n values, none negative: the largest up to each, or from each on."""
    carry = b * 0.0
    chunks = (n + TOGETHER - 1) // TOGETHER
    for chunk in range(chunks):
        at = chunk
        if BACK:
            at = chunks - 1 - chunk
        index = at * TOGETHER + tl.arange(0, TOGETHER)
        value = tl.load(VALUES + index, mask=index < n, other=0.0)
        value = tl.maximum(tl.associative_scan(value, 0, _larger, reverse=BACK), carry)
        carry = tl.max(value, 0)
        tl.store(MOST + index, value, mask=index < n)


@triton.jit
def _log_add(a, b):
    most = tl.maximum(a, b)
    total = most + tl.log(1.0 + tl.exp(tl.minimum(a, b) - most))
    return tl.where((most > -float("inf")) & (most < float("inf")), total, most)


@triton.jit
def _joined(fall_a, reach_a, weight_a, fall_b, reach_b, weight_b):
    """Two stretches of units as one: what c falls over it, and two ln sums as seen from the end of b."""
    return fall_a + fall_b, _log_add(reach_a - fall_b, reach_b), _log_add(weight_a - fall_b, weight_b)


@triton.jit
def _running_sums(LEVELS, REACH, WEIGHTS, MOST, x, n, nk, b, BACK: tl.constexpr, TOGETHER: tl.constexpr):
    """Of n units: ln of the sum of e^-away over all keys up to each unit (or from it on), seen from its key that is
    nearest to the queries, in REACH; K, which with REACH bounds what they weigh, in WEIGHTS; its largest in MOST."""
    reach_before, weight_before = b * 0.0 - float("inf"), b * 0.0 - float("inf")
    carry = b * 0.0
    chunks = (n + TOGETHER - 1) // TOGETHER
    for chunk in range(chunks):
        at = chunk
        if BACK:
            at = chunks - 1 - chunk
        index = at * TOGETHER + tl.arange(0, TOGETHER)
        inside = index < n
        if BACK:
            nearest, before = index * UNIT, (index + 1) * UNIT
            since = inside & (index + 1 < n)
        else:
            nearest, before = unit_end(index * UNIT, nk), index * UNIT - 1
            since = inside & (index > 0)
        level = tl.load(LEVELS + nearest, mask=inside, other=0.0)
        fall = tl.abs(tl.load(LEVELS + before, mask=since, other=0.0) - level).to(tl.float32)
        # Falls are added in float32, once a step of the scan: less than they are, however they are rounded.
        fall = tl.where(since, fall * (1.0 - 4.0 * ROUNDING), 0.0)
        reach = tl.load(REACH + index, mask=inside, other=-float("inf"))
        weight = tl.load(WEIGHTS + index, mask=inside, other=-float("inf"))
        fall, reach, weight = tl.associative_scan((fall, reach, weight), 0, _joined, reverse=BACK)
        reach, weight = _log_add(reach_before - fall, reach), _log_add(weight_before - fall, weight)
        last = index == (at * TOGETHER if BACK else at * TOGETHER + TOGETHER - 1)
        reach_before = tl.max(tl.where(last, reach, -float("inf")), 0)
        weight_before = tl.max(tl.where(last, weight, -float("inf")), 0)
        # A step of the scan is rounded to some 2^-21 of its ln: a hundred of them.
        effective = tl.maximum(weight * (1.0 + 64.0 * ROUNDING) + 0.002 - reach, 0.0) / x
        most = tl.maximum(tl.associative_scan(tl.where(inside, effective, 0.0), 0, _larger, reverse=BACK), carry)
        carry = tl.max(most, 0)
        tl.store(REACH + index, reach + 0.002, mask=inside)
        tl.store(WEIGHTS + index, effective, mask=inside)
        tl.store(MOST + index, most, mask=inside)


@triton.jit(do_not_specialize=["start", "blocks"])
def largest_kernel(
    NORM, PASTS, AHEADS, REACH_PAST, REACH_AHEAD, LEVELS, AHEAD, QUERY_NORM, NORM_PAST, MOST_PAST, NORM_AHEAD,
    MOST_AHEAD, SEQ, UNIT0, start, stride_level, stride_level_head, H, Hk, group, Tq, Tk, blocks, BIAS: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    hk = tl.program_id(1)
    b = sequence * 0 if PACKED else sequence
    _q0, _nq, k0, nk, _s = extent(SEQ, sequence, Tq, Tk, start, CAUSAL, RAGGED or PACKED)
    n = (nk + UNIT - 1) // UNIT
    units = blocks * (ROWS // UNIT)
    unit0 = b * 0
    if PACKED:
        unit0 = tl.load(UNIT0 + sequence)
    at = (b * Hk + hk) * units + unit0
    _running_largest(NORM + at, NORM_PAST + at, n, b, False, TOGETHER)
    if not CAUSAL:
        _running_largest(NORM + at, NORM_AHEAD + at, n, b, True, TOGETHER)
    for member in range(group):
        h = hk * group + member
        at = (b * H + h) * units + unit0
        if BIAS == DECAY:
            x = tl.load(QUERY_NORM + sequence * H + h)
            level_at = b.to(tl.int64) * stride_level + h.to(tl.int64) * stride_level_head + k0
            _running_sums(
                LEVELS + level_at, REACH_PAST + at, PASTS + at, MOST_PAST + at, x, n, nk, b, False, TOGETHER
            )
            if not CAUSAL:
                _running_sums(
                    AHEAD + level_at, REACH_AHEAD + at, AHEADS + at, MOST_AHEAD + at, x, n, nk, b, True, TOGETHER
                )
        else:
            _running_largest(PASTS + at, MOST_PAST + at, n, b, False, TOGETHER)
            if not CAUSAL:
                _running_largest(AHEADS + at, MOST_AHEAD + at, n, b, True, TOGETHER)


@triton.jit
def _tail(slope):
    """-ln(1 - e^-slope): the sum over all keys from some distance on, over the first."""
    return tl.where(slope < 1e-4, -tl.log(slope) + slope, -tl.log(1.0 - tl.exp(-slope)))


@triton.jit
def _stretch(x, X, K, norm):
    """x K, and beyond X what the largest norm can add."""
    return tl.where(x <= X, x * K, X * K + (x - X) * norm)


@triton.jit
def first_needed(
    x, near, some, origin, after, norms, pasts, X, norm, past, outlier, slope, budget, last_unit, key_units
):
    """The first key unit that these queries need. near: a lower bound of each one's log-sum-exp.

    origin: the position of the first, and after: how far the others stand behind it, so that float32 holds distances
    exactly. outlier: whether some unit's K stands out.
    """
    # Keys before `first` hold too little: by query with one K for all units,
    first = after - (_stretch(x, X, past, norm) * 1.000001 - near + budget + _tail(slope) + 0.01) / slope
    first = tl.where((first > -16777216.0) & (first < 16777216.0), tl.floor(first).to(tl.int32), -FAR)
    best = tl.min(tl.where(some, tl.maximum(origin + first, 0), FAR), 0) // UNIT
    # and, where there is an outlier, with each unit's own: it counts where it is.
    if outlier:
        most = tl.max(tl.where(some, x, 0.0), 0)
        least = tl.min(tl.where(some, near + slope * after, float("inf")), 0)
        step = slope * UNIT * 0.5  # of the decay from unit to unit, half is for the sum over units
        within = tl.log(1.0 - tl.exp(-slope * UNIT)) + _tail(slope)
        within = tl.where(slope * UNIT < 1e-3, tl.log(UNIT * 1.0) + 0.001, within)
        spare = least - budget - _tail(step) - within - 0.01
        allowed = origin * 0 + FAR
        for chunk in range(0, last_unit + 1, CHUNK):
            index = chunk + tl.arange(0, CHUNK)
            inside = index <= last_unit
            own_norm = tl.load(norms + index, mask=inside, other=0.0)
            score = _stretch(most, X, tl.load(pasts + index, mask=inside, other=0.0), own_norm)
            end = (index * UNIT + UNIT - 1 - origin).to(tl.float32)
            room = (spare - score - slope * end - 1e-6 * (score + slope * tl.abs(end))) / step
            room = tl.where((room > 0.0) & (room < 16777216.0), room, tl.where(room > 0.0, 16777216.0, -1.0))
            unit_end = tl.where(room >= 0.0, index + 1 + tl.floor(room * 0.9999).to(tl.int32), index)
            allowed = tl.minimum(allowed, tl.min(tl.where(inside, unit_end, FAR), 0))
        best = tl.maximum(best, allowed)
    return tl.minimum(best, key_units)


@triton.jit
def last_needed(x, near, some, origin, after, X, norm, ahead, slope, offset, budget, nk):
    """One past the last key unit that these queries need."""
    last = after + (_stretch(x, X, ahead, norm) * 1.000001 - near + budget + _tail(slope) + 0.01) / slope + offset
    last = tl.where((last > -16777216.0) & (last < 16777216.0), tl.ceil(last).to(tl.int32) + 1, FAR)
    most = tl.max(tl.where(some, tl.minimum(origin + last, FAR), 0), 0)
    return (tl.maximum(tl.minimum(most, nk), 0) + UNIT - 1) // UNIT


@triton.jit
def _spare(x, near, some, term, X, K, norm, budget):
    """What keys may weigh as seen from the anchor, ln: with one K for all units, by query; and with each unit's own,
    for the longest query, whose length comes third. term: of each query, at most zero, in nats."""
    known = (x < 1e30) & (near < 1e30)  # NaN compares false
    spare = tl.where(known, near - budget - 0.01 - term * (1.0 - ROUNDING), -float("inf"))
    by_query = tl.where(known, spare - _stretch(x, X, K, norm) * (1.0 + ROUNDING), -float("inf"))
    return (
        tl.min(tl.where(some, by_query, float("inf")), 0),
        tl.min(tl.where(some, spare, float("inf")), 0),
        tl.max(tl.where(some, x, 0.0), 0),
    )


@triton.jit
def _weighs_little(LEVELS, reaches, units_K, norms, index, inside, nearest, anchor, X, by_query, spare, most):
    """Whether all keys from these units outwards hold too little."""
    gap = -tl.abs(tl.load(LEVELS + nearest, mask=inside, other=0.0) - anchor).to(tl.float32)
    reach = tl.load(reaches + index, mask=inside, other=0.0) + gap * (1.0 - ROUNDING)
    K = tl.load(units_K + index, mask=inside, other=0.0)
    norm = tl.load(norms + index, mask=inside, other=0.0)
    own = reach + _stretch(most, X, K, norm) * (1.0 + ROUNDING)
    return inside & ((reach <= by_query) | (own <= spare))


@triton.jit
def first_needed_by_levels(
    x, near, some, term, anchor, end, LEVELS, reaches, pasts, norms, X, norm, past, budget, nk
):
    """`first_needed` for a decay: the keys of all units up to one hold little if they do as seen from its last key.
    end: one past the last unit in front of the queries."""
    by_query, spare, most = _spare(x, near, some, term, X, past, norm, budget)
    found = end * 0
    chunk = (end - 1) // CHUNK
    while (chunk >= 0) & (found == 0):
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        little = _weighs_little(
            LEVELS, reaches, pasts, norms, index, index < end, unit_end(index * UNIT, nk), anchor, X, by_query,
            spare, most,
        )  # fmt: skip
        found = tl.max(tl.where(little, index + 1, 0), 0)
        chunk -= 1
    return found


@triton.jit
def last_needed_by_levels(
    x, near, some, term, anchor, first, LEVELS, reaches, aheads, norms, X, norm, ahead, budget, key_units
):
    """`last_needed` for a decay. first: the first unit behind the queries."""
    by_query, spare, most = _spare(x, near, some, term, X, ahead, norm, budget)
    found = first * 0 + key_units
    chunk = first // CHUNK
    while (chunk * CHUNK < key_units) & (found == key_units):
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = (index >= first) & (index < key_units)
        little = _weighs_little(
            LEVELS, reaches, aheads, norms, index, inside, index * UNIT, anchor, X, by_query, spare, most
        )
        found = tl.min(tl.where(little, index, key_units), 0)
        chunk += 1
    return found


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


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


@triton.jit(do_not_specialize=["stride_found", "stride_window"])
def order_kernel(
    FOUND_FIRST, FOUND_LAST, FIRST, LAST, UNTIL, SINCE, SEQ, UNIT0, stride_found, stride_window, H, Tq, Tk,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr, TOGETHER: tl.constexpr, PARTS: tl.constexpr,
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
    chunks = (units + TOGETHER - 1) // TOGETHER
    carry = b * 0 + FAR
    for back in range(chunks):
        index = (chunks - 1 - back) * TOGETHER + tl.arange(0, TOGETHER)
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
            index = chunk * TOGETHER + tl.arange(0, TOGETHER)
            value = tl.zeros_like(index)
            for part in tl.static_range(PARTS):
                place_found = index * PARTS + part
                found = tl.load(FOUND_LAST + found_at + place_found, mask=place_found < found_count, other=0)
                value = tl.maximum(value, found)
            value = tl.maximum(tl.associative_scan(value, 0, _larger), carry)
            carry = tl.max(value, 0)
            tl.store(LAST + at + index, value, mask=index < units)
    tl.debug_barrier()
    for chunk in range((key_units + TOGETHER - 1) // TOGETHER):
        key = chunk * TOGETHER + tl.arange(0, TOGETHER)
        tl.store(UNTIL + at + key, _count(FIRST + at, units, key, b), mask=key < key_units)
        if not CAUSAL:
            tl.store(SINCE + at + key, _count(LAST + at, units, key, b), mask=key < key_units)
