"""Who is watching a call (compilers, transforms and dispatch modes, autograd), and what all backends refuse them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def is_eager(*tensors: Tensor) -> bool:
    """Whether these are plain tensors and no torch.compile, functorch transform or dispatch mode is active."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return False
    return torch._C._functorch.peek_interpreter_stack() is None and torch._C._len_torch_dispatch_stack() == 0


def is_recording(*tensors: Tensor | None) -> bool:
    """Whether autograd will record a call with these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def no_double_backward(ctx: Any, *gradients: Any) -> None:
    raise RuntimeError(
        "trainshort attention has no double backward: use backend='reference' for gradients of gradients"
    )


def no_vmap(info: Any, in_dims: Any, *args: Any) -> None:
    raise NotImplementedError(
        "trainshort attention has no vmap: it is batched already, over its first two dimensions"
    )
