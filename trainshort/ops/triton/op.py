"""The Triton kernels as operators for autograd and compilers. Importing this needs no Triton: the first call does.

`trainshort::triton` and its companions are registered operators: opaque to compilers, capturable, checkable. They
cost a tenth of a millisecond on the host, more than a short sequence on the GPU, so where plain tensors are computed
right now, `Attention` does the same without the registry.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trainshort.ops.bias import learned
from trainshort.ops.operators import (
    fake_gradients,
    gradients_by,
    no_double_backward,
    no_vmap,
    save_for_backward,
    unpack,
)
from trainshort.ops.problem import Problem
from trainshort.ops.triton.known import Known, is_recording
from trainshort.ops.triton.shapes import borders_of, can_skip, gradient_of, rows_contiguous, window_room
from trainshort.ops.values import check_values, require_positive


@torch.library.custom_op("trainshort::triton", mutates_args=())
def triton_op(
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
    """Output like q, log2-sum-exp [B, H, Tq], windows int32 [B, H, width]: of width 0 where no length skips keys, and
    unwritten where this one does not."""
    from trainshort.ops.triton import launch

    problem = unpack(
        q, k, v, slopes, future, table, key_padding_mask, cu_seqlens, start_tensor, key_norms, start, causal,
        scale, tolerance, offset, sees, max_distance, bidirectional,
    )  # fmt: skip
    check_values(problem)
    with on_device(q):
        out, lse, windows = launch.forward(launch.prepare(problem), q, k, v)
    width = _width(q, k, slopes, cu_seqlens, causal, tolerance)
    return out, lse, windows if windows.shape[2] == width else windows.new_empty((*q.shape[:2], width))


def _width(
    q: Tensor, k: Tensor, slopes: Tensor | None, cu_seqlens: Tensor | None, causal: bool, tolerance: float
) -> int:
    if slopes is None or not can_skip(tolerance):
        return 0
    return window_room(q.shape[2], k.shape[2], borders_of(cu_seqlens), causal)


@triton_op.register_fake
def _(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    width = _width(q, k, slopes=rest[1], cu_seqlens=rest[5], causal=rest[9], tolerance=rest[11])
    return (
        torch.empty_like(rows_contiguous(q)),
        q.new_empty(q.shape[:3], dtype=torch.float32),
        q.new_empty((*q.shape[:2], width), dtype=torch.int32),
    )


@torch.library.custom_op("trainshort::triton_backward", mutates_args=())
def triton_backward_op(
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
    from trainshort.ops.triton import launch

    problem = unpack(
        q, k, v, slopes, future, table, key_padding_mask, cu_seqlens, start_tensor, key_norms, start, causal,
        scale, tolerance, offset, sees, max_distance, bidirectional,
    )  # fmt: skip
    saved = launch.Saved(q, k, v, slopes, future, table, out, lse, windows)
    with on_device(q):
        dq, dk, dv, bias = launch.backward(launch.prepare(problem), grad, saved, want_bias)
    dpast, dfuture, dtable = (q.new_empty(0) if gradient is None else gradient for gradient in bias)
    return dq, dk, dv, dpast, dfuture, dtable


@triton_backward_op.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, windows: Tensor, want_bias: bool, *args: Any) -> tuple[Tensor, ...]:
    return fake_gradients(gradient_of, want_bias, *args[:6])


def _backward(ctx: Any, grad: Tensor, _lse: Any, _windows: Any) -> tuple[Any, ...]:
    return gradients_by(triton_backward_op, ctx, grad)


triton_op.register_autograd(_backward, setup_context=save_for_backward)
triton_backward_op.register_autograd(no_double_backward)
triton_op.register_vmap(no_vmap)
triton_backward_op.register_vmap(no_vmap)


@torch.library.custom_op("trainshort::triton_decode", mutates_args=())
def triton_decode_op(
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
) -> Tensor:
    """Output like q, for a few causal queries a row and without a way back."""
    from trainshort.ops.triton import decoding

    problem = unpack(
        q, k, v, slopes, future, table, key_padding_mask, cu_seqlens, start_tensor, key_norms, start, causal,
        scale, tolerance, offset, sees, max_distance, bidirectional,
    )  # fmt: skip
    check_values(problem)
    with on_device(q):
        return decoding.decode(problem)


@triton_decode_op.register_fake
def _(q: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(rows_contiguous(q))


triton_decode_op.register_vmap(no_vmap)


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device: make it the tensor's."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return _STAY
    return torch.cuda.device(tensor.device)


_STAY: AbstractContextManager[None] = nullcontext()


class Attention(torch.autograd.Function):
    """Output of a call, with those of its tensors that autograd must see given apart."""

    @staticmethod
    def forward(
        ctx: Any, call: Any, plan: Any, recording: bool, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor | None
    ) -> Tensor:
        from trainshort.ops.triton import launch

        out, lse, windows = launch.forward(call, q, k, v, plan, recording)
        if recording:
            ctx.save_for_backward(q, k, v, *learned, out, lse, windows)
            ctx.call, ctx.plan = call, plan
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch._C._functorch.is_legacy_batchedtensor(grad) or torch._C._functorch.is_batchedtensor(grad):
            no_vmap(None, None)  # is_grads_batched=True: kernels would be handed tensors without memory
        wanted = ctx.needs_input_grad
        compute = _Gradients.apply if torch.is_grad_enabled() else _gradients
        gradients = compute(ctx.call, ctx.plan, any(wanted[6:]), grad, *ctx.saved_tensors)
        found = (gradient if want else None for gradient, want in zip(gradients, wanted[3:], strict=True))
        return None, None, None, *found


class _Gradients(torch.autograd.Function):
    """Gradients as a function of their own, for those who ask for a graph of them: it has no way back."""

    @staticmethod
    def forward(ctx: Any, call: Any, plan: Any, want_bias: bool, grad: Tensor, *saved: Tensor) -> Any:
        return _gradients(call, plan, want_bias, grad, *saved)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        no_double_backward(ctx, *gradients)


def _gradients(call: Any, plan: Any, want_bias: bool, grad: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
    from trainshort.ops.triton import launch

    with on_device(grad):
        dq, dk, dv, bias = launch.backward(call, grad, launch.Saved(*saved), want_bias, plan)
    return (dq, dk, dv, *bias)


def attend(problem: Problem) -> Tensor:
    """The same as the operator, for plain tensors right now."""
    from trainshort.ops.triton import launch

    check_values(problem)
    tensors = (problem.q, problem.k, problem.v, *learned(problem.bias))
    with on_device(problem.q):
        return Attention.apply(launch.prepare(problem), None, is_recording(*tensors), *tensors)


def attend_again(known: Known, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """A call that is known, with a LinearBias of these slopes."""
    from trainshort.ops.triton import launch

    require_positive("slopes", slopes)
    call = launch.Call(known.plan.kind, known.numbers, launch.Inputs(slopes, slopes))
    with on_device(q):
        return Attention.apply(call, known.plan, is_recording(q, k, v, slopes), q, k, v, slopes, None, None)


def decode(problem: Problem) -> Tensor:
    from trainshort.ops.triton import decoding

    check_values(problem)
    with on_device(problem.q):
        return decoding.decode(problem)


def certified_blocks(problem: Problem, block: int) -> Tensor | None:
    """The windows that the kernels use, as trainshort.certified_windows gives them; None where they have none."""
    from trainshort.ops.triton import launch

    with on_device(problem.q):
        return launch.certified_blocks(problem, block)
