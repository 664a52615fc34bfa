"""From log gates to c: running sums that never rise, and the borders where gates are closed.

On a GPU a kernel does this in one pass forward and one backward; in torch's own operations it is a dozen kernels each
way, which for short sequences take as long as attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainshort.ops.tracing import no_double_backward, no_vmap

# A log gate below this counts as that of a gate of zero, and never enters a sum: numbers as large would take the
# digits of all that comes after them (docs/proof.md, Gates and times). Far below any penalty that means something.
LOWEST_LOG_GATE = -(2.0**20)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Of sums and times: float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def running_sums(
    log_gates: Tensor, before: tuple[Tensor, Tensor] | None = None, start: int | Tensor = 0
) -> tuple[Tensor, Tensor]:
    """c of tokens with these log gates, float64 [B, H, T], and the first position that each may see, int32.

    before: both for the token in front of them, [B, H, 1] each, which stands at start - 1.
    """
    _check("log_gates", log_gates)
    if before is None and isinstance(start, int) and start == 0 and _has_kernel(log_gates):
        return _sums_op(log_gates, False)
    sums, closed = _sums(log_gates, None if before is None else before[0])
    index = torch.arange(closed.shape[-1], device=closed.device)
    first = torch.where(closed, start + index, 0).cummax(-1).values.to(torch.int32)
    return sums, first if before is None else torch.maximum(first, before[1])


def running_sums_ahead(log_gates: Tensor) -> tuple[Tensor, Tensor]:
    """The same for later keys: c, and one past the last position that each may see."""
    _check("future", log_gates)
    if _has_kernel(log_gates):
        return _sums_op(log_gates, True)
    sums, closed = _sums(log_gates, None)
    length = closed.shape[-1]
    index = torch.arange(length, device=closed.device)
    later = torch.where(closed, index, length).flip(-1).cummin(-1).values.flip(-1)
    return sums, F.pad(later[..., 1:], (0, min(1, length)), value=length).to(torch.int32)


def _check(name: str, gates: Tensor) -> None:
    if not isinstance(gates, Tensor) or not gates.is_floating_point():
        came = gates.dtype if isinstance(gates, Tensor) else type(gates).__name__
        raise TypeError(f"DecayBias {name} must be a floating point tensor, got {came}")
    if gates.dim() != 3:
        raise ValueError(f"DecayBias {name} must be [batch, heads, length], got shape {list(gates.shape)}")


def _sums(gates: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Running sums of log gates that never rise, and which gates are closed: [B, H, T] each."""
    wide = gates.to(wide_dtype(gates.device))
    closed = wide < LOWEST_LOG_GATE
    uncounted = closed
    if before is None:  # no link crosses the first token
        uncounted = closed | (torch.arange(gates.shape[2], device=gates.device) == 0)
    sums = wide.masked_fill(uncounted, 0.0).masked_fill(~(wide <= 0), float("nan")).cumsum(-1)
    if before is not None:
        sums = sums + before
    # The gradient is that of the sum: the running minimum differs from it by rounding alone.
    return sums + (sums.cummin(-1).values - sums).detach(), closed


def _has_kernel(gates: Tensor) -> bool:
    from trainshort.ops.dispatch import HAS_TRITON

    return HAS_TRITON and gates.is_cuda


# The kernel as a registered operator, and its backward pass


def _compute(log_gates: Tensor, ahead: bool) -> tuple[Tensor, Tensor]:
    from trainshort.ops.triton import gate_sums

    return gate_sums.running_sums(log_gates, ahead)


def _fake(log_gates: Tensor, ahead: bool) -> tuple[Tensor, Tensor]:
    shape = log_gates.shape
    return log_gates.new_empty(shape, dtype=torch.float64), log_gates.new_empty(shape, dtype=torch.int32)


def _compute_gradient(grad: Tensor, log_gates: Tensor) -> Tensor:
    from trainshort.ops.triton import gate_sums

    return gate_sums.gradient(grad, log_gates)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
    (log_gates,) = ctx.saved_tensors
    return _gradient_op(grad, log_gates), None


_sums_op = torch.library.custom_op(
    "trainshort::gate_sums", _compute, mutates_args=(), schema="(Tensor log_gates, bool ahead) -> (Tensor, Tensor)"
)
_gradient_op = torch.library.custom_op(
    "trainshort::gate_sums_backward",
    _compute_gradient,
    mutates_args=(),
    schema="(Tensor grad, Tensor log_gates) -> Tensor",
)
_sums_op.register_fake(_fake)
_gradient_op.register_fake(lambda grad, log_gates: log_gates.new_empty(log_gates.shape))
_sums_op.register_autograd(_gradient, setup_context=_save)
_gradient_op.register_autograd(no_double_backward)
for _operator in (_sums_op, _gradient_op):
    _operator.register_vmap(no_vmap)
