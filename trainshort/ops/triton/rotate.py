"""Rotary embeddings in one launch: queries and keys turned by an angle that grows with their position.

One program for some tokens of one head, queries' heads first. The angle is position x frequency, rounded once, so
that it is the same whichever code computes it: a key in a cache may have been turned by another.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _turn(X, OUT, base, out_base, r, cos, sin, stride, out_stride, inside, HALF: tl.constexpr, BH: tl.constexpr):
    d = tl.arange(0, BH)
    at = X + base + r[:, None] * stride + d[None, :]
    one = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    to = OUT + out_base + r[:, None] * out_stride + d[None, :]
    tl.store(to, (one * cos - two * sin).to(OUT.dtype.element_ty), mask=inside)
    tl.store(to + HALF, (one * sin + two * cos).to(OUT.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "stride_position"])
def rotate_kernel(
    Q, K, OUT_Q, OUT_K, POSITIONS, FREQUENCIES, T, stride_position,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    stride_oqb, stride_oqh, stride_oqt, stride_okb, stride_okh, stride_okt,
    H, HALF: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Q [B, H, T, 2 HALF] and K [B, Hkv, T, 2 HALF] at int64 POSITIONS [B, T], or [T] with a stride_position of 0."""
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    r = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    d = tl.arange(0, BH)
    position = tl.load(POSITIONS + b * stride_position + r, mask=r < T, other=0).to(tl.float32)
    frequency = tl.load(FREQUENCIES + d, mask=d < HALF, other=0.0)
    angle = position[:, None] * frequency[None, :]
    cos, sin = tl.cos(angle), tl.sin(angle)
    inside = (r < T)[:, None] & (d < HALF)[None, :]
    if h < H:
        base, out_base = b * stride_qb + h.to(tl.int64) * stride_qh, b * stride_oqb + h.to(tl.int64) * stride_oqh
        _turn(Q, OUT_Q, base, out_base, r, cos, sin, stride_qt, stride_oqt, inside, HALF, BH)
    else:
        hk = (h - H).to(tl.int64)
        base, out_base = b * stride_kb + hk * stride_kh, b * stride_okb + hk * stride_okh
        _turn(K, OUT_K, base, out_base, r, cos, sin, stride_kt, stride_okt, inside, HALF, BH)
