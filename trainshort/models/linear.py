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
    layer: nn.Module, x: Tensor, *, activation: str = "", residual: Tensor | None = None, few_rows: bool = False
) -> Tensor:
    """activation(layer(x)) + residual, where there are such. few_rows: by the kernel for a decoding step.

    A layer that is no plain nn.Linear (a quantized one, one with adapters or hooks) is always called as a module.
    """
    if few_rows and is_plain_linear(layer) and layer.weight.dtype == x.dtype:
        from trainshort.ops.triton.few_rows import linear

        return linear(x, layer.weight, layer.bias, activation, residual)
    y = layer(x)
    if activation:
        y = ACTIVATIONS[activation](y)
    return y if residual is None else residual + y


def is_plain_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling it is weight and bias and nothing else."""
    if type(layer) is not nn.Linear or "forward" in layer.__dict__:
        return False
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return not hooks and type(layer.weight) in (Tensor, nn.Parameter)
