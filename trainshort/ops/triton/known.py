"""Calls that were checked and planned before: the same shapes, layouts and numbers need no second look.

Checking and describing a call anew takes the host as long as a short sequence takes the GPU. Needs no Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainshort.ops.bias import LinearBias
from trainshort.ops.problem import Problem
from trainshort.ops.triton.shapes import allows_tf32, layout_of

_PLAIN = (Tensor, torch.nn.Parameter)
_MOST = 512
_calls: dict[tuple[Any, ...], Known] = {}


class Known(NamedTuple):
    numbers: Any  # launch.Numbers
    plan: Any  # plan.Plan


def is_eager(*tensors: Tensor) -> bool:
    """Whether plain tensors are computed right now, with nobody tracing, transforming or listening."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return False
    return torch._C._functorch.peek_interpreter_stack() is None and torch._C._len_torch_dispatch_stack() == 0


def is_recording(*tensors: Tensor | None) -> bool:
    """Whether autograd wants to know of a call with these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def signature(
    q: Tensor, k: Tensor, v: Tensor, bias: LinearBias, causal: Any, scale: Any, tolerance: Any, start: Any
) -> tuple[Any, ...] | None:
    """By what a call is known again; None where each must be looked at."""
    slopes = bias.slopes
    if not is_eager(q, k, v, slopes) or bias.future is not None:
        return None
    if type(causal) is not bool or not (start is None or type(start) is int):
        return None
    for number in (scale, tolerance):
        if number is not None and type(number) not in (int, float):
            return None
    device, dtype = q.device, q.dtype
    if torch.is_autocast_enabled(device.type):
        cast = torch.get_autocast_dtype(device.type)
        if dtype != cast or k.dtype != cast or v.dtype != cast:
            return None
    return (
        *layout_of(q, k, v),
        v.shape,
        dtype,
        k.dtype,
        v.dtype,
        device,
        k.device,
        v.device,
        slopes.shape,
        slopes.stride(),
        slopes.dtype,
        slopes.device,
        slopes.data_ptr() % 16,
        bias.offset,
        bias.sees,
        causal,
        scale,
        tolerance,
        start,
        dtype == torch.float32 and allows_tf32(),
    )


def recall(key: tuple[Any, ...]) -> Known | None:
    return _calls.get(key)


def remember(key: tuple[Any, ...], problem: Problem) -> None:
    """A call that was checked and has run."""
    from trainshort.ops.triton import launch
    from trainshort.ops.triton.plan import plan_for

    tensors = (problem.q, problem.k, problem.v)
    call = launch.prepare(problem)
    if any(tensor.stride(-1) != 1 or tensor.numel() == 0 for tensor in tensors):
        return
    given = problem.bias.slopes if isinstance(problem.bias, LinearBias) else None
    if given is None or call.inputs.slopes is None or call.inputs.slopes.data_ptr() != given.data_ptr():
        return  # slopes are converted at each call
    if len(_calls) >= _MOST:
        _calls.clear()
    _calls[key] = Known(call.numbers, plan_for(call.kind, *tensors))
