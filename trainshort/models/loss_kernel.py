"""Cross entropy of rows of logits on a GPU, with the gradient written over the logits: one program a row.

`losses_kernel` finds the log-sum-exp of a row in one pass over it, block by block, and its loss. With GRADIENT it
goes over the row a second time, while most of it is still in the cache, and leaves softmax - onehot in its place.
`gradients_kernel` does that second pass alone, where log-sum-exp is known, times a factor for each row.

All arithmetic is in float32, whatever the dtype of the logits. Rows whose target is ignored have loss and gradient 0.
A target outside [0, V) reads nothing out of bounds: its loss and gradient are NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainshort.ops.triton.run import on_device

LARGEST_BLOCK = 8192  # logits that a program holds at a time


@triton.jit
def _write_gradient(ROW, target, lse, factor, V, BLOCK: tl.constexpr):
    for start in range(0, V, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x = tl.load(ROW + j, mask=j < V, other=-float("inf")).to(tl.float32)
        g = (tl.exp(x - lse) - tl.where(j == target, 1.0, 0.0)) * factor
        tl.store(ROW + j, g.to(ROW.dtype.element_ty), mask=j < V)


@triton.jit
def _write_zeros(ROW, V, BLOCK: tl.constexpr):
    for start in range(0, V, BLOCK):
        j = start + tl.arange(0, BLOCK)
        tl.store(ROW + j, tl.zeros([BLOCK], ROW.dtype.element_ty), mask=j < V)


@triton.jit(do_not_specialize=["ignore_index"])
def losses_kernel(
    LOGITS, TARGETS, LOSSES, LSE, stride, V, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
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
        right = tl.load(ROW + target, mask=inside, other=float("nan")).to(tl.float32)
        highest = row * 0.0 - float("inf")
        total = row * 0.0
        for start in range(0, V, BLOCK):
            j = start + tl.arange(0, BLOCK)
            x = tl.load(ROW + j, mask=j < V, other=-float("inf")).to(tl.float32)
            new = tl.maximum(highest, tl.max(x, 0))
            shift = tl.where(new == -float("inf"), 0.0, new)
            total = total * tl.exp(highest - shift) + tl.sum(tl.exp(x - shift), 0)
            highest = new
        log_total = tl.log(total)
        tl.store(LOSSES + row, log_total + (highest - right))  # in this order: exact where the target is certain
        tl.store(LSE + row, highest + log_total)
        if GRADIENT:
            tl.debug_barrier()  # `right` is read by all before anyone writes over it
            _write_gradient(ROW, target, highest + log_total, tl.where(inside, 1.0, float("nan")), V, BLOCK)


@triton.jit(do_not_specialize=["ignore_index"])
def gradients_kernel(LOGITS, TARGETS, LSE, FACTORS, stride, V, ignore_index, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    ROW = LOGITS + row.to(tl.int64) * stride
    target = tl.load(TARGETS + row)
    if target == ignore_index:
        _write_zeros(ROW, V, BLOCK)
    else:
        inside = (target >= 0) & (target < V)
        factor = tl.where(inside, tl.load(FACTORS + row), float("nan"))
        _write_gradient(ROW, target, tl.load(LSE + row), factor, V, BLOCK)


def losses_of(logits: Tensor, targets: Tensor, ignore_index: int, gradient: bool) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exp [rows], float32. gradient: leave that of the sum of losses in place of the logits."""
    losses, lse = (torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2))
    with on_device(logits):
        losses_kernel[(len(logits),)](
            **_arguments(logits, targets, ignore_index), LOSSES=losses, LSE=lse, GRADIENT=gradient
        )
    return losses, lse


def leave_gradients(logits: Tensor, targets: Tensor, ignore_index: int, lse: Tensor, factors: Tensor) -> None:
    """Put the gradient of each row's loss, times its factor, in place of the logits."""
    with on_device(logits):
        gradients_kernel[(len(logits),)](
            **_arguments(logits, targets, ignore_index), LSE=lse.contiguous(), FACTORS=factors.contiguous()
        )


def _arguments(logits: Tensor, targets: Tensor, ignore_index: int) -> dict[str, Any]:
    """What both kernels take, by the names of their parameters, and how they are launched."""
    vocabulary = logits.shape[1]
    block = min(triton.next_power_of_2(vocabulary), LARGEST_BLOCK)
    return {
        "LOGITS": logits,
        "TARGETS": targets.contiguous(),
        "stride": logits.stride(0),
        "V": vocabulary,
        "ignore_index": ignore_index,
        "BLOCK": block,
        "num_warps": min(max(block // 1024, 1), 8),
    }
