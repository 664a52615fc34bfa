"""Forward and backward of one call: fetch keys, compute, send gradients back to those who own the keys.

Keys of other ranks travel while the rows that need none of them are computed; gradients of fetched keys travel while
those rows are differentiated. An owner adds what comes back in the order of ranks: every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainshort.ops import operators
from trainshort.ops.context.exchange import message, message_size, own_levels, read_message
from trainshort.ops.context.levels import Gates, Levels
from trainshort.ops.context.parts import Fetched, Part, buffers_of, parts_of, problem_of
from trainshort.ops.context.plan import Places, Plan
from trainshort.ops.context.transport import Gather, ProcessGroup, Protocol, Simulated, Start, Wait
from trainshort.ops.dispatch import backend_of


class Computed(NamedTuple):
    """One attention call, as its backward pass needs it."""

    part: Part
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
    levels = own_levels(plan)
    width = 0 if levels is None else levels.shape[2]
    nothing = torch.empty(0, dtype=torch.uint8, device=q.device)
    send = [message(levels, k, v, places) if places.size else nothing for places in plan.traffic.asked]
    started = yield Start(send, [message_size(places.size, width, k) for places in plan.traffic.wanted], "keys")
    own, joined = parts_of(plan)
    computed = [_compute(plan, part, (q, k, v), {}) for part in own]
    received = yield Wait(started)
    fetched = {}
    for rank, places in enumerate(plan.traffic.wanted):
        if places.size:
            in_all = places._replace(keys=places.keys + plan.spans.starts[rank])
            fetched[rank] = Fetched(in_all, *read_message(received[rank], places.size, width, k))
    computed += [_compute(plan, part, (q, k, v), fetched) for part in joined]
    return _rows_together(q, [(each.part.rows, each.results[0]) for each in computed]), computed


def _rows_together(like: Tensor, parts: Sequence[tuple[slice, Tensor]]) -> Tensor:
    """What parts found for their rows, [B, H, T, D]."""
    if len(parts) == 1:
        return parts[0][1]
    total = torch.empty_like(like)
    for rows, found in parts:
        total[:, :, rows] = found
    return total


def _compute(plan: Plan, part: Part, inputs: tuple[Tensor, Tensor, Tensor], fetched: dict[int, Fetched]) -> Computed:
    q, k, v = inputs
    operator, _ = _operators(plan)
    arguments = operators.pack(problem_of(plan, part, q, buffers_of(plan, part, k, v, fetched)))
    return Computed(part, arguments, operator(*arguments))


@dataclass
class Gradients:
    """Of one rank's inputs, while they are added up."""

    q: list[tuple[slice, Tensor]] = field(default_factory=list)  # of the rows of each part
    k: list[tuple[slice, Tensor]] = field(default_factory=list)  # of the keys of each part that are the rank's own
    v: list[tuple[slice, Tensor]] = field(default_factory=list)
    levels: Tensor | None = None  # of running sums of gates, float64 [B, Hkv, L, T]
    bias: dict[str, Tensor] = field(default_factory=dict)  # of the learned tensors that all rows share


def backward(plan: Plan, computed: Sequence[Computed], grad: Tensor, want_bias: bool) -> Protocol:
    """Returns the gradients of q, k, v and the learned tensors of a rank's bias (`learned_of`)."""
    k = plan.problem.k
    wants_levels = want_bias and bool(plan.levels.gates)
    width = sum(gates.sums.shape[1] // k.shape[1] for gates in plan.levels.gates) if wants_levels else 0
    total = Gradients()
    if width:
        total.levels = torch.zeros((*k.shape[:2], width, k.shape[2]), dtype=torch.float64, device=k.device)
    send = [torch.empty(0, dtype=torch.uint8, device=k.device)] * len(plan.spans.lengths)
    for each in computed:
        if each.part.ranks(plan):
            for rank, data in _messages(plan, each.part, *_differentiate(plan, each, grad, want_bias, total)):
                send[rank] = data
    started = yield Start(send, [message_size(places.size, width, k) for places in plan.traffic.asked], "gradients")
    for each in computed:
        if not each.part.ranks(plan):
            _differentiate(plan, each, grad, want_bias, total)
    received = yield Wait(started)
    dk, dv = _keys_together(k, total.k), _keys_together(k, total.v)
    for places, data in zip(plan.traffic.asked, received, strict=True):
        if places.size:
            _add_message((dk, dv, total.levels), places, read_message(data, places.size, width, k))
    if total.levels is not None:
        yield from _carry_to_earlier_ranks(plan, total.levels)
    return _rows_together(plan.problem.q, total.q), dk, dv, *_learned(plan, total, want_bias)


def _differentiate(
    plan: Plan, each: Computed, grad: Tensor, want_bias: bool, total: Gradients
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Add the gradients of one part to those of the rank. Returns those of all its keys: [B, Hkv, keys, D], and of
    their levels."""
    part = each.part
    _, operator = _operators(plan)
    found = operator(grad[:, :, part.rows], None, *each.results, want_bias, *each.arguments)
    gradients = dict(zip(operators.GRADIENTS, found, strict=True))
    total.q.append((part.rows, gradients["q"]))
    own, before = part.own(plan), part.before(plan)
    place = slice(before, before + own.stop - own.start)
    levels = None
    if total.levels is not None:
        sides = [gradients[name] for name in ("gate_sums", "ahead_sums") if gradients[name].numel()]
        levels = torch.cat([sums.unflatten(1, (plan.problem.k.shape[1], -1)) for sums in sides], dim=2)
        total.levels[..., own] += levels[..., place]
    elif want_bias:
        _add_bias(plan, gradients, total)
    total.k.append((own, gradients["k"][:, :, place]))
    total.v.append((own, gradients["v"][:, :, place]))
    return gradients["k"], gradients["v"], levels


def _keys_together(like: Tensor, parts: Sequence[tuple[slice, Tensor]]) -> Tensor:
    """The sum of what parts found for keys of the span, [B, Hkv, T, D]. One that has all of them, if any, is written
    to, so that only what they share is added."""
    whole = [index for index, (_, found) in enumerate(parts) if found.shape[2] == like.shape[2]]
    total = parts[whole[0]][1] if whole else torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    for index, (own, found) in enumerate(parts):
        if index not in whole[:1]:
            total[:, :, own] += found
    return total


def _add_bias(plan: Plan, gradients: dict[str, Tensor], total: Gradients) -> None:
    bias = plan.problem.bias
    for name in () if bias is None else bias.learned:
        if getattr(bias, name) is not None and name in gradients:
            total.bias[name] = gradients[name].double() + total.bias.get(name, 0.0)


def _messages(plan: Plan, part: Part, dk: Tensor, dv: Tensor, levels: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """Gradients of fetched keys, for the ranks that own them."""
    for rank in part.ranks(plan):
        places = plan.traffic.wanted[rank]
        if places.size:
            shift = plan.spans.starts[rank] - part.first
            yield rank, message(levels, dk, dv, places._replace(keys=places.keys + shift))


def _add_message(
    totals: tuple[Tensor, Tensor, Tensor | None], places: Places, found: tuple[Tensor | None, Tensor, Tensor]
) -> None:
    """Keys of a message are different ones, so that adding them needs no order."""
    dk, dv, levels = totals
    for target, own in ((dk, found[1]), (dv, found[2])):
        target[places] = target[places] + own
    if levels is not None and found[0] is not None:
        view = levels.movedim(2, 3)
        view[places] = view[places] + found[0]


def _carry_to_earlier_ranks(plan: Plan, levels: Tensor) -> Protocol:
    """A gate acts on all sums from its token on, those of later ranks too: d ln f_t is the sum of dc_u over u >= t.

    The gradient of the running sums in a span gets what later ranks sum to, at its last token.
    """
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
