"""Rotary embeddings in one launch: queries and keys turned by an angle that grows with their position.

One program for some tokens of one head, queries' heads first. The angle is position x frequency, rounded once, so
that it is the same whichever code computes it: a key in a cache may have been turned by another. A step of decoding
turns them in append.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def directions(position, FREQUENCIES, HALF: tl.constexpr, BH: tl.constexpr):
    """Cosine and sine [rows, BH] of the angles of channels at positions [rows]."""
    d = tl.arange(0, BH)
    frequency = tl.load(FREQUENCIES + d, mask=d < HALF, other=0.0)
    angle = position.to(tl.float32)[:, None] * frequency[None, :]
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def turned(X, at, inside, cos, sin, size, HALF: tl.constexpr):
    """Both halves of rows of X, times `size` and turned, rounded to X's dtype after each."""
    one = (tl.load(X + at, mask=inside, other=0.0).to(tl.float32) * size).to(X.dtype.element_ty).to(tl.float32)
    two = (tl.load(X + at + HALF, mask=inside, other=0.0).to(tl.float32) * size).to(X.dtype.element_ty).to(tl.float32)
    return (one * cos - two * sin).to(X.dtype.element_ty), (one * sin + two * cos).to(X.dtype.element_ty)


@triton.jit
def turn(X, OUT, at, to, inside, cos, sin, size, HALF: tl.constexpr):
    one, two = turned(X, at, inside, cos, sin, size, HALF)
    tl.store(OUT + to, one, mask=inside)
    tl.store(OUT + to + HALF, two, mask=inside)


@triton.jit(do_not_specialize=["T", "stride_position"])
def rotate_kernel(
    Q, K, OUT_Q, OUT_K, POSITIONS, FREQUENCIES, size, T, stride_position,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    stride_oqb, stride_oqh, stride_oqt, stride_okb, stride_okh, stride_okt,
    H, HALF: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Q [B, H, T, 2 HALF] and K [B, Hkv, T, 2 HALF] at int64 POSITIONS [B, T], or [T] with a stride_position of 0."""
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    r = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    d = tl.arange(0, BH)[None, :]
    cos, sin = directions(tl.load(POSITIONS + b * stride_position + r, mask=r < T, other=0), FREQUENCIES, HALF, BH)
    inside = (r < T)[:, None] & (d < HALF)
    if h < H:
        at = b * stride_qb + h * stride_qh + r[:, None] * stride_qt + d
        turn(
            Q, OUT_Q, at, b * stride_oqb + h * stride_oqh + r[:, None] * stride_oqt + d, inside, cos, sin, size, HALF
        )
    else:
        hk = h - H
        at = b * stride_kb + hk * stride_kh + r[:, None] * stride_kt + d
        turn(
            K, OUT_K, at, b * stride_okb + hk * stride_okh + r[:, None] * stride_okt + d, inside, cos, sin, size, HALF
        )
