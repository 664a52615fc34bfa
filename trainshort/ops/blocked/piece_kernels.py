"""The arithmetic of one piece: attention of a few queries to a few keys, with its log-sum-exp.

Two kernels with one meaning. `fused` is torch's own CPU attention kernel, which speaks log-sum-exp in both
directions, so that pieces can be merged. `plain` is matrix products and exponentials: it runs on every device
and knows the gradient of the bias. Shapes: q, out [X, Y, R, D]; k, v [X, Y, W, D]; mask broadcasts to
[X, Y, R, W]; lse [X, Y, R], of the scores with exactly this mask.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainshort.ops import threads


class Inputs(NamedTuple):
    """What one piece is computed from."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None  # added to the scores; -inf where a key is out of sight
    scale: float
    causal: bool = False  # the fused kernel leaves out keys after a query, besides what the mask says
    factors: Tensor | None = (
        None  # [X, Y, R, W], of the weights after the softmax: dropout, by the plain kernels only
    )


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor | None = None  # [X, Y, R, W], from the plain kernels only
    rows: Tensor | None = None  # their sums over keys [X, Y, R]
    columns: Tensor | None = None  # and over queries [X, Y, W], from `fused_backward_with_sums`


class NonFiniteScoresError(Exception):
    """The fused kernel met numbers for which it does not promise what dense attention gives."""


def has_fused() -> bool:
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def can_hide_future(scale: float) -> bool:
    """Whether the fused kernel may be told to be causal: it multiplies the -inf that hides the future by the scale,
    rounded to float32."""
    return scale >= torch.finfo(torch.float32).smallest_normal


def has_plain_rows(tensor: Tensor) -> bool:
    """Whether rows are contiguous and apart, as the fused kernel needs them. Heads and batches may repeat."""
    batches, heads, rows, dim = tensor.shape
    by_batch, by_head, by_row, last = tensor.stride()
    return (
        last == 1
        and (rows < 2 or by_row >= dim)
        and (heads < 2 or by_head == 0 or by_head >= dim)
        and (batches < 2 or by_batch == 0 or by_batch >= dim)
    )


def fused_forward(piece: Inputs) -> tuple[Tensor, Tensor]:
    q, k, v, mask, scale, causal, _ = piece
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    # Its fast exponential turns NaN into numbers, and a row of -inf into a sum of one: both show in the lse.
    doubtful = not math.isfinite(lse.sum().item()) or torch.count_nonzero(lse).item() < lse.numel()
    if doubtful and not all(torch.isfinite(t).all() for t in (q, k)):
        raise NonFiniteScoresError
    return out, lse


def fused_backward(piece: Inputs, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    q, k, v, mask, scale, causal, _ = piece
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    lanes, rows = q.shape[0] * q.shape[1], q.shape[2]
    if lanes > 1 or rows % 2 or causal or threads.is_inside() or torch.get_num_threads() == 1:
        dq, dk, dv = backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
        return Gradients(dq, dk, dv)
    # The kernel's threads share lanes, not rows: make two lanes of one.
    halves = (1, 2, rows // 2)
    grad, q, out = (t.reshape(*halves, -1) for t in (grad, q, out))
    if mask is not None:
        mask = mask.reshape(*halves, -1) if mask.shape[2] == rows else mask
    k, v = (t.expand(1, 2, -1, -1) for t in (k, v))
    dq, dk, dv = backward(grad, q, k, v, out, lse.reshape(halves), 0.0, False, attn_mask=mask, scale=scale)
    return Gradients(dq.reshape(1, 1, rows, -1), dk.sum(1, keepdim=True), dv.sum(1, keepdim=True))


def with_sum_channels(q: Tensor, k: Tensor, *others: Tensor) -> list[Tensor]:
    """The same tensors with a few channels more, for `fused_backward_with_sums`.

    Ones of q meet zeros of k there, and the other way round, so that no score changes; the gradients of these zeros
    are scale * the sums of the scores' gradients.
    """
    missing = 2 + -(q.shape[-1] + 2) % 4  # a multiple of 4 is faster
    padded = [torch.nn.functional.pad(tensor, (0, missing)) for tensor in (q, k, *others)]
    padded[0][..., q.shape[-1]] = 1.0
    padded[1][..., q.shape[-1] + 1] = 1.0
    return padded


def fused_backward_with_sums(piece: Inputs, grad: Tensor, out: Tensor, lse: Tensor, dim: int) -> Gradients:
    """All but the scale with the channels of `with_sum_channels`, behind the first `dim`."""
    dq, dk, dv = fused_backward(piece, grad, out, lse)[:3]
    rows, columns = dq[..., dim + 1] / piece.scale, dk[..., dim] / piece.scale
    return Gradients(dq[..., :dim], dk[..., :dim], dv[..., :dim], None, rows, columns)


def _scores(piece: Inputs) -> Tensor:
    scores = piece.q @ piece.k.transpose(-2, -1) * piece.scale
    if piece.mask is None:
        return scores
    return (scores + piece.mask).masked_fill(torch.isneginf(piece.mask), -math.inf)  # out of sight, even if it is NaN


def plain_forward(piece: Inputs) -> tuple[Tensor, Tensor]:
    scores = _scores(piece)
    top = scores.amax(-1, keepdim=True)
    top = top.masked_fill(torch.isneginf(top), 0.0)  # every key at -inf: no weight here, others may have some
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    out = _dropped(piece, weights) @ piece.v / total.masked_fill(total == 0, 1.0)
    return out, (top + torch.log(total))[..., 0]


def _dropped(piece: Inputs, weights: Tensor) -> Tensor:
    return weights if piece.factors is None else weights * piece.factors


def plain_backward(piece: Inputs, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    weights = torch.exp(_scores(piece) - lse[..., None])
    dv = _dropped(piece, weights).transpose(-2, -1) @ grad
    dot = (grad * out).sum(-1, keepdim=True)
    dscores = weights * (_dropped(piece, grad @ piece.v.transpose(-2, -1)) - dot)
    dq = dscores @ piece.k * piece.scale
    dk = dscores.transpose(-2, -1) @ piece.q * piece.scale
    return Gradients(dq, dk, dv, dscores)


def plain_backward_of(piece: Inputs, grad: Tensor, out: Tensor, lse: Tensor, dim: int) -> Gradients:
    """The same of the first `dim` channels."""
    piece = piece._replace(**{name: getattr(piece, name)[..., :dim] for name in ("q", "k", "v")})
    return plain_backward(piece, grad[..., :dim], out[..., :dim], lse)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Take another piece's result into `out` and `lse`, in place."""
    total = torch.logaddexp(lse, more_lse)
    empty = torch.isneginf(total)  # neither side has any weight yet
    kept = torch.exp(lse - total).masked_fill(empty, 0.0)
    added = torch.exp(more_lse - total).masked_fill(empty, 0.0)
    out.mul_(kept[..., None]).addcmul_(more, added[..., None])
    lse.copy_(total)


def sums_by_distance(scores: Tensor) -> Tensor:
    """[X, Y, R, W] -> [X, Y, W + R - 1]: the sum over each diagonal, from distance -(R - 1) to W - 1."""
    rows, columns = scores.shape[-2:]
    sums = scores.new_zeros((*scores.shape[:-2], columns + rows - 1))
    for row in range(0, rows, 32):  # a few rows at a time, because they are padded to twice their number
        part = scores[..., row : row + 32, :].flip(-2)
        count = part.shape[-2]
        # Padded by `count` and read with rows one shorter, each row stands one further to the right.
        skewed = torch.nn.functional.pad(part, (0, count)).flatten(-2)[..., : count * (columns + count - 1)]
        first = rows - row - count
        sums[..., first : first + columns + count - 1] += skewed.unflatten(-1, (count, -1)).sum(-2)
    return sums
