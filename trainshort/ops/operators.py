"""The backends as registered operators, so that compilers and autograd see one opaque call.

Operators take flat arguments. They are not listed here: `ARGUMENTS` is made of the fields of `Problem` and of every
class of `BIASES`, and with it come the operators' schemas, `pack` and `unpack`, the shapes that compilers ask for
and the places of gradients.

    trainshort::blocked, trainshort::triton                      output, log-sum-exp and windows
    trainshort::blocked_backward, trainshort::triton_backward    gradients
    trainshort::triton_decode, trainshort::triton_decode_lse     output; with the log-sum-exp: forward only
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainshort.ops.bias import FIELD_TYPES, SIGHTS, Bias
from trainshort.ops.biases import BIASES
from trainshort.ops.blocked import run as blocked_backend
from trainshort.ops.problem import Problem, gradient_like
from trainshort.ops.tracing import no_double_backward, no_vmap
from trainshort.ops.triton import run as triton_backend
from trainshort.ops.triton.shapes import gradient_of
from trainshort.ops.values import check_values

Results = tuple[Tensor, Tensor, Tensor]  # output, log-sum-exp, windows


class Argument(NamedTuple):
    name: str
    type: str  # in the language of operator schemas


PROBLEM_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "bool": "bool",
    "float": "float",
}


def _arguments() -> list[Argument]:
    """The fields of a problem. A bias gives its own fields, and a start that may be a tensor or a number is two."""
    found = []
    for field in fields(Problem):
        if field.name == "bias":
            found += [Argument(own.name, FIELD_TYPES[str(own.type)]) for bias in BIASES for own in fields(bias)]  # type: ignore[arg-type]
        elif field.name == "query_start":
            found += [Argument("query_start", "SymInt?"), Argument("query_starts", "Tensor?")]
        else:
            found.append(Argument(field.name, PROBLEM_TYPES[str(field.type)]))
    return found


ARGUMENTS = _arguments()
NAMES = [argument.name for argument in ARGUMENTS]
assert len(set(NAMES)) == len(NAMES), "fields of problems and biases need names of their own"
TENSORS = [index for index, argument in enumerate(ARGUMENTS) if argument.type.startswith("Tensor")]
LEARNED = [name for bias in BIASES for name in bias.learned]
GRADIENTS = ["q", "k", "v", *LEARNED]  # what the backward operators return, in this order
# What they take besides a problem: gradients of the output and, if it has one, of the log-sum-exp, and the results.
BACKWARD_INPUTS = "Tensor grad, Tensor? grad_lse, Tensor out, Tensor lse, Tensor windows, bool want_bias, "
BACKWARD_COUNT = BACKWARD_INPUTS.count(",")


_PROBLEM_FIELDS = [field.name for field in fields(Problem)]
_BIAS_FIELDS = {kind: [field.name for field in fields(kind)] for kind in BIASES}  # type: ignore[arg-type]


def pack(problem: Problem) -> tuple[Any, ...]:
    """The arguments of an operator that stand for a problem."""
    values: dict[str, Any] = {name: getattr(problem, name) for name in _PROBLEM_FIELDS}
    values |= {name: float(values[name]) for name in ("scale", "tolerance", "dropout")}
    if isinstance(problem.query_start, Tensor):
        values["query_start"], values["query_starts"] = None, problem.query_start
    if problem.bias is not None:
        for kind, names in _BIAS_FIELDS.items():
            if isinstance(problem.bias, kind):
                values |= {name: getattr(problem.bias, name) for name in names}
        if values.get("sees") is not None:
            values["sees"] = [SIGHTS.index(sight) for sight in values["sees"]]
    return tuple(values.get(name) for name in NAMES)


def unpack(arguments: tuple[Any, ...]) -> Problem:
    values = dict(zip(NAMES, arguments, strict=True))
    if values["sees"] is not None:
        values["sees"] = [SIGHTS[index] for index in values["sees"]]
    bias: Bias | None = None
    for kind, names in _BIAS_FIELDS.items():
        own = {name: values.pop(name) for name in names}
        if any(own[name] is not None for name in kind.learned):
            bias = kind.from_fields(**own)
    starts = values.pop("query_starts")
    if starts is not None:
        values["query_start"] = starts
    return Problem(bias=bias, **values)


def _schema(returns: int, before: str = "") -> str:
    listed = ", ".join(f"{argument.type} {argument.name}" for argument in ARGUMENTS)
    return f"({before}{listed}) -> " + (f"({', '.join(['Tensor'] * returns)})" if returns > 1 else "Tensor")


def _operator(name: str, function: Callable[..., Any], fake: Callable[..., Any], schema: str) -> Any:
    operator = torch.library.custom_op(f"trainshort::{name}", function, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    operator.register_vmap(no_vmap)
    return operator


def _attention_operator(
    name: str,
    forward: Callable[[Problem], Results],
    fake: Callable[[Problem], Results],
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]],
    layout: Callable[[Tensor], Tensor],
) -> tuple[Any, Any]:
    """Register a backend's forward and backward operator. layout: an uninitialised gradient for one of q, k and v."""

    def compute(*arguments: Any) -> Results:
        problem = unpack(arguments)
        check_values(problem)
        return forward(problem)

    def compute_gradients(*arguments: Any) -> tuple[Tensor, ...]:
        grad, problem = arguments[0], unpack(arguments[BACKWARD_COUNT:])
        dq, dk, dv, bias = backward(problem, *arguments[:BACKWARD_COUNT])
        return dq, dk, dv, *(bias[name] if name in bias else grad.new_empty(0) for name in LEARNED)

    def fake_gradients(*arguments: Any) -> tuple[Tensor, ...]:
        want_bias = arguments[BACKWARD_COUNT - 1]
        values = dict(zip(NAMES, arguments[BACKWARD_COUNT:], strict=True))

        def like(name: str) -> Tensor:
            tensor = values[name]
            wanted = want_bias and tensor is not None
            return tensor.new_empty(tensor.shape) if wanted else values["q"].new_empty(0)

        return *(layout(values[name]) for name in ("q", "k", "v")), *(like(name) for name in LEARNED)

    operator = _operator(name, compute, lambda *arguments: fake(unpack(arguments)), _schema(3))
    gradients = _operator(
        f"{name}_backward", compute_gradients, fake_gradients, _schema(len(GRADIENTS), BACKWARD_INPUTS)
    )
    operator.register_autograd(
        lambda ctx, grad, grad_lse, _: _gradients_by(gradients, ctx, grad, grad_lse), setup_context=_save_for_backward
    )
    gradients.register_autograd(no_double_backward)
    return operator, gradients


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    out, lse, windows = output
    ctx.save_for_backward(out, lse, windows, *(inputs[index] for index in TENSORS))
    ctx.others = [None if index in TENSORS else value for index, value in enumerate(inputs)]
    ctx.mark_non_differentiable(windows)
    ctx.set_materialize_grads(False)  # a log-sum-exp that nobody uses has no gradient, and costs nothing


def _gradients_by(operator: Any, ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    """What autograd asks for: a gradient for each argument that wants one, None for the others."""
    if grad is None and grad_lse is None:
        return (None,) * len(NAMES)
    out, lse, windows, *tensors = ctx.saved_tensors
    grad = torch.zeros_like(out) if grad is None else grad
    arguments = list(ctx.others)
    for index, tensor in zip(TENSORS, tensors, strict=True):
        arguments[index] = tensor
    wanted = dict(zip(NAMES, ctx.needs_input_grad, strict=True))
    want_bias = any(wanted[name] for name in LEARNED)
    found = operator(grad, grad_lse, out, lse, windows, want_bias, *arguments)
    gradients = dict(zip(GRADIENTS, found, strict=True))
    return tuple(gradients[name] if wanted[name] and name in gradients else None for name in NAMES)


def _decode(*arguments: Any) -> Tensor:
    return triton_backend.decode(unpack(arguments))


def _decode_with_lse(*arguments: Any) -> tuple[Tensor, Tensor]:
    return triton_backend.decode_with_lse(unpack(arguments))


blocked_op, blocked_backward_op = _attention_operator(
    "blocked", blocked_backend.forward, blocked_backend.fake, blocked_backend.backward, gradient_like
)
triton_op, triton_backward_op = _attention_operator(
    "triton", triton_backend.forward, triton_backend.fake, triton_backend.backward, gradient_of
)
triton_decode_op = _operator(
    "triton_decode", _decode, lambda *arguments: triton_backend.fake(unpack(arguments))[0], _schema(1)
)
triton_decode_lse_op = _operator(
    "triton_decode_lse",
    _decode_with_lse,
    lambda *arguments: triton_backend.fake(unpack(arguments))[:2],
    _schema(2),
)
