"""Linear layers as a model calls them: as modules, or in a decoding step by one kernel with what comes after."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def project(
    layer: nn.Module,
    x: Tensor,
    *,
    norm: nn.Module | None = None,
    activation: str = "",
    residual: Tensor | None = None,
    few_rows: bool = False,
) -> Tensor:
    """activation(layer(norm(x))) + residual, where there are such. few_rows: by the kernel for a decoding step.

    A layer that is no plain nn.Linear (a quantized one, one with adapters or hooks), or whose weight is not stored
    row by row, is always called as a module.
    """
    if few_rows and is_plain_linear(layer) and layer.weight.dtype == x.dtype and layer.weight.stride(1) == 1:
        from trainshort.ops.triton.few_rows import Norm, linear

        before = None
        if norm is not None and is_plain_norm(norm):
            kind = "rmsnorm" if isinstance(norm, nn.RMSNorm) else "layernorm"
            before = Norm(kind, norm.weight, getattr(norm, "bias", None), norm.eps or 0.0)
        elif norm is not None:
            x = norm(x)
        return linear(x, layer.weight, layer.bias, norm=before, activation=activation, residual=residual)
    y = layer(x if norm is None else norm(x))
    if activation:
        y = ACTIVATIONS[activation](y)
    return y if residual is None else residual + y


def is_plain_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling it is weight and bias and nothing else."""
    return type(layer) is nn.Linear and _is_plain(layer)


def is_plain_norm(layer: nn.Module) -> TypeGuard[nn.LayerNorm | nn.RMSNorm]:
    return type(layer) in (nn.LayerNorm, nn.RMSNorm) and layer.eps is not None and _is_plain(layer)


def _is_plain(layer: nn.Module) -> bool:
    if "forward" in layer.__dict__ or type(layer.weight) not in (Tensor, nn.Parameter):
        return False
    return not (
        layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    )
