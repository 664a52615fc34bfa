"""The Triton kernels as registered operators: opaque to compilers, capturable, checkable. Importing this needs no
Triton: the first call does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainshort.ops.operators import fake_gradients, gradients_by, save_for_backward, unpack
from trainshort.ops.tracing import no_double_backward, no_vmap
from trainshort.ops.triton import run
from trainshort.ops.triton.shapes import borders_of, gradient_of, rows_contiguous
from trainshort.ops.values import check_values


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
    problem = unpack(
        q, k, v, slopes, future, table, key_padding_mask, cu_seqlens, start_tensor, key_norms, start, causal,
        scale, tolerance, offset, sees, max_distance, bidirectional,
    )  # fmt: skip
    check_values(problem)
    return run.forward(problem)


@triton_op.register_fake
def _(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    width = run.window_width_of(q, k, rest[1] is not None, borders_of(rest[5]), causal=rest[9], tolerance=rest[11])
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
    problem = unpack(
        q, k, v, slopes, future, table, key_padding_mask, cu_seqlens, start_tensor, key_norms, start, causal,
        scale, tolerance, offset, sees, max_distance, bidirectional,
    )  # fmt: skip
    dq, dk, dv, by_name = run.backward(problem, grad, out, lse, windows, want_bias)
    dslopes, dfuture, dtable = (
        by_name[name] if name in by_name else q.new_empty(0) for name in ("slopes", "future", "table")
    )
    return dq, dk, dv, dslopes, dfuture, dtable


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
    """Output like q, for a few causal queries a row, forward only."""
    problem = unpack(
        q, k, v, slopes, future, table, key_padding_mask, cu_seqlens, start_tensor, key_norms, start, causal,
        scale, tolerance, offset, sees, max_distance, bidirectional,
    )  # fmt: skip
    return run.decode(problem)


@triton_decode_op.register_fake
def _(q: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(rows_contiguous(q))


triton_decode_op.register_vmap(no_vmap)
