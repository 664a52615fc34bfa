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

from trainshort.attention.bias import Bias, BucketBias, LinearBias
from trainshort.attention.op import (
    fake_gradients,
    gradients_by,
    no_double_backward,
    no_vmap,
    save_for_backward,
    unpack,
)
from trainshort.attention.problem import Problem, check_values
from trainshort.attention.triton.shapes import window_width


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
    """Output like q, log2-sum-exp [B, H, Tq], windows int32 [B, H, width] (width 0 where everything is visited)."""
    from trainshort.attention.triton import launch

    problem = unpack(
        q, k, v, slopes, future, table, key_padding_mask, cu_seqlens, start_tensor, key_norms, start, causal,
        scale, tolerance, offset, sees, max_distance, bidirectional,
    )  # fmt: skip
    check_values(problem)
    with on_device(q):
        return launch.forward(problem)


@triton_op.register_fake
def _(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    slopes, cu_seqlens, causal, tolerance = rest[1], rest[5], rest[9], rest[11]
    width = window_width(q, k, slopes is not None, cu_seqlens, causal, tolerance)
    return (
        torch.empty_like(q),
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
    from trainshort.attention.triton import launch

    problem = unpack(
        q, k, v, slopes, future, table, key_padding_mask, cu_seqlens, start_tensor, key_norms, start, causal,
        scale, tolerance, offset, sees, max_distance, bidirectional,
    )  # fmt: skip
    with on_device(q):
        dq, dk, dv, bias = launch.backward(problem, grad, out, lse, windows, want_bias)
    dpast, dfuture, dtable = (q.new_empty(0) if gradient is None else gradient for gradient in bias)
    return dq, dk, dv, dpast, dfuture, dtable


@triton_backward_op.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, windows: Tensor, want_bias: bool, *args: Any) -> tuple[Tensor, ...]:
    return fake_gradients(want_bias, *args[:6])


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
    from trainshort.attention.triton import decoding

    problem = unpack(
        q, k, v, slopes, future, table, key_padding_mask, cu_seqlens, start_tensor, key_norms, start, causal,
        scale, tolerance, offset, sees, max_distance, bidirectional,
    )  # fmt: skip
    check_values(problem)
    with on_device(q):
        return decoding.decode(problem)


@triton_decode_op.register_fake
def _(q: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(q)


triton_decode_op.register_vmap(no_vmap)


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device: make it the tensor's."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return _STAY
    return torch.cuda.device(tensor.device)


_STAY: AbstractContextManager[None] = nullcontext()


class Attention(torch.autograd.Function):
    """Output of a problem whose tensors are given apart, so that autograd sees them."""

    @staticmethod
    def forward(
        ctx: Any, problem: Problem, q: Tensor, k: Tensor, v: Tensor, slopes: Any, future: Any, table: Any
    ) -> Tensor:
        from trainshort.attention.triton import launch

        out, lse, windows = launch.forward(problem)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(out, lse, windows, q, k, v, slopes, future, table)
            ctx.rest = _rest(problem)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        wanted = ctx.needs_input_grad
        compute = _Gradients.apply if torch.is_grad_enabled() else _gradients
        gradients = compute(ctx.rest, any(wanted[4:]), grad, *ctx.saved_tensors)
        return None, *(gradient if want else None for gradient, want in zip(gradients, wanted[1:], strict=True))


class _Gradients(torch.autograd.Function):
    """Gradients as a function of their own, for those who ask for a graph of them: it has no way back."""

    @staticmethod
    def forward(ctx: Any, rest: Any, want_bias: bool, grad: Tensor, *saved: Tensor) -> Any:
        return _gradients(rest, want_bias, grad, *saved)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        no_double_backward(ctx, *gradients)


def _gradients(rest: Any, want_bias: bool, grad: Tensor, *saved: Tensor) -> tuple[Tensor | None, ...]:
    from trainshort.attention.triton import launch

    out, lse, windows, *tensors = saved
    with on_device(out):
        dq, dk, dv, bias = launch.backward(_whole(rest, *tensors), grad, out, lse, windows, want_bias)
    return (dq, dk, dv, *bias)


def _rest(problem: Problem) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """A problem without the tensors that autograd saves: hooks may store those elsewhere."""
    bias = problem.bias
    described: tuple[Any, ...] = ()
    if isinstance(bias, LinearBias):
        described = (bias.offset, bias.sees)
    elif isinstance(bias, BucketBias):
        described = (bias.max_distance, bias.bidirectional)
    kept = ("causal", "scale", "tolerance", "key_padding_mask", "cu_seqlens", "query_start", "key_norms")
    return {name: getattr(problem, name) for name in kept}, described


def _whole(rest: Any, q: Tensor, k: Tensor, v: Tensor, slopes: Any, future: Any, table: Any) -> Problem:
    fields, described = rest
    bias: Bias = None
    if slopes is not None:
        bias = LinearBias(slopes, future, *described)
    elif table is not None:
        bias = BucketBias(table, *described)
    return Problem(q=q, k=k, v=v, bias=bias, **fields)


def attend(problem: Problem) -> Tensor:
    """The same as the operator, for plain tensors right now."""
    bias = problem.bias
    linear = bias if isinstance(bias, LinearBias) else None
    check_values(problem)
    tensors = (
        linear.slopes if linear else None,
        linear.future if linear else None,
        bias.table if isinstance(bias, BucketBias) else None,
    )
    with on_device(problem.q):
        return Attention.apply(problem, problem.q, problem.k, problem.v, *tensors)


def decode(problem: Problem) -> Tensor:
    from trainshort.attention.triton import decoding

    check_values(problem)
    with on_device(problem.q):
        return decoding.decode(problem)


def certified_blocks(problem: Problem, block: int) -> Tensor | None:
    """The windows that the kernels use, as trainshort.certified_windows gives them; None where they have none."""
    from trainshort.attention.triton import launch

    with on_device(problem.q):
        return launch.certified_blocks(problem, block)
