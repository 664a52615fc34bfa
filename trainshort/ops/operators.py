"""The blocked backend as registered operators, so that compilers and autograd see one opaque call.

`torch.ops.trainshort.blocked` computes output, log-sum-exp and windows; `blocked_backward` the gradients. The
operators take flat arguments; `pack` and `unpack` translate from and to a Problem.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from trainshort.ops.bias import Bias, BucketBias, LinearBias, Sight, learned
from trainshort.ops.blocked import run as blocked
from trainshort.ops.problem import BLOCK, Problem, gradient_like
from trainshort.ops.tracing import no_double_backward, no_vmap
from trainshort.ops.values import check_values

_SIGHTS: tuple[Sight, ...] = ("past", "future", "both")


def pack(problem: Problem) -> tuple[Any, ...]:
    """The flat arguments of the operator that stand for a problem."""
    bias, start = problem.bias, problem.query_start
    linear = bias if isinstance(bias, LinearBias) else None
    bucket = bias if isinstance(bias, BucketBias) else None
    sees = None
    if linear is not None and linear.sees is not None:
        sees = [_SIGHTS.index(sight) for sight in linear.sees]
    return (
        problem.q,
        problem.k,
        problem.v,
        *learned(bias),
        problem.key_padding_mask,
        problem.cu_seqlens,
        start if isinstance(start, Tensor) else None,
        problem.key_norms,
        None if isinstance(start, Tensor) else start,
        problem.causal,
        float(problem.scale),
        float(problem.tolerance),
        linear.offset if linear else 0.0,
        sees,
        bucket.max_distance if bucket else 0,
        bucket.bidirectional if bucket else False,
    )


def unpack(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    future: Tensor | None,
    table: Tensor | None,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    start_tensor: Tensor | None,
    key_norms: Tensor | None,
    start: int | None,
    causal: bool,
    scale: float,
    tolerance: float,
    offset: float,
    sees: list[int] | None,
    max_distance: int,
    bidirectional: bool,
) -> Problem:
    bias: Bias = None
    if slopes is not None:
        sights = None if sees is None else [_SIGHTS[index] for index in sees]
        bias = LinearBias(slopes, future=future, offset=offset, sees=sights)
    elif table is not None:
        bias = BucketBias(table, max_distance=max_distance, bidirectional=bidirectional)
    return Problem(
        q=q,
        k=k,
        v=v,
        bias=bias,
        causal=causal,
        scale=scale,
        tolerance=tolerance,
        key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens,
        query_start=start if start_tensor is None else start_tensor,
        key_norms=key_norms,
    )


def _windows_size(q: Tensor) -> int:
    """How many numbers the windows of a call are. Operators hand them on as one row: a dimension of query blocks is 1
    up to a length of BLOCK, and a compiler would make a graph for that case alone."""
    return q.shape[0] * q.shape[1] * -(-q.shape[2] // BLOCK) * 2


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@torch.library.custom_op("trainshort::blocked", mutates_args=())
def blocked_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    future: Tensor | None,
    table: Tensor | None,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    start_tensor: Tensor | None,
    key_norms: Tensor | None,
    start: int | None,
    causal: bool,
    scale: float,
    tolerance: float,
    offset: float,
    sees: list[int] | None,
    max_distance: int,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output like q, log-sum-exp [B, H, Tq], windows int32 [B * H * blocks * 2]: EVERYTHING if none were sought."""
    problem = unpack(
        q, k, v, slopes, future, table, key_padding_mask, cu_seqlens, start_tensor, key_norms, start, causal,
        scale, tolerance, offset, sees, max_distance, bidirectional,
    )  # fmt: skip
    check_values(problem)
    windows = blocked.windows_of(problem)
    out, lse = blocked.forward(problem, windows)
    if windows is None:
        windows = torch.full((_windows_size(q),), blocked.EVERYTHING, dtype=torch.int32, device=q.device)
    return out, lse, windows.reshape(-1)


@blocked_op.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(q),
        q.new_empty(q.shape[:3], dtype=_lse_dtype(q)),
        q.new_empty((_windows_size(q),), dtype=torch.int32),
    )


@torch.library.custom_op("trainshort::blocked_backward", mutates_args=())
def blocked_backward_op(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    windows: Tensor,
    want_bias: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    future: Tensor | None,
    table: Tensor | None,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    start_tensor: Tensor | None,
    key_norms: Tensor | None,
    start: int | None,
    causal: bool,
    scale: float,
    tolerance: float,
    offset: float,
    sees: list[int] | None,
    max_distance: int,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, slopes, future and table; the last three are empty unless wanted and there."""
    problem = unpack(
        q, k, v, slopes, future, table, key_padding_mask, cu_seqlens, start_tensor, key_norms, start, causal,
        scale, tolerance, offset, sees, max_distance, bidirectional,
    )  # fmt: skip
    visited = blocked.given_windows(windows.view(*q.shape[:2], -1, 2) if windows.numel() else windows)
    dq, dk, dv, bias = blocked.backward(problem, visited, out, lse, grad, want_bias)
    none = q.new_empty(0)
    return (
        dq,
        dk,
        dv,
        none if bias.past is None else bias.past,
        none.clone() if bias.future is None else bias.future,
        none.clone() if bias.table is None else bias.table,
    )


@blocked_backward_op.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, windows: Tensor, want_bias: bool, *args: Any) -> tuple[Tensor, ...]:
    return fake_gradients(gradient_like, want_bias, *args[:6])


def fake_gradients(
    layout: Callable[[Tensor], Tensor], want_bias: bool, q: Tensor, k: Tensor, v: Tensor, *bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Shapes and layouts of what a backward operator returns. layout: an empty gradient for one of q, k and v."""

    def like(tensor: Tensor | None) -> Tensor:
        return tensor.new_empty(tensor.shape) if want_bias and tensor is not None else q.new_empty(0)

    return (*(layout(t) for t in (q, k, v)), *(like(tensor) for tensor in bias))


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    out, lse, windows = output
    tensors, ctx.plain = inputs[:10], inputs[10:]
    ctx.save_for_backward(out, lse, windows, *tensors)
    ctx.mark_non_differentiable(lse, windows)


def gradients_by(operator: Any, ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """What autograd asks for, from a backward operator; None for whatever wants none."""
    out, lse, windows, *tensors = ctx.saved_tensors
    want_bias = any(ctx.needs_input_grad[3:6])
    dq, dk, dv, *bias = operator(grad, out, lse, windows, want_bias, *tensors, *ctx.plain)
    wanted = [
        gradient if ctx.needs_input_grad[3 + index] and tensors[3 + index] is not None else None
        for index, gradient in enumerate(bias)
    ]
    return dq, dk, dv, *wanted, *([None] * 12)


def _backward(ctx: Any, grad: Tensor, _lse: Any, _windows: Any) -> tuple[Any, ...]:
    return gradients_by(blocked_backward_op, ctx, grad)


def refuse_transforms(tensors: Sequence[Tensor]) -> None:
    """Of torch.func, and of forward mode: operators have no rules for them, and tangents would be lost."""
    if torch.compiler.is_compiling():
        return
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    if any(transform.key() != torch._C._functorch.TransformType.Functionalize for transform in transforms):
        raise NotImplementedError(
            "trainshort attention has no rules for torch.func (grad, vjp, jvp, vmap and what is made of them): use "
            "torch.autograd.grad or backward(), or backend='reference', which has"
        )
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError(
            "trainshort attention has no forward-mode derivatives: use backend='reference', which has"
        )


blocked_op.register_autograd(_backward, setup_context=save_for_backward)
blocked_backward_op.register_autograd(no_double_backward)
blocked_op.register_vmap(no_vmap)
blocked_backward_op.register_vmap(no_vmap)
