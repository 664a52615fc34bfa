"""What all kernels share: where a program stands, which keys each of its rows sees, how tiles are read and biased.

Legend, for every kernel of this package:

    b h hk          row of the batch, query head, key head
    T n             lengths; BM rows of queries and BN rows of keys in a tile; D head dimension, BD its power of two
    r p             index of a query, and its position among the keys (start + r, but see `position`)
    j               position of a key
    q0 nq k0 nk     of a sequence: first query, queries, first key, keys
    lo hi           keys that a query sees: lo <= j < hi (padding, document, sight and certified window all together)
    mp mf           slopes of past and future, in units of log2: bias mp (j - p) for j <= p, else mf (p + offset - j)
    ref             a position near the tile: distances are taken from it, so that float32 holds them exactly
    anchor          the same of a decay: c at a position near the tile, in float64 (and anchor_ahead, of later keys)
    sees            1: the past, 2: the future, 3: both (the query's own position always)
    row_max l acc   of each query: the largest score so far, the sum of w = 2^(score - row_max), and of w v
    log2_scale      scale * log2 e
    s0 s1           of each query: what it makes of the seed of the dropout, uint32
    stride_qb ...   strides of Q by row of the batch (b), head (h) and token (t); so for K, V, O (OUT), DO, DQ, DK, DV

Pointers are in capitals, and so are numbers that a kernel is compiled for. A pointer that a kernel does not read
is None:

    Q K V OUT LSE   inputs and results; LSE is a log2. DO, DQ, DK, DV: gradients. DELTA: row sums of DO * OUT
    DLSE            the gradient of the natural log-sum-exp, if it has one: taken from DELTA
    TERMS           of a decay: c of each query less that of the first of its GROUP, in units of log2, less its LSE
                    (TERMS_AHEAD: that of the last of its GROUP less its own)
    SLOPES FUTURES  [H] or [B, H] (stride_slope = H), of past and future
    LINE BUCKETS    of a BucketBias, by distance from -max_distance on: a head's bias in units of log2; the bucket
    LEVELS AHEAD    of a DecayBias: c for earlier and for later keys, float64 [B or 1, H, Tk] (stride_level by row)
    FALLS RESTS     of a decay, float32 [B, H, Tk] with room behind: c of the last key of a unit of the sequence less
                    that of each of its keys, in units of log2, and what float32 lost of it. FALLS_AHEAD: c for later
                    keys, of each less that of the first of its unit
    GATE_FIRST AHEAD_END  of gates, like LEVELS: the first key that each position may see, and one past the last
    SEED PART       of the dropout: int64; whether there is one for each head, of a part of a longer sequence
    DROPOUT         its probability in units of 2^-31, 0 for none
    SEES ORDER      by head: `sees` where heads differ; heads from steep to gentle where that is not their own order
    SEQ BLOCKS UNIT0  of ragged problems: see below; by block of ROWS: its document and its place in it; by document:
                    its first unit
    FIRST LAST UNTIL SINCE  the windows of the backward pass: key units of a query unit, query units of a key unit

A problem may be ragged: each sequence (a row of the batch, or a packed document) has its own
(first query, queries, first key, keys, position of query 0) in SEQ. Inside a kernel all of these look alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trainshort.ops import bias, dropout
from trainshort.ops.triton import shapes

UNIT, ROWS = tl.constexpr(shapes.UNIT), tl.constexpr(shapes.ROWS)
NO_BIAS, LINEAR, BUCKET = tl.constexpr(bias.NO_BIAS), tl.constexpr(bias.LINEAR), tl.constexpr(bias.BUCKET)
DECAY = tl.constexpr(bias.DECAY)
MASKED, PAST, FUTURE, NEAR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
CLOSE = tl.constexpr(4)  # like NEAR, where a decay falls by little, so that differences of c are taken in two float32
MOST_CLOSE = tl.constexpr(8192.0)  # by at most this: two float32 are off by 2^-48 of it
FAR = tl.constexpr(1 << 30)
ONE = tl.constexpr(dropout.ONE)
M0, M1 = (tl.constexpr(number) for number in dropout.MULTIPLIERS)
START0, START1 = (tl.constexpr(number) for number in dropout.STARTS)
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def extent(SEQ, sequence, Tq, Tk, start, CAUSAL: tl.constexpr, UNEVEN: tl.constexpr):
    """Of a sequence: first query, queries, first key, keys, position of query 0.

    Keys after the last query of causal attention, the unwritten end of a cache, are not part of it.
    """
    q0, nq, k0, nk, s = sequence * 0, Tq, sequence * 0, Tk, start
    if UNEVEN:
        at = SEQ + 5 * sequence
        q0, nq, k0, nk, s = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    if CAUSAL:
        nk = tl.maximum(tl.minimum(nk, s + nq), 0)
    return q0, nq, k0, nk, s


@triton.jit
def place(SEQ, BLOCKS, b, block, Tq, Tk, start, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr):
    """Of a block of rows: its place in its sequence, and that sequence's extent. Surplus blocks get no rows."""
    sequence = b
    if PACKED:
        sequence = tl.load(BLOCKS + 2 * block)
        block = tl.load(BLOCKS + 2 * block + 1)
    q0, nq, k0, nk, s = extent(SEQ, sequence, Tq, Tk, start, CAUSAL, RAGGED or PACKED)
    return block, q0, nq, k0, nk, s


@triton.jit
def load_rows(X, b, h, row, base, stride, n, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, TMA: tl.constexpr):
    """Rows [row, row + BR) of a matrix [n, D] as [BR, BD], zeros outside of it. X: a descriptor or a pointer."""
    if TMA:
        tile = X.load([b, h, row, 0]).reshape(BR, BD)
    else:
        r = row + tl.arange(0, BR)
        d = tl.arange(0, BD)
        inside = ((r >= 0) & (r < n))[:, None]
        if D < BD:
            inside = inside & (d < D)[None, :]
        tile = tl.load(X + base + r[:, None].to(tl.int64) * stride + d[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def store_rows(X, tile, row, base, stride, n, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    r = row + tl.arange(0, BR)
    d = tl.arange(0, BD)
    inside = (r < n)[:, None]
    if D < BD:
        inside = inside & (d < D)[None, :]
    at = X + base + r[:, None].to(tl.int64) * stride + d[None, :]
    tl.store(at, tile.to(X.dtype.element_ty), mask=inside)


@triton.jit
def sees_of(SEES, h, CAUSAL: tl.constexpr, SIDED: tl.constexpr):
    if CAUSAL:
        sees = 1
    elif SIDED:
        sees = tl.load(SEES + h)
    else:
        sees = 3
    return sees


@triton.jit
def position(start, r, nk, max_distance, CAUSAL: tl.constexpr):
    """Where queries r stand among nk keys. One beyond all of them is put next to the nearest (max_distance beyond it
    under a BucketBias), where it weighs them alike: so distances stay as small as float32 needs them."""
    p = tl.minimum(start + r, nk + max_distance)
    if not CAUSAL:
        p = tl.maximum(p, -1 - max_distance)
    return p


@triton.jit
def sight(
    r, nq, nk, start, sees, FIRST, LAST, unit0, GATE_FIRST, AHEAD_END, k0,
    CAUSAL: tl.constexpr, WINDOWS: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """The keys [lo, hi) that rows r see, and which rows see any. unit0: of the sequence, in FIRST and LAST.
    GATE_FIRST, AHEAD_END: of the sequence, which begins at key k0 of the row."""
    p = start + r
    lo = tl.zeros_like(r)
    hi = tl.zeros_like(r) + nk
    inside = r < nq
    if CAUSAL:
        hi = tl.minimum(hi, p + 1)
    else:
        hi = tl.where(sees == 1, tl.minimum(hi, p + 1), hi)
        lo = tl.where(sees == 2, tl.maximum(lo, p), lo)
    some = inside & (hi > lo)
    if WINDOWS:
        unit = unit0 + r // UNIT
        lo = tl.maximum(lo, tl.load(FIRST + unit, mask=inside, other=0) * UNIT)
        if not CAUSAL:
            hi = tl.minimum(hi, tl.load(LAST + unit, mask=inside, other=0) * UNIT)
    if GATES:
        at = among_keys(p, nk)
        lo = tl.maximum(lo, tl.load(GATE_FIRST + at) - k0)
        if not CAUSAL:
            hi = tl.minimum(hi, tl.load(AHEAD_END + at) - k0)
    return lo, hi, some


@triton.jit
def some_sees(j, start, nq, nk, sees):
    """Whether any query of the sequence may see keys j. In a head that looks one way, nobody sees what lies behind
    all of its queries."""
    first = tl.where(sees == 2, start, 0)
    end = tl.where(sees == 1, start + nq, nk)
    return (j >= first) & (j < end)


@triton.jit
def among_keys(p, nk):
    """Positions p, those beyond all nk keys put on the nearest: there a query takes its c and its borders."""
    return tl.maximum(tl.minimum(p, nk - 1), 0)


@triton.jit
def fall(LEVELS, at, nk, anchor):
    """c at positions less that of the anchor, in units of log2: taken in float64, rounded to float32 once."""
    return (tl.load(LEVELS + at, mask=at < nk, other=0.0) - anchor).to(tl.float32) * LOG2E


@triton.jit
def full_bias(LINE, LEVELS, AHEAD, p, j, nk, mp, mf, offset, max_distance, BIAS: tl.constexpr, CAUSAL: tl.constexpr):
    """The bias at positions p and j (broadcast against each other), in units of log2."""
    d = j - p
    if BIAS == LINEAR:
        x = d.to(tl.float32)
        if CAUSAL:
            bias = mp * x
        else:
            bias = tl.where(d > 0, mf * (offset - x), mp * x)
    elif BIAS == DECAY:  # near the diagonal, where c may fall far between the tile's tokens: pair by pair
        bias = -fall(LEVELS, j, nk, tl.load(LEVELS + among_keys(p, nk)))
        if not CAUSAL:
            bias = tl.where(d > 0, fall(AHEAD, j, nk, tl.load(AHEAD + among_keys(p, nk))), bias)
    elif BIAS == BUCKET:
        bias = tl.load(LINE + tl.minimum(tl.maximum(d, -max_distance), max_distance) + max_distance)
    else:
        bias = d.to(tl.float32) * 0.0
    return bias


@triton.jit
def split_bias(LINE, p, j, ref, mp, mf, offset, max_distance, BIAS: tl.constexpr, SIDE: tl.constexpr):
    """The bias far from the diagonal as a term of the query plus a term of the key. Not of a decay: see `query_term`
    and `key_term`."""
    row = (p - ref).to(tl.float32)
    column = (j - ref).to(tl.float32)
    if BIAS == LINEAR:
        if SIDE == PAST:
            row, column = -mp * row, mp * column
        else:
            row, column = mf * (row + offset), -mf * column
    elif BIAS == BUCKET:
        row, column = row * 0.0, column * 0.0 + tl.load(LINE + (0 if SIDE == PAST else 2 * max_distance))
    else:
        row, column = row * 0.0, column * 0.0
    return row, column


@triton.jit
def query_term(LEVELS, AHEAD, p, nk, anchor, SIDE: tl.constexpr):
    """A decay's bias far from the diagonal is this plus `key_term`. anchor: c between the queries and the keys, so
    that both are at most zero, and what is rounded of a large one only meets a weight that is as small."""
    at = among_keys(p, nk)
    if SIDE == PAST:
        term = fall(LEVELS, at, nk, anchor)
    else:
        term = -fall(AHEAD, at, nk, anchor)
    return term


@triton.jit
def unit_end(begin, nk):
    """The last key of units that begin at these."""
    return tl.minimum(begin + UNIT, nk) - 1


@triton.jit
def key_term(LEVELS, AHEAD, FALLS, FALLS_AHEAD, first, j, nk, anchor, SIDE: tl.constexpr):
    """Of the keys j from `first` on, which lie in one unit."""
    term = tl.zeros_like(j).to(tl.float32)
    if first >= 0:  # it always is: see `close_bias`
        if SIDE == PAST:
            term = tl.load(FALLS + j) - fall(LEVELS, unit_end(first // UNIT * UNIT, nk), nk, anchor)
        else:
            term = tl.load(FALLS_AHEAD + j) + fall(AHEAD, first // UNIT * UNIT, nk, anchor)
    return term


@triton.jit
def halves(difference):
    """A difference of c, in units of log2, as the sum of two float32."""
    difference *= LOG2E
    high = difference.to(tl.float32)
    return high, (difference - high.to(tl.float64)).to(tl.float32)


@triton.jit
def close_bias(LEVELS, FALLS, RESTS, p, first, j, nk):
    """The bias of queries at p and keys j from `first` on, which lie in one unit, all of them CLOSE: [queries, keys].

    Loads in a loop are pipelined, and what they need for it makes ptxas run the products one after another. Those
    under a condition are not, and few: so there is one, which always holds."""
    high, low = tl.zeros_like(p).to(tl.float32), tl.zeros_like(p).to(tl.float32)
    fallen, rest = tl.zeros_like(j).to(tl.float32), tl.zeros_like(j).to(tl.float32)
    if first >= 0:
        last = tl.load(LEVELS + unit_end(first // UNIT * UNIT, nk))
        high, low = halves(tl.load(LEVELS + among_keys(p, nk)) - last)
        fallen, rest = tl.load(FALLS + j), tl.load(RESTS + j)
    return (high[:, None] + fallen[None, :]) + (low[:, None] + rest[None, :])


@triton.jit
def close_by(LEVELS, first, end, nk):
    """Whether c falls little from key `first` to the end of the last unit before `end`, which all are counted from:
    see CLOSE."""
    last = unit_end((end - 1) // UNIT * UNIT, nk)
    fallen = tl.load(LEVELS + among_keys(first, nk)) - tl.load(LEVELS + among_keys(last, nk))
    return tl.abs(fallen) <= MOST_CLOSE


@triton.jit
def _mixed(x):
    """A permutation of the numbers of 32 bits: ops/dropout.py."""
    x = (x ^ (x >> 16)) * M0
    x = (x ^ (x >> 15)) * M1
    return x ^ (x >> 16)


@triton.jit
def head_numbers(SEED, b, h, H, q0, k0, PART: tl.constexpr):
    """What a head of a row of the batch makes of the seed, and the indices of its first query and key."""
    if PART:
        SEED += (b * H + h) * 3
        both = tl.load(SEED)
        s0, s1 = both.to(tl.uint32), (both >> 32).to(tl.uint32)
        q0 += tl.load(SEED + 1).to(tl.int32)
        k0 += tl.load(SEED + 2).to(tl.int32)
    else:
        seed = tl.load(SEED)
        s0 = _mixed(seed.to(tl.uint32) ^ START0)
        s1 = _mixed((seed >> 32).to(tl.uint32) ^ START1 ^ s0)
        s0, s1 = _mixed(s0 ^ b.to(tl.uint32)), _mixed(s1 ^ b.to(tl.uint32))
        s0, s1 = _mixed(s0 ^ h.to(tl.uint32)), _mixed(s1 ^ h.to(tl.uint32))
    return s0, s1, q0, k0


@triton.jit
def query_numbers(s0, s1, i):
    """What queries with index i of that head make of it."""
    return _mixed(s0 ^ i.to(tl.uint32)), _mixed(s1 ^ i.to(tl.uint32))


@triton.jit
def is_kept(s0, s1, j, DROPOUT: tl.constexpr):
    """Whether dropout keeps the weight of queries on the keys with index j, broadcast against each other."""
    x = j.to(tl.uint32) ^ s0
    x = (x ^ (x >> 16)) * M0
    x = (x ^ (x >> 15) ^ s1) * M1
    x = (x ^ (x >> 16)) >> 1
    return x >= DROPOUT
