"""What torch is doing with a call besides computing it: tracing, transforming, recording for autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)


def is_eager(*tensors: Tensor) -> bool:
    """Whether these are plain tensors, and no torch.compile, functorch transform or dispatch mode is active."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return False
    return torch._C._functorch.peek_interpreter_stack() is None and torch._C._len_torch_dispatch_stack() == 0


def is_recording(*tensors: Tensor | None) -> bool:
    """Whether autograd records a call with these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def refuse_transforms(
    tensors: Sequence[Tensor], *, name: str = "trainshort attention", instead: str = "backend='reference', which has"
) -> None:
    """Raise under torch.func and forward-mode AD: operators have no rules for them, and tangents would be lost."""
    if torch.compiler.is_compiling():
        return
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    if any(transform.key() != torch._C._functorch.TransformType.Functionalize for transform in transforms):
        raise NotImplementedError(
            f"{name} has no rules for torch.func (grad, vjp, jvp, vmap and what is made of them): use "
            f"torch.autograd.grad or backward(), or {instead}"
        )
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError(f"{name} has no forward-mode derivatives: use {instead}")


def no_double_backward(ctx: Any, *gradients: Any) -> None:
    raise RuntimeError(
        "trainshort attention has no double backward: use backend='reference' for gradients of gradients"
    )


def no_vmap(info: Any, in_dims: Any, *args: Any) -> None:
    raise NotImplementedError(
        "trainshort attention has no vmap: it is batched already, over its first two dimensions"
    )
