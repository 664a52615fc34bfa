"""New keys and values into a cache, with the norms that decoding finds its windows from.

One program for one block of the cache, one key head and one row of the batch, however many tokens come: so a block's
norm has one writer. Keys are measured as they are stored, because rounding makes half of them longer. With rotary
positions a step of decoding turns them here, and its queries too, in programs of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trainshort.ops import problem
from trainshort.ops.triton.rotate import directions, turn, turned
from trainshort.ops.triton.windows import UNDERFLOW

BLOCK = tl.constexpr(problem.BLOCK)


@triton.jit(do_not_specialize=["start", "tokens"])
def append_kernel(
    K, V, KEYS, VALUES, NORMS, SEQ, Q, OUT, FREQUENCIES, start, tokens, size,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, stride_cb, stride_ch, stride_ct,
    stride_nb, stride_nh, stride_qb, stride_qh, stride_qt, stride_ob, stride_oh, stride_ot,
    Hkv, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr,
    RAGGED: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """K, V [B, Hkv, tokens, D] into KEYS, VALUES from `start` on. RAGGED: from where the next query of SEQ stands.
    TURNED, which is RAGGED too: keys turned by their positions, and Q [B, H, tokens, D] turned alike into OUT."""
    h = tl.program_id(1)
    b = tl.program_id(2)
    if RAGGED:
        start = tl.load(SEQ + 5 * b + 2) + tl.load(SEQ + 5 * b + 4)
    block = start // BLOCK + tl.program_id(0)
    low = tl.maximum(block * BLOCK, start)
    high = tl.minimum(block * BLOCK + BLOCK, start + tokens)
    j = (low + tl.arange(0, BN)).to(tl.int64)
    new = (j - start)[:, None]
    row, head = b.to(tl.int64), h.to(tl.int64)
    if TURNED:
        c = tl.arange(0, BH)[None, :]
        half = (j < high)[:, None] & (c < HALF)
        cos, sin = directions(tl.load(SEQ + 5 * b + 4) + (j - start), FREQUENCIES, HALF, BH)
        if h >= Hkv:
            q_at = row * stride_qb + (head - Hkv) * stride_qh + new * stride_qt + c
            out_at = row * stride_ob + (head - Hkv) * stride_oh + new * stride_ot + c
            turn(Q, OUT, q_at, out_at, half, cos, sin, size, HALF)
    if h < Hkv:
        d = tl.arange(0, BD)[None, :]
        inside = (j < high)[:, None] & (d < D)
        stored = row * stride_cb + head * stride_ch + j[:, None] * stride_ct
        v = tl.load(V + row * stride_vb + head * stride_vh + new * stride_vt + d, mask=inside, other=0.0)
        tl.store(VALUES + stored + d, v.to(VALUES.dtype.element_ty), mask=inside)
        k_at = row * stride_kb + head * stride_kh + new * stride_kt
        if TURNED:
            one, two = turned(K, k_at + c, half, cos, sin, size, HALF)
            one, two = one.to(KEYS.dtype.element_ty), two.to(KEYS.dtype.element_ty)
            tl.store(KEYS + stored + c, one, mask=half)
            tl.store(KEYS + stored + c + HALF, two, mask=half)
            squares = tl.sum(one.to(tl.float32) * one.to(tl.float32) + two.to(tl.float32) * two.to(tl.float32), 1)
        else:
            k = tl.load(K + k_at + d, mask=inside, other=0.0).to(KEYS.dtype.element_ty)
            tl.store(KEYS + stored + d, k, mask=inside)
            squares = tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)
        # Larger by what a float32 sum and its root can lose, and by what underflows.
        lengths = (tl.sqrt(squares) + D * UNDERFLOW) * (1.0 + (0.5 * D + 4.0) * 5.9604645e-8)
        norm_at = NORMS + b * stride_nb + h * stride_nh + block
        before = tl.load(norm_at, mask=low < high, other=0.0)
        largest = tl.maximum(before, tl.max(lengths, 0))
        odd = tl.sum(tl.where(lengths != lengths, 1, 0), 0) + tl.where(before != before, 1, 0)  # maxima drop NaN
        tl.store(norm_at, tl.where(odd > 0, float("nan"), largest), mask=low < high)
