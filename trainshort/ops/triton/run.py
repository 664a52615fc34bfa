"""The Triton backend, as the rest of the package calls it. Importing this needs no Triton: the first call does.

`forward`, `backward` and `decode` are what the registered operators run. Operators cost a tenth of a millisecond on
the host, more than a short sequence takes the GPU, so where plain tensors are computed right now, `attend` does the
same without them; and a call like one before is not checked and described again (`cached_call`, `attend_cached`).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trainshort.ops.bias import DECAY, LINEAR, LOG2E, Bias, KernelBias, LinearBias
from trainshort.ops.problem import DEFAULT_TOLERANCE, Problem
from trainshort.ops.tracing import is_eager, is_recording, no_double_backward, no_vmap
from trainshort.ops.triton.cache import CACHE
from trainshort.ops.triton.call import Call, Rotation, Saved, Stored, Values, describe, may_skip
from trainshort.ops.triton.shapes import allows_tf32, borders_of, can_skip, layout_of, rows_contiguous, window_room
from trainshort.ops.values import check_values, require_positive

if TYPE_CHECKING:
    from trainshort.ops.triton.config import Config

_STAY: AbstractContextManager[None] = nullcontext()


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device: make it the tensor's."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return _STAY
    return torch.cuda.device(tensor.device)


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output like q, log2-sum-exp [B, H, Tq], windows int32 [B, H, width]: of width 0 where no length skips keys, and
    unwritten where this one does not. Values are not checked.

    Where it wants windows, twice Tq numbers more follow: first and one-past-last key of the window of each query.
    """
    from trainshort.ops.triton import launch

    q, k, v = problem.q, problem.k, problem.v
    visited = None
    with on_device(q):
        if problem.wants_windows:
            found = launch.forward_with_visited(describe(problem), q, k, v, problem.cu_seqlens)
            out, lse, windows, visited = found
        else:
            out, lse, windows = launch.forward(describe(problem), q, k, v)
    width = _window_width(problem)
    windows = windows if windows.shape[2] == width else windows.new_empty((*q.shape[:2], width))
    return out, lse, windows if visited is None else torch.cat((windows, visited.flatten(2)), dim=2)


def visited_keys(problem: Problem, windows: Tensor) -> tuple[Tensor, Tensor]:
    """First and one-past-last key of the window of each query, in sight or not: int32 [B, H, Tq].

    windows: as `forward` returned them for a problem that wants them.
    """
    first, end = windows[:, :, _window_width(problem) :].unflatten(2, (2, problem.q.shape[2])).unbind(2)
    return first, end


def fake(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """What `forward` returns, uninitialised."""
    q = problem.q
    width = _window_width(problem) + (2 * q.shape[2] if problem.wants_windows else 0)
    return (
        torch.empty_like(rows_contiguous(q)),
        q.new_empty(q.shape[:3], dtype=torch.float32),
        q.new_empty((*q.shape[:2], width), dtype=torch.int32),
    )


def _window_width(problem: Problem) -> int:
    """The last dimension of the windows of the backward pass: the same function of any length, for compilers."""
    if not may_skip(problem):
        return 0
    borders = borders_of(problem.cu_seqlens)
    return window_room(problem.q.shape[2], problem.k.shape[2], borders, problem.causal)


def backward(
    problem: Problem,
    grad: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    windows: Tensor,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Gradients of q, k and v, and by name those of the learned fields of the bias: none unless wanted.

    grad_lse: of the log2-sum-exp.
    """
    from trainshort.ops.triton import launch

    saved = Saved(problem.q, problem.k, problem.v, out, lse, windows[:, :, : _window_width(problem)])
    if grad_lse is not None:
        grad_lse = grad_lse * LOG2E
    with on_device(grad):
        dq, dk, dv, sums = launch.backward(describe(problem), saved, grad, want_bias, None, grad_lse)
        by_name = {} if problem.bias is None or sums is None else problem.bias.gradients(sums)
    return dq, dk, dv, by_name


def decode(problem: Problem) -> Tensor:
    """Output like q, for a few causal queries a row, forward only. Values are checked."""
    from trainshort.ops.triton import launch

    check_values(problem)
    with on_device(problem.q):
        return launch.decode(problem)[0]


def decode_with_lse(problem: Problem) -> tuple[Tensor, Tensor]:
    """The same, and the log-sum-exp of the scores of visited keys, float32 [B, H, Tq]."""
    from trainshort.ops.triton import launch

    check_values(problem)
    with on_device(problem.q):
        out, sums = launch.decode(problem)
        return out, torch.logsumexp(sums * math.log(2.0), dim=-1)


def append(k: Tensor, v: Tensor, stored: Stored, start: int = 0, sequences: Tensor | None = None) -> None:
    """Write new keys and values [B, Hkv, T, D] into a layer of a cache, and raise the norms of their blocks: from
    `start` on, or where the next query of each row stands (`sequences`, as `step` has them)."""
    from trainshort.ops.triton import launch

    with on_device(k):
        launch.append(k, v, stored, start, sequences)


def append_turned(q: Tensor, k: Tensor, v: Tensor, stored: Stored, sequences: Tensor, rotation: Rotation) -> Tensor:
    """The same where the next query of each row stands, by whose position q and k are turned first: q, turned."""
    from trainshort.ops.triton import launch

    with on_device(k):
        out = launch.append(k, v, stored, 0, sequences, q, rotation)
    assert out is not None
    return out


def step(q: Tensor, stored: Stored, sequences: Tensor, bias: KernelBias, scale: float) -> Tensor:
    """Attention of one query a row to the keys of a cache, whose number only the device knows: like q.

    sequences: int32 [B, 5], for each row 0, 1, its first key, its keys with the query's own, and the position of the
    query counted from the first key. Tolerance is the default; values are not checked.
    """
    from trainshort.ops.triton import launch

    tolerance = DEFAULT_TOLERANCE[q.dtype]
    norms = stored.norms if bias.kind in (LINEAR, DECAY) and can_skip(tolerance) else None
    keys, values, length = stored.keys, stored.values, stored.keys.shape[2]
    with on_device(q):
        return launch.run_decoding(
            launch.Decoding(
                rows_contiguous(q.detach()), keys, values, bias, norms, sequences, length, 0, scale, tolerance
            )
        )[0]


def rotate(q: Tensor, k: Tensor, positions: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Rotary embeddings, forward only: q and k [B, heads, T, D], positions int64 [B or 1, T]."""
    from trainshort.ops.triton import launch

    with on_device(q):
        return launch.rotate(q, k, positions, rotation)


def certified_blocks(problem: Problem, block: int) -> Tensor | None:
    """The windows that the kernels use, as trainshort.certified_windows gives them; None where they have none."""
    from trainshort.ops.triton import launch

    with on_device(problem.q):
        return launch.certified_blocks(problem, block)


class Attention(torch.autograd.Function):
    """The output of a call, with those of its tensors that autograd must see given apart.

    bias: None on a cached call; `learned` is then the slopes of a LinearBias.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, config: Config | None, bias: Bias | None, recording: bool, q: Tensor, k: Tensor,
        v: Tensor, *learned: Tensor | None,
    ) -> Tensor:  # fmt: skip
        from trainshort.ops.triton import launch

        out, lse, windows = launch.forward(call, q, k, v, config, recording)
        if recording:
            ctx.save_for_backward(q, k, v, out, lse, windows, *learned)
            ctx.call, ctx.config, ctx.bias = call, config, bias
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch._C._functorch.is_legacy_batchedtensor(grad) or torch._C._functorch.is_batchedtensor(grad):
            no_vmap(None, None)  # is_grads_batched=True: kernels would be handed tensors without memory
        wanted = ctx.needs_input_grad[4:]
        compute = _Gradients.apply if torch.is_grad_enabled() else _gradients
        gradients = compute(ctx.call, ctx.config, ctx.bias, any(wanted[3:]), grad, *ctx.saved_tensors)
        found = (gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
        return None, None, None, None, *found


class _Gradients(torch.autograd.Function):
    """Gradients as a function of their own, for those who ask for a graph of them: there is no double backward."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        config: Config | None,
        bias: Bias | None,
        want_bias: bool,
        grad: Tensor,
        *tensors: Tensor,
    ) -> Any:
        return _gradients(call, config, bias, want_bias, grad, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        no_double_backward(ctx, *gradients)


def _gradients(
    call: Call, config: Config | None, bias: Bias | None, want_bias: bool, grad: Tensor, *tensors: Any
) -> tuple[Tensor | None, ...]:
    """Those of q, k, v and of the learned tensors, in their order. tensors: as `Attention` saves them."""
    from trainshort.ops.triton import launch

    learned = tensors[6:]
    with on_device(grad):
        dq, dk, dv, sums = launch.backward(call, Saved(*tensors[:6]), grad, want_bias, config)
        if sums is None:
            return dq, dk, dv, *[None] * len(learned)
        by_name = (LinearBias(learned[0]) if bias is None else bias).gradients(sums)
    names = ("slopes",) if bias is None else bias.learned
    return dq, dk, dv, *(by_name.get(name) for name in names)


def attend(problem: Problem) -> Tensor:
    """Attention of plain tensors right now, differentiable, without the operators. Values are checked."""
    check_values(problem)
    bias = problem.bias
    learned = () if bias is None else tuple(getattr(bias, name) for name in bias.learned)
    tensors = (problem.q, problem.k, problem.v, *learned)
    with on_device(problem.q):
        return Attention.apply(describe(problem), None, bias, is_recording(*tensors), *tensors)


class CachedCall(NamedTuple):
    """A call with a LinearBias that was checked and has run: for others of the same signature."""

    config: Config
    values: Values  # all but the slopes


def cached_signature(
    q: Tensor, k: Tensor, v: Tensor, bias: LinearBias, causal: Any, scale: Any, tolerance: Any, query_start: Any
) -> tuple[Any, ...] | None:
    """What calls must have in common for one to stand for all; None where each must be looked at."""
    slopes = bias.slopes
    if not is_eager(q, k, v, slopes) or bias.future is not None:
        return None
    if type(causal) is not bool or not (query_start is None or type(query_start) is int):
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
        "call",
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
        query_start,
        dtype == torch.float32 and allows_tf32(),
    )


def cached_call(key: tuple[Any, ...]) -> CachedCall | None:
    return CACHE.get(key)


def attend_cached(call: CachedCall, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """A call like one before, with a LinearBias of these slopes."""
    require_positive("slopes", slopes, or_zero=True)
    config = call.config
    described = Call(config.features, {**call.values, "SLOPES": slopes, "FUTURES": slopes})
    with on_device(q):
        return Attention.apply(described, config, None, is_recording(q, k, v, slopes), q, k, v, slopes)


def remember(key: tuple[Any, ...], problem: Problem) -> None:
    """Keep a call that was checked and has run, if later ones need no copies of their tensors."""
    from trainshort.ops.triton.config import config_for

    tensors = (problem.q, problem.k, problem.v)
    if any(tensor.stride(-1) != 1 or tensor.numel() == 0 for tensor in tensors):
        return
    call = describe(problem)
    slopes = call.values["SLOPES"]
    if not isinstance(slopes, Tensor) or slopes.data_ptr() != problem.linear.slopes.data_ptr():
        return  # slopes are converted at each call
    kept = {name: value for name, value in call.values.items() if name not in ("SLOPES", "FUTURES")}
    CACHE.put(key, CachedCall(config_for(call.features, *tensors), kept))
