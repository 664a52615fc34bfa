"""New keys and values into a cache, with the norms that decoding finds its windows from.

One program for one block of the cache, one key head and one row of the batch, however many tokens come: so a block's
norm has one writer. Keys are measured as they are stored, because rounding makes half of them longer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trainshort.ops import problem
from trainshort.ops.triton.windows import UNDERFLOW

BLOCK = tl.constexpr(problem.BLOCK)


@triton.jit(do_not_specialize=["start", "tokens"])
def append_kernel(
    K, V, KEYS, VALUES, NORMS, SEQ, start, tokens,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, stride_cb, stride_ch, stride_ct,
    stride_nb, stride_nh,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """K, V [B, Hkv, tokens, D] into KEYS, VALUES from `start` on. RAGGED: from where the next query of SEQ stands."""
    hk = tl.program_id(1)
    b = tl.program_id(2)
    if RAGGED:
        start = tl.load(SEQ + 5 * b + 2) + tl.load(SEQ + 5 * b + 4)
    block = start // BLOCK + tl.program_id(0)
    low = tl.maximum(block * BLOCK, start)
    high = tl.minimum(block * BLOCK + BLOCK, start + tokens)
    j = (low + tl.arange(0, BN)).to(tl.int64)
    d = tl.arange(0, BD)
    inside = (j < high)[:, None] & (d < D)[None, :]
    new = (j - start)[:, None]
    stored = b.to(tl.int64) * stride_cb + hk.to(tl.int64) * stride_ch + j[:, None] * stride_ct + d[None, :]
    v_at = b.to(tl.int64) * stride_vb + hk.to(tl.int64) * stride_vh + new * stride_vt + d[None, :]
    tl.store(VALUES + stored, tl.load(V + v_at, mask=inside, other=0.0).to(VALUES.dtype.element_ty), mask=inside)
    k_at = b.to(tl.int64) * stride_kb + hk.to(tl.int64) * stride_kh + new * stride_kt + d[None, :]
    k = tl.load(K + k_at, mask=inside, other=0.0).to(KEYS.dtype.element_ty)
    tl.store(KEYS + stored, k, mask=inside)
    wide = k.to(tl.float32)
    # Larger by what a float32 sum and its root can lose, and by what underflows.
    lengths = (tl.sqrt(tl.sum(wide * wide, 1)) + D * UNDERFLOW) * (1.0 + (0.5 * D + 4.0) * 5.9604645e-8)
    norm_at = NORMS + b * stride_nb + hk * stride_nh + block
    before = tl.load(norm_at, mask=low < high, other=0.0)
    largest = tl.maximum(before, tl.max(lengths, 0))
    odd = tl.sum(tl.where(lengths != lengths, 1, 0), 0) + tl.where(before != before, 1, 0)  # maxima drop NaN
    tl.store(norm_at, tl.where(odd > 0, float("nan"), largest), mask=low < high)
