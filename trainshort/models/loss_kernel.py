"""Cross entropy of rows of logits on a GPU, with the gradient written over the logits: one program a row.

`losses_kernel` finds the log-sum-exp of a row in one pass over it, block by block, and its loss. With GRADIENT it
leaves softmax - onehot in its place: at once where the row is one block, else in a second pass over it, while most of
it is still in the cache.
`gradients_kernel` does that second pass alone, where log-sum-exp is known, times a factor for each row.

All arithmetic is in float32, whatever the dtype of the logits. The bias of the linear layer is added here: added to
stored logits of 16 bits it would be a second rounding. Rows whose target is ignored have loss and gradient 0.
A target outside [0, V) reads nothing out of bounds: its loss and gradient are NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainshort.ops.triton.run import on_device

LARGEST_ROW = 32768  # logits of a row that a program holds as a whole
BLOCK = 8192  # logits that it holds at a time of a longer one


@triton.jit
def _load(ROW, BIAS, j, inside, HAS_BIAS: tl.constexpr):
    x = tl.load(ROW + j, mask=inside, other=-float("inf")).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(BIAS + j, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _put_gradient(ROW, x, j, target, lse, factor, V):
    g = (tl.exp(x - lse) - tl.where(j == target, 1.0, 0.0)) * factor
    tl.store(ROW + j, g.to(ROW.dtype.element_ty), mask=j < V)


@triton.jit
def _write_gradient(ROW, BIAS, target, lse, factor, V, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, V, BLOCK):
        j = start + tl.arange(0, BLOCK)
        _put_gradient(ROW, _load(ROW, BIAS, j, j < V, HAS_BIAS), j, target, lse, factor, V)


@triton.jit
def _write_zeros(ROW, V, BLOCK: tl.constexpr):
    for start in range(0, V, BLOCK):
        j = start + tl.arange(0, BLOCK)
        tl.store(ROW + j, tl.zeros([BLOCK], ROW.dtype.element_ty), mask=j < V)


@triton.jit(do_not_specialize=["ignore_index"])
def losses_kernel(
    LOGITS, BIAS, TARGETS, LOSSES, LSE, stride, V, ignore_index,
    GRADIENT: tl.constexpr, HAS_BIAS: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    ROW = LOGITS + row.to(tl.int64) * stride
    target = tl.load(TARGETS + row)
    if target == ignore_index:
        tl.store(LOSSES + row, 0.0)
        tl.store(LSE + row, 0.0)
        if GRADIENT:
            _write_zeros(ROW, V, BLOCK)
    else:
        inside = (target >= 0) & (target < V)
        right = tl.where(inside, _load(ROW, BIAS, target, inside, HAS_BIAS), float("nan"))
        first = tl.arange(0, BLOCK)
        x = _load(ROW, BIAS, first, first < V, HAS_BIAS)
        highest = tl.max(x, 0)
        total = tl.sum(tl.exp(x - tl.where(highest == -float("inf"), 0.0, highest)), 0)
        for start in range(BLOCK, V, BLOCK):
            j = start + first
            x = _load(ROW, BIAS, j, j < V, HAS_BIAS)
            new = tl.maximum(highest, tl.max(x, 0))
            shift = tl.where(new == -float("inf"), 0.0, new)
            total = total * tl.exp(highest - shift) + tl.sum(tl.exp(x - shift), 0)
            highest = new
        log_total = tl.log(total)
        tl.store(LOSSES + row, log_total + (highest - right))  # in this order: exact where the target is certain
        tl.store(LSE + row, highest + log_total)
        if GRADIENT:
            tl.debug_barrier()  # `right` is read by all before anyone writes over it
            factor = tl.where(inside, 1.0, float("nan"))
            if ONE_BLOCK:  # it is still here
                _put_gradient(ROW, x, first, target, highest + log_total, factor, V)
            else:
                _write_gradient(ROW, BIAS, target, highest + log_total, factor, V, HAS_BIAS, BLOCK)


@triton.jit(do_not_specialize=["ignore_index"])
def gradients_kernel(
    LOGITS, BIAS, TARGETS, LSE, FACTORS, stride, V, ignore_index, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    ROW = LOGITS + row.to(tl.int64) * stride
    target = tl.load(TARGETS + row)
    if target == ignore_index:
        _write_zeros(ROW, V, BLOCK)
    else:
        inside = (target >= 0) & (target < V)
        factor = tl.where(inside, tl.load(FACTORS + row), float("nan"))
        _write_gradient(ROW, BIAS, target, tl.load(LSE + row), factor, V, HAS_BIAS, BLOCK)


def losses_of(
    logits: Tensor, targets: Tensor, ignore_index: int, gradient: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exp [rows] of logits + bias, float32.

    gradient: leave that of the sum of losses in place of the logits.
    """
    losses, lse = (torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2))
    with on_device(logits):
        losses_kernel[(len(logits),)](
            **_arguments(logits, bias, targets, ignore_index),
            LOSSES=losses,
            LSE=lse,
            GRADIENT=gradient,
            ONE_BLOCK=logits.shape[1] <= LARGEST_ROW,
        )
    return losses, lse


def leave_gradients(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    lse: Tensor,
    factors: Tensor,
    bias: Tensor | None = None,
) -> None:
    """Put the gradient of each row's loss, times its factor, in place of the logits. lse: of logits + bias."""
    with on_device(logits):
        gradients_kernel[(len(logits),)](
            **_arguments(logits, bias, targets, ignore_index), LSE=lse.contiguous(), FACTORS=factors.contiguous()
        )


def _arguments(logits: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int) -> dict[str, Any]:
    """What both kernels take, by the names of their parameters, and how they are launched."""
    vocabulary = logits.shape[1]
    block = triton.next_power_of_2(vocabulary) if vocabulary <= LARGEST_ROW else BLOCK
    return {
        "LOGITS": logits,
        "BIAS": bias,
        "HAS_BIAS": bias is not None,
        "TARGETS": targets.contiguous(),
        "stride": logits.stride(0),
        "V": vocabulary,
        "ignore_index": ignore_index,
        "BLOCK": block,
        "num_warps": min(max(block // 1024, 1), 16),
    }
