"""Forward and backward of one call: fetch keys, compute, send gradients back to those who own the keys.

Keys of other ranks travel while the rows that need none of them are computed; gradients of fetched keys travel while
those rows are differentiated. An owner adds what comes back in the order of ranks: every run gives the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainshort.ops import operators
from trainshort.ops.bias import LinearBias
from trainshort.ops.context.exchange import Places, message, message_size, own_levels, places_of, read_message
from trainshort.ops.context.levels import Gates, Levels
from trainshort.ops.context.parts import Buffers, Fetched, Lanes, Part, buffers_of, lanes_of, parts_of, problem_of
from trainshort.ops.context.plan import Plan
from trainshort.ops.context.transport import Gather, ProcessGroup, Protocol, Simulated, Start, Wait
from trainshort.ops.decay import DecayBias
from trainshort.ops.dispatch import backend_of
from trainshort.ops.problem import Problem


class Computed(NamedTuple):
    """One attention call, as its backward pass needs it."""

    part: Part
    lanes: Lanes
    arguments: tuple[Any, ...]  # of the operator
    results: tuple[Tensor, Tensor, Tensor]  # output, log-sum-exp, windows


def learned_of(plan: Plan) -> list[Tensor]:
    """The tensors of a bias that a gradient may be asked for, besides q, k and v."""
    if plan.levels.gates:
        return [gates.sums for gates in plan.levels.gates]
    bias = plan.problem.bias
    return [] if bias is None else [tensor for name in bias.learned if (tensor := getattr(bias, name)) is not None]


def _operators(plan: Plan) -> tuple[Any, Any]:
    triton = backend_of(plan.problem, plan.call.backend) == "triton"
    if triton:
        return operators.triton_op, operators.triton_backward_op
    return operators.blocked_op, operators.blocked_backward_op


def forward(plan: Plan) -> Protocol:
    """Returns the output of a rank's rows, and what the backward pass needs."""
    q, k, v = (tensor.detach() for tensor in (plan.problem.q, plan.problem.k, plan.problem.v))
    levels, me = own_levels(plan), plan.spans.rank
    width = 0 if levels is None else levels.shape[2]
    others = [rank for rank in range(len(plan.spans.lengths)) if rank != me]
    nothing = torch.empty(0, dtype=torch.uint8, device=q.device)
    send, receive = [nothing] * (len(others) + 1), [0] * (len(others) + 1)
    wanted: dict[int, Places] = {}
    for rank in others:
        send[rank] = message(levels, k, v, places_of(plan, me, rank))
        wanted[rank] = places_of(plan, rank, me)
        receive[rank] = message_size(wanted[rank].size, width, k)
    started = yield Start(send, receive, "keys")
    own, joined = parts_of(plan)
    out = torch.empty_like(q)
    computed = [_compute(plan, part, (q, k, v), {}, out) for part in own]
    received = yield Wait(started)
    fetched = {}
    for rank, places in wanted.items():
        if places.size:
            index = (places.rows, places.heads, places.keys + plan.spans.starts[rank])
            fetched[rank] = Fetched(index, *read_message(received[rank], places.size, width, k))
    computed += [_compute(plan, part, (q, k, v), fetched, out) for part in joined]
    return out, [each for part in computed for each in part]


def _compute(
    plan: Plan,
    part: Part,
    inputs: tuple[Tensor, Tensor, Tensor],
    fetched: dict[int, Fetched],
    out: Tensor,
) -> list[Computed]:
    q, k, v = inputs
    buffers: Buffers = buffers_of(plan, part, k, v, fetched)
    operator, _ = _operators(plan)
    found = []
    for lanes in lanes_of(plan, part):
        arguments = operators.pack(problem_of(plan, part, lanes, q, buffers))
        results = operator(*arguments)
        lanes.put_queries(out[:, :, part.rows], results[0])
        found.append(Computed(part, lanes, arguments, results))
    return found


@dataclass
class Gradients:
    """Of one rank's inputs, while they are added up."""

    q: Tensor
    k: Tensor  # in the dtype of the arithmetic
    v: Tensor
    levels: Tensor | None  # of running sums of gates, float64 [B, Hkv, L, T]
    bias: dict[str, Tensor]  # of the learned tensors that all rows share


def backward(plan: Plan, computed: Sequence[Computed], grad: Tensor, want_bias: bool) -> Protocol:
    """Returns the gradients of q, k, v and the learned tensors of a rank's bias (`learned_of`)."""
    problem = plan.problem
    k, me, size = problem.k, plan.spans.rank, len(plan.spans.lengths)
    wants_levels = want_bias and bool(plan.levels.gates)
    width = sum(gates.sums.shape[1] // k.shape[1] for gates in plan.levels.gates) if wants_levels else 0
    total = _zeros(problem, width)
    nothing = torch.empty(0, dtype=torch.uint8, device=k.device)
    send, receive = [nothing] * size, [0] * size
    by_part = itertools.groupby(computed, key=lambda each: each.part)
    parts = [(part, list(calls)) for part, calls in by_part]
    for part, calls in parts:
        if part.ranks(plan):
            for rank, data in _messages(plan, part, *_differentiate(plan, calls, grad, want_bias, total)):
                send[rank] = data
    for rank in range(size):
        if rank != me:
            receive[rank] = message_size(places_of(plan, me, rank).size, width, k)
    started = yield Start(send, receive, "gradients")
    for part, calls in parts:
        if not part.ranks(plan):
            _differentiate(plan, calls, grad, want_bias, total)
    received = yield Wait(started)
    for rank in range(size):
        if receive[rank]:
            _add_message(total, places_of(plan, me, rank), received[rank], width, k)
    if wants_levels:
        yield from _carry_to_earlier_ranks(plan, total)
    return total.q, total.k.to(k.dtype), total.v.to(k.dtype), *_learned(plan, total, want_bias)


def _zeros(problem: Problem, width: int) -> Gradients:
    k = problem.k
    dk, dv = (torch.zeros(k.shape, dtype=problem.accumulate_dtype, device=k.device) for _ in range(2))
    levels = torch.zeros((*k.shape[:2], width, k.shape[2]), dtype=torch.float64, device=k.device) if width else None
    return Gradients(torch.empty(problem.q.shape, dtype=k.dtype, device=k.device), dk, dv, levels, {})


def _differentiate(
    plan: Plan, calls: Sequence[Computed], grad: Tensor, want_bias: bool, total: Gradients
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Add the gradients of one part to those of the rank. Returns those of all its keys: [B, Hkv, keys, D], and of
    their levels."""
    part, k = calls[0].part, plan.problem.k
    keys = part.end - part.first
    _, operator = _operators(plan)
    dk, dv = (torch.empty((*k.shape[:2], keys, k.shape[3]), dtype=k.dtype, device=k.device) for _ in range(2))
    levels = None
    if total.levels is not None:
        levels = torch.zeros((*total.levels.shape[:3], keys), dtype=torch.float64, device=k.device)
    for each in calls:
        lanes = each.lanes
        own_grad = lanes.queries(grad[:, :, part.rows]).contiguous()
        found = operator(own_grad, None, *each.results, want_bias, *each.arguments)
        gradients = dict(zip(operators.GRADIENTS, found, strict=True))
        lanes.put_queries(total.q[:, :, part.rows], gradients["q"])
        lanes.put_keys(dk, gradients["k"])
        lanes.put_keys(dv, gradients["v"])
        if levels is not None:
            sides = [gradients[name] for name in ("gate_sums", "ahead_sums") if gradients[name].numel()]
            for target, sums in zip(levels.split(lanes.group, dim=2), sides, strict=False):
                _add_levels(target, lanes, sums)
        elif want_bias:
            _add_bias(plan, lanes, gradients, total)
    own, before = part.own(plan), part.before(plan)
    place = slice(before, before + own.stop - own.start)
    total.k[:, :, own] += dk[:, :, place]
    total.v[:, :, own] += dv[:, :, place]
    if total.levels is not None and levels is not None:
        total.levels[..., own] += levels[..., place]
    return dk, dv, levels


def _add_levels(levels: Tensor, lanes: Lanes, sums: Tensor) -> None:
    """levels: [B, Hkv, G, keys]; sums: as the call has them."""
    if lanes.folded:
        levels[:, lanes.key_heads] += sums.unflatten(0, (lanes.batch, -1))
    else:
        levels += sums.unflatten(1, (-1, lanes.group))


def _add_bias(plan: Plan, lanes: Lanes, gradients: dict[str, Tensor], total: Gradients) -> None:
    bias = plan.problem.bias
    for name in () if bias is None else bias.learned:
        tensor = getattr(bias, name)
        if tensor is None or name not in gradients:
            continue
        found = gradients[name]
        if lanes.folded and isinstance(bias, (LinearBias, DecayBias)):
            by_row = torch.zeros((lanes.batch, tensor.shape[-1]), dtype=torch.float64, device=tensor.device)
            lanes.put_queries(by_row, found.double())
            found = by_row if tensor.dim() == 2 else by_row.sum(0)
        total.bias[name] = found.double() + total.bias.get(name, 0.0)


def _messages(plan: Plan, part: Part, dk: Tensor, dv: Tensor, levels: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """Gradients of fetched keys, for the ranks that own them."""
    for rank in part.ranks(plan):
        places = places_of(plan, rank, plan.spans.rank)
        if places.size:
            shift = plan.spans.starts[rank] - part.first
            yield rank, message(levels, dk, dv, places._replace(keys=places.keys + shift))


def _add_message(total: Gradients, places: Places, data: Tensor, width: int, like: Tensor) -> None:
    """Keys of a message are different ones, so that adding them needs no order."""
    levels, dk, dv = read_message(data, places.size, width, like)
    index = (places.rows, places.heads, places.keys)
    for target, found in ((total.k, dk), (total.v, dv)):
        target[index] = target[index] + found.to(target.dtype)
    if total.levels is not None and levels is not None:
        view = total.levels.movedim(2, 3)
        view[index] = view[index] + levels


def _carry_to_earlier_ranks(plan: Plan, total: Gradients) -> Protocol:
    """A gate acts on all sums from its token on, those of later ranks too: d ln f_t is the sum of dc_u over u >= t.

    The gradient of the running sums in a span gets what later ranks sum to, at its last token.
    """
    levels = total.levels
    assert levels is not None
    gathered = yield Gather([levels.sum(-1)])
    later = torch.stack([own for (own,) in gathered])[plan.spans.rank + 1 :].sum(0)
    if levels.shape[-1]:
        levels[..., -1] += later


def _learned(plan: Plan, total: Gradients, want_bias: bool) -> list[Tensor | None]:
    if not want_bias:
        return [None for _ in learned_of(plan)]
    if total.levels is not None:
        group = plan.problem.q.shape[1] // plan.problem.k.shape[1]
        sides = [side.flatten(1, 2) for side in total.levels.split(group, dim=2)]
        return [
            side.sum(0, keepdim=True) if gates.sums.shape[0] == 1 else side
            for side, gates in zip(sides, plan.levels.gates, strict=True)
        ]
    bias = plan.problem.bias
    names = [] if bias is None else [name for name in bias.learned if getattr(bias, name) is not None]
    return [_finished(total.bias.get(name), getattr(bias, name)) for name in names]


def _finished(gradient: Tensor | None, tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if gradient is None else gradient.to(tensor.dtype)


class Attend(torch.autograd.Function):
    """The calls of all ranks that run in this process: one, or every one of a simulation."""

    @staticmethod
    def forward(ctx: Any, ranks: ProcessGroup | Simulated, plans: list[Plan], *tensors: Tensor) -> tuple[Tensor, ...]:
        results = ranks.run([forward(plan) for plan in plans])
        saved: list[Tensor] = []
        ctx.ranks, ctx.plans = ranks, [_without_contents(plan) for plan in plans]
        ctx.computed = [[_packed(each, saved) for each in computed] for _, computed in results]
        ctx.save_for_backward(*saved)
        return tuple(out for out, _ in results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True: gradients of gradients would silently lack a part
            raise RuntimeError("under context_parallel attention has no double backward: leave create_graph out")
        saved = ctx.saved_tensors
        counts = [3 + len(learned_of(plan)) for plan in ctx.plans]
        protocols, place = [], 2
        for plan, computed, grad, count in zip(ctx.plans, ctx.computed, grads, counts, strict=True):
            want_bias = any(ctx.needs_input_grad[place + 3 : place + count])
            protocols.append(backward(plan, [_unpacked(each, saved) for each in computed], grad, want_bias))
            place += count
        found = [gradient for rank in ctx.ranks.run(protocols) for gradient in rank]
        return None, None, *found


def _without_contents(plan: Plan) -> Plan:
    """The plan with tensors of the same shapes in place of its inputs: what the backward pass needs of these is saved
    where hooks and checkpoints find it."""

    def stand_in(tensor: Tensor) -> Tensor:
        return tensor.new_empty(1).expand(tensor.shape)

    problem = plan.problem
    bias = None if plan.levels.gates else problem.bias
    q, k, v = (stand_in(tensor) for tensor in (problem.q, problem.k, problem.v))
    gates = [Gates(stand_in(own.sums), stand_in(own.closed)) for own in plan.levels.gates]
    levels = Levels(bias, gates, None, [], [], None)
    problem = replace(problem, q=q, k=k, v=v, bias=bias, key_padding_mask=None)
    return replace(plan, call=replace(plan.call, problem=problem), levels=levels)


def _packed(each: Computed, saved: list[Tensor]) -> Computed:
    """With the places of its tensors among the saved ones instead of them."""

    def pack(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        saved.append(value)
        return _Place(len(saved) - 1)

    return each._replace(
        arguments=tuple(pack(value) for value in each.arguments),
        results=tuple(pack(value) for value in each.results),
    )


class _Place(NamedTuple):
    among_saved: int


def _unpacked(each: Computed, saved: Sequence[Tensor]) -> Computed:
    def unpack(value: Any) -> Any:
        return saved[value.among_saved] if isinstance(value, _Place) else value

    return each._replace(
        arguments=tuple(unpack(value) for value in each.arguments),
        results=tuple(unpack(value) for value in each.results),
    )
