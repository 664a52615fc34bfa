"""A linear layer and the cross entropy of its logits in one operation, which never holds all logits.

Tokens are taken in chunks. The logits of a chunk are computed, their losses found, and where gradients are wanted the
logits are overwritten with theirs, which at once give the chunk's share of the gradients of hidden states, weight and
bias. So nothing of the size of the logits outlives a chunk, nothing is computed twice, and the backward pass only
multiplies by the gradient of the loss. Without a reduction the factors of the tokens are not known in time: then the
forward pass keeps a log-sum-exp for each token, and the backward pass computes the logits again.

The gradient of the weight is summed over chunks in float32 and never rounded to 16 bits on its way to a float32
weight. These are registered operators: compilers see one call, whatever the number of chunks. (torch 2.13 has an
`F.linear_cross_entropy`, but it sums the weight's gradient in the dtype of the weight, ignores autocast, and compiles
to a graph that grows with the number of tokens, or not at all. So it is not used.)

Memory at the peak, beyond weights and activations: the logits of one chunk, `LOGITS_AT_ONCE` elements, which on a GPU
in 16 bits are 512 MiB (on a CPU they are there twice, or in 16 bits three times); the gradient of the hidden states
[N, d], and that of the weight [V, d] in float32, in the backward pass twice; under autocast a copy of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainshort.models.linear import is_plain_linear
from trainshort.ops import HAS_TRITON
from trainshort.ops.tracing import is_recording, refuse_transforms

# Elements of the logits of one chunk, by device type.
LOGITS_AT_ONCE = {"cpu": 2**24, "cuda": 2**28}
ALIGNED = 64  # elements: on a GPU rows of logits start at multiples of it, which matrix products want
REDUCTIONS = ("mean", "sum", "none")
INSTEAD = "F.cross_entropy on the logits, model(tokens), which has"


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """The cross entropy of logits `hidden @ weight.T + bias`, in nats, without ever holding all of them.

    Products are computed in the dtype of the inputs, or of autocast. A target that is neither ignore_index nor in
    [0, V) raises an IndexError on a CPU; on a GPU its loss is NaN.

    Args:
        hidden: [N, d].
        weight: [V, d].
        targets: int32 or int64 [N].
        bias: [V] or None.
        ignore_index: The target that does not count.
        reduction: "mean" over the targets that count, "sum", or "none".

    Returns:
        The loss, or [N] losses with "none", in float32, or float64 for float64 inputs.

    Example:
        >>> hidden, weight = torch.randn(500, 64), torch.randn(1000, 64, requires_grad=True)
        >>> ts.linear_cross_entropy(hidden, weight, torch.randint(1000, (500,))).backward()
    """
    _check(hidden, weight, bias, targets, reduction)
    given = [hidden, weight] if bias is None else [hidden, weight, bias]
    refuse_transforms(given, name="trainshort's linear_cross_entropy", instead=INSTEAD)
    # Outside the operator, so that a compiler makes it one with what comes before.
    hidden = hidden.to(_dtype_of_products(hidden, weight))
    targets = targets.long()
    if reduction == "none":
        losses, _ = rows_op(hidden, weight, bias, targets, ignore_index)
        return losses
    wanted = [each is not None and is_recording(each) for each in (hidden, weight, bias)]
    total, _, _, _ = sum_op(hidden, weight, bias, targets, ignore_index, wanted)
    return total if reduction == "sum" else _mean(total, targets, ignore_index)


def head_loss(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """`linear_cross_entropy` of a model's head: hidden [N, d], targets [N].

    A head that is no plain nn.Linear (a quantized one, one with adapters or hooks) is called as a module, for so many
    tokens at a time, and its logits are computed again in the backward pass. That compiles to a graph that grows with
    the number of tokens.
    """
    if is_plain_linear(head):
        return linear_cross_entropy(
            hidden, head.weight, targets, bias=head.bias, ignore_index=ignore_index, reduction=reduction
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be mean, sum or none; got {reduction!r}")
    targets = targets.long()
    losses = _losses_of_module(head, hidden, targets, ignore_index, max(1, LOGITS_AT_ONCE["cpu"] // vocab_size))
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else _mean(losses.sum(), targets, ignore_index)


def _losses_of_module(head: nn.Module, hidden: Tensor, targets: Tensor, ignore_index: int, step: int) -> Tensor:
    def losses(part: Tensor, goal: Tensor) -> Tensor:
        logits = head(part)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, goal, ignore_index=ignore_index, reduction="none")

    if hidden.shape[0] <= step:
        return losses(hidden, targets)
    parts = zip(hidden.split(step), targets.split(step), strict=True)
    return torch.cat([checkpoint(losses, part, goal, use_reentrant=False) for part, goal in parts])


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be mean, sum or none; got {reduction!r}")
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden must be [N, d] and weight [V, d], got {list(hidden.shape)}, {list(weight.shape)}")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets must be [{hidden.shape[0]}] like hidden, got {list(targets.shape)}")
    if targets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"targets must be int32 or int64, got {targets.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}] like weight, got {list(bias.shape)}")


def _dtype_of_products(hidden: Tensor, weight: Tensor) -> torch.dtype:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    if hidden.dtype != weight.dtype:
        raise TypeError(f"hidden is {hidden.dtype} and weight {weight.dtype}: they must be alike outside of autocast")
    return hidden.dtype


def _mean(total: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """NaN with zero gradients where no target counts, as F.cross_entropy has it."""
    count = (targets != ignore_index).sum()
    return torch.where(count > 0, total / count.clamp_min(1), math.nan)


# What the operators compute


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Of losses and of sums: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of the losses and, where wanted, its gradients: that of hidden in its dtype, the others in float32."""
    _check_targets(targets, weight.shape[0], ignore_index)
    total = hidden.new_zeros((), dtype=_wide(hidden.dtype))

    def add(logits: Tensor, offset: Tensor | None, rows: slice) -> None:
        losses, _ = _losses_of(logits, offset, targets[rows], ignore_index, any(wanted))
        total.add_(losses.sum())

    return total, *_in_chunks(hidden, weight, bias, wanted, add)


def _rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The loss of each row and its log-sum-exp."""
    _check_targets(targets, weight.shape[0], ignore_index)
    losses, lse = (hidden.new_empty(len(hidden), dtype=_wide(hidden.dtype)) for _ in range(2))

    def put(logits: Tensor, offset: Tensor | None, rows: slice) -> None:
        losses[rows], lse[rows] = _losses_of(logits, offset, targets[rows], ignore_index, False)

    _in_chunks(hidden, weight, bias, [False, False, False], put)
    return losses, lse


def _rows_backward(
    factors: Tensor,
    lse: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the sum of factors times losses."""

    def leave(logits: Tensor, offset: Tensor | None, rows: slice) -> None:
        _leave_gradients(logits, offset, targets[rows], ignore_index, lse[rows], factors[rows])

    return _in_chunks(hidden, weight, bias, wanted, leave)


def _in_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wanted: list[bool],
    visit: Callable[[Tensor, Tensor | None, slice], None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Let `visit` see the logits of each chunk of rows, and the bias if it is not in them yet. If gradients are
    wanted, it leaves those of the logits there.

    Returns the gradients of hidden, weight and bias, empty where they are not wanted.
    """
    want_hidden, want_weight, want_bias = wanted
    d_hidden, d_weight, d_bias = _empty_gradients(hidden, weight, bias, wanted)
    with torch.autocast(hidden.device.type, enabled=False):
        matrix = weight.detach().to(hidden.dtype)
        offset = None if bias is None else bias.detach().contiguous()
        for rows, logits in _chunks(hidden, matrix.shape[0]):
            chunk = hidden.detach()[rows]
            if offset is None or _has_kernel(logits):  # the kernel adds it, in float32
                torch.mm(chunk, matrix.t(), out=logits)
                visit(logits, offset, rows)
            else:
                torch.addmm(offset.to(hidden.dtype), chunk, matrix.t(), out=logits)
                visit(logits, None, rows)
            if want_hidden:
                torch.mm(logits, matrix, out=d_hidden[rows])
            if want_weight:
                _add_product(d_weight, logits.t(), chunk)
            if want_bias:
                d_bias += logits.sum(0, dtype=d_bias.dtype)
    return d_hidden, d_weight, d_bias


def _chunks(hidden: Tensor, vocabulary: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows, and room for their logits, which all chunks share."""
    count = hidden.shape[0]
    width = -(-vocabulary // ALIGNED) * ALIGNED if hidden.is_cuda else vocabulary
    step = max(1, min(count, LOGITS_AT_ONCE.get(hidden.device.type, LOGITS_AT_ONCE["cpu"]) // max(1, width)))
    step -= step % 128 if step > 128 else 0
    room = hidden.new_empty(step, width)[:, :vocabulary]
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        yield rows, room[: rows.stop - rows.start]


def _add_product(total: Tensor, one: Tensor, two: Tensor) -> None:
    """total += one @ two, with total in float32 also for factors of 16 bits."""
    if one.dtype == total.dtype:
        total.addmm_(one, two)
    elif one.is_cuda:
        torch.addmm(total, one, two, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(one.to(total.dtype), two.to(total.dtype))


def _empty_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of hidden without contents, as it is written a chunk at a time; of the others zeros, as chunks are added."""
    want_hidden, want_weight, want_bias = wanted
    wide = _wide(hidden.dtype)
    return (
        hidden.new_empty(hidden.shape if want_hidden else (0,)),
        weight.new_zeros(weight.shape if want_weight else (0,), dtype=wide),
        hidden.new_zeros(bias.shape if want_bias and bias is not None else (0,), dtype=wide),
    )


# Rows of logits: by a kernel on a GPU, by torch elsewhere


def _has_kernel(logits: Tensor) -> bool:
    return HAS_TRITON and logits.is_cuda and logits.dtype != torch.float64


def _losses_of(
    logits: Tensor, offset: Tensor | None, targets: Tensor, ignore_index: int, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exp of rows. gradient: leave that of the sum of the losses in place of the logits. offset:
    a bias that is not in the logits, which the kernel adds."""
    if _has_kernel(logits):
        from trainshort.models import loss_kernel

        return loss_kernel.losses_of(logits, targets, ignore_index, gradient, offset)
    counts = targets != ignore_index
    index = targets.where(counts, 0)[:, None]
    logs = torch.log_softmax(logits, 1, dtype=_wide(logits.dtype))
    picked = logs.gather(1, index)[:, 0]
    losses = torch.where(counts, -picked, 0.0)
    lse = logits.amax(1) - logs.amax(1)  # of the largest: nothing cancels
    if gradient:
        _put_gradients(logits, logs, index, counts)
    return losses, lse


def _leave_gradients(
    logits: Tensor, offset: Tensor | None, targets: Tensor, ignore_index: int, lse: Tensor, factors: Tensor
) -> None:
    """Put the gradient of each row's loss, times its factor, in place of the logits."""
    if _has_kernel(logits):
        from trainshort.models import loss_kernel

        loss_kernel.leave_gradients(logits, targets, ignore_index, lse, factors, offset)
        return
    counts = targets != ignore_index
    index = targets.where(counts, 0)[:, None]
    _put_gradients(logits, logits - lse[:, None], index, counts, factors)


def _put_gradients(
    logits: Tensor, logs: Tensor, index: Tensor, counts: Tensor, factors: Tensor | None = None
) -> None:
    """Softmax - onehot in place of the logits, from logs, the logarithm of the softmax, whose memory may be used."""
    gradient = torch.exp(logs, out=logits if logits.dtype == logs.dtype else logs)
    gradient.scatter_(1, index, gradient.gather(1, index) - 1.0)
    if factors is not None:
        gradient.mul_(factors[:, None])
    if logits.device.type != "cpu" or not bool(counts.all()):
        gradient.masked_fill_(~counts[:, None], 0.0)
    if gradient is not logits:
        logits.copy_(gradient)


def _check_targets(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    if targets.device.type != "cpu":
        return  # asking would wait for the device
    bad = (targets != ignore_index) & ((targets < 0) | (targets >= vocabulary))
    if bool(bad.any()):
        raise IndexError(
            f"targets must lie in [0, {vocabulary}) or be ignore_index ({ignore_index}); got {int(targets[bad][0])}"
        )


# The same as registered operators


def _fake_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return hidden.new_empty((), dtype=_wide(hidden.dtype)), *_empty_gradients(hidden, weight, bias, wanted)


def _fake_rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    wide = _wide(hidden.dtype)
    return hidden.new_empty(hidden.shape[:1], dtype=wide), hidden.new_empty(hidden.shape[:1], dtype=wide)


def _fake_rows_backward(factors: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, bias, _, _, wanted = inputs
    return _empty_gradients(hidden, weight, bias, wanted)


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():  # in a backward pass: with create_graph=True
        raise RuntimeError(f"trainshort's linear_cross_entropy has no double backward: use {INSTEAD}")


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias = inputs[:3]
    ctx.dtypes = [hidden.dtype, weight.dtype, None if bias is None else bias.dtype]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _sum_gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    _refuse_double_backward()
    found = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad, strict=False)
    # A factor of one dimension is not rounded to 16 bits before it is used, as one of none would be.
    factor = grad.view(1)
    scaled = (
        torch.mul(each, factor, out=torch.empty_like(each, dtype=dtype)) if needed else None
        for each, dtype, needed in found
    )
    return *scaled, None, None, None


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, bias, targets, ctx.ignore_index = inputs
    ctx.save_for_backward(output[1], hidden, weight, bias, targets)
    ctx.mark_non_differentiable(output[1])


def _rows_gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    _refuse_double_backward()
    lse, hidden, weight, bias, targets = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    found = rows_backward_op(grad, lse, hidden, weight, bias, targets, ctx.ignore_index, wanted)
    inputs = zip(found, (hidden, weight, bias), wanted, strict=True)
    return *(gradient.to(each.dtype) if needed else None for gradient, each, needed in inputs), None, None


def _no_vmap(info: Any, in_dims: Any, *args: Any) -> None:
    raise NotImplementedError(f"trainshort's linear_cross_entropy has no vmap: flatten the rows, or use {INSTEAD}")


def _operator(name: str, function: Callable[..., Any], fake: Callable[..., Any], schema: str) -> Any:
    operator = torch.library.custom_op(f"trainshort::{name}", function, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    operator.register_vmap(_no_vmap)
    return operator


_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, int ignore_index"
sum_op = _operator(
    "linear_cross_entropy_sum", _sum, _fake_sum, f"({_INPUTS}, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)"
)
rows_op = _operator("linear_cross_entropy_rows", _rows, _fake_rows, f"({_INPUTS}) -> (Tensor, Tensor)")
rows_backward_op = _operator(
    "linear_cross_entropy_rows_backward",
    _rows_backward,
    _fake_rows_backward,
    f"(Tensor factors, Tensor lse, {_INPUTS}, bool[] wanted) -> (Tensor, Tensor, Tensor)",
)
sum_op.register_autograd(_sum_gradients, setup_context=_save_sum)
rows_op.register_autograd(_rows_gradients, setup_context=_save_rows)
