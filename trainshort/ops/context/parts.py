"""The rows of a rank as ordinary attention calls.

Rows at the front (and without `causal` at the back) of a span may need keys of other ranks; rows between them need
their own rank's alone, and are computed while the others' keys are on their way. Heads need different numbers of
keys, and attention takes one run of keys for all heads of a row of the batch. So where keys were fetched, each key
head becomes a row of its own: its window is what `key_padding_mask` leaves of a buffer that is as long as the longest
needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainshort.ops.bias import Bias, LinearBias
from trainshort.ops.context.exchange import level_offset, own_levels
from trainshort.ops.context.plan import Plan, inner_tolerance
from trainshort.ops.decay import DecayBias
from trainshort.ops.dropout import head_seeds
from trainshort.ops.problem import BLOCK, Problem

MOST = 0.9  # of the rows: where more than these may need keys of others, all are computed together


class Part(NamedTuple):
    """Some rows of a span and the keys they look at."""

    rows: slice  # of the span
    first: int  # of the keys, in the whole sequence
    end: int
    packed: bool = False  # rows of several documents, that lie inside the span

    def own(self, plan: Plan) -> slice:
        """The keys among them that are the rank's own, counted from the start of its span."""
        return slice(max(self.first - plan.spans.start, 0), min(self.end, plan.spans.end) - plan.spans.start)

    def before(self, plan: Plan) -> int:
        """How many keys of earlier ranks there is room for."""
        return max(plan.spans.start - self.first, 0)

    def after(self, plan: Plan) -> int:
        return max(self.end - plan.spans.end, 0)

    def ranks(self, plan: Plan) -> list[int]:
        """The ranks whose keys it looks at, besides its own."""
        me = plan.spans.rank
        earlier = list(range(me)) if self.before(plan) else []
        return earlier + (list(range(me + 1, len(plan.spans.lengths))) if self.after(plan) else [])


def parts_of(plan: Plan) -> tuple[list[Part], list[Part]]:
    """The parts that need no keys of other ranks, and those that may."""
    start, end, length = plan.spans.start, plan.spans.end, plan.problem.q.shape[2]
    if plan.problem.q.numel() == 0:
        return [], []
    windows, packed = plan.windows[plan.spans.rank], plan.documents is not None
    low, high = int(windows[..., 0].min()), int(windows[..., 1].max())
    if packed:
        front, back = _crossing_documents(plan)
    else:
        front = min(-(-plan.front // BLOCK) * BLOCK, length) if low < start else 0
        back = max(length - -(-plan.back // BLOCK) * BLOCK, 0) if high > end else length
    if front > back or (not packed and front + length - back > MOST * length):
        return [], [Part(slice(0, length), low, high)]
    near = plan.problem.causal or packed  # whether rows look at nothing behind them, or behind their document
    own, joined = [], []
    if front:
        joined.append(Part(slice(0, front), low, start + front if near else end))
    if front < back:
        own.append(
            Part(slice(front, back), start + front if packed else start, start + back if near else end, packed)
        )
    if back < length:
        joined.append(Part(slice(back, length), start + back if packed else start, high))
    return own, joined


def _crossing_documents(plan: Plan) -> tuple[int, int]:
    """How many rows belong to a document that begins before the span, and where one begins that ends behind it."""
    length, borders = plan.problem.q.shape[2], plan.documents
    if not borders:  # one document holds all of the span
        return length, 0
    return borders[0], length if plan.problem.causal else borders[-1]


@dataclass(frozen=True)
class Lanes:
    """How rows of the batch and heads are laid out for one attention call.

    Heads that look in different ways need calls of their own where they are rows.
    """

    folded: bool  # whether each key head is a row of its own
    batch: int
    group: int
    key_heads: list[int]
    all_heads: bool  # whether these are all key heads

    @property
    def query_heads(self) -> list[int]:
        return [head * self.group + place for head in self.key_heads for place in range(self.group)]

    def queries(self, tensor: Tensor) -> Tensor:
        """[B, H, ...] -> as the call takes it."""
        tensor = tensor if self.all_heads else tensor[:, self.query_heads]
        return tensor.unflatten(1, (-1, self.group)).flatten(0, 1) if self.folded else tensor

    def keys(self, tensor: Tensor) -> Tensor:
        """[B, Hkv, ...] -> as the call takes it."""
        tensor = tensor if self.all_heads else tensor[:, self.key_heads]
        return tensor.flatten(0, 1)[:, None] if self.folded else tensor

    def put_queries(self, total: Tensor, part: Tensor) -> None:
        """Write what a call found for its queries to a tensor [B, H, ...]."""
        part = part.unflatten(0, (self.batch, -1)).flatten(1, 2) if self.folded else part
        _put(total, part, None if self.all_heads else self.query_heads)

    def put_keys(self, total: Tensor, part: Tensor) -> None:
        """The same for its keys, [B, Hkv, ...]."""
        part = part[:, 0].unflatten(0, (self.batch, -1)) if self.folded else part
        _put(total, part, None if self.all_heads else self.key_heads)


def _put(total: Tensor, part: Tensor, heads: list[int] | None) -> None:
    if heads is None:
        total.copy_(part)
    else:
        total[:, heads] = part


def lanes_of(plan: Plan, part: Part) -> list[Lanes]:
    problem = plan.problem
    batch, kv_heads = problem.q.shape[0], problem.k.shape[1]
    group = problem.q.shape[1] // kv_heads
    if not (plan.certified and part.ranks(plan)):
        return [Lanes(False, batch, group, list(range(kv_heads)), True)]
    by_sight: dict[tuple[str, ...], list[int]] = {}
    for head in range(kv_heads):
        by_sight.setdefault(problem.sights[head * group : (head + 1) * group], []).append(head)
    return [Lanes(True, batch, group, heads, len(by_sight) == 1) for heads in by_sight.values()]


class Fetched(NamedTuple):
    """Keys of another rank, in the order of `places_of`."""

    places: tuple[Tensor, Tensor, Tensor]  # row of the batch, key head, place in the whole sequence
    levels: Tensor | None  # [n, L]
    k: Tensor  # [n, D]
    v: Tensor


class Buffers(NamedTuple):
    """The keys of a part, own and fetched: [B, Hkv, keys, D], with zeros where a head needs none."""

    k: Tensor
    v: Tensor
    levels: Tensor | None  # [B, Hkv, L, keys]


def buffers_of(plan: Plan, part: Part, k: Tensor, v: Tensor, fetched: dict[int, Fetched]) -> Buffers:
    own, before, after = part.own(plan), part.before(plan), part.after(plan)
    levels = own_levels(plan)
    levels = None if levels is None else levels[..., own]
    k, v = k[:, :, own], v[:, :, own]
    if not before and not after:
        return Buffers(k, v, levels)
    k, v = (F.pad(tensor, (0, 0, before, after)) for tensor in (k, v))
    levels = None if levels is None else F.pad(levels, (before, after))
    for rank in part.ranks(plan):
        if rank not in fetched:
            continue
        rows, heads, keys = fetched[rank].places
        index = (rows, heads, keys - part.first)
        k[index], v[index] = fetched[rank].k, fetched[rank].v
        own_numbers = fetched[rank].levels
        if levels is not None and own_numbers is not None:
            levels.movedim(2, 3)[index] = own_numbers + level_offset(plan, rank)[rows, heads]
    if levels is not None:  # keys that a head does not need go on as the last it does: sums never rise
        window = (plan.windows[plan.spans.rank] - part.first).to(k.device)  # [B, Hkv, 2]
        place = torch.arange(part.end - part.first, device=k.device)
        place = torch.minimum(torch.maximum(place, window[..., :1]), window[..., 1:] - 1)
        place = place.clamp(0, part.end - part.first - 1)
        levels = levels.gather(3, place[:, :, None].expand(-1, -1, levels.shape[2], -1))
    return Buffers(k, v, levels)


def problem_of(plan: Plan, part: Part, lanes: Lanes, q: Tensor, buffers: Buffers) -> Problem:
    """The attention call of one part. q: of the whole span."""
    cu_seqlens = None
    if part.packed:
        assert plan.documents is not None
        borders = [border - part.rows.start for border in (part.rows.start, *plan.documents, part.rows.stop)]
        inside = sorted({border for border in borders if 0 <= border <= part.rows.stop - part.rows.start})
        cu_seqlens = torch.tensor(inside, dtype=torch.int32, device=q.device)
    start = plan.spans.start + part.rows.start - part.first
    length = part.end - part.first
    aligned = part.packed or start + part.rows.stop - part.rows.start == length
    return Problem(
        q=lanes.queries(q[:, :, part.rows]),
        k=lanes.keys(buffers.k),
        v=lanes.keys(buffers.v),
        bias=_bias_of(plan, part, lanes, buffers),
        causal=plan.problem.causal,
        scale=plan.problem.scale,
        tolerance=inner_tolerance(plan),
        key_padding_mask=None if part.packed else _mask_of(plan, part, lanes),
        cu_seqlens=cu_seqlens,
        query_start=None if aligned else start,
        dropout=plan.problem.dropout,
        seed=_seed_of(plan, part, lanes),
    )


def _seed_of(plan: Plan, part: Part, lanes: Lanes) -> Tensor | None:
    """So that the same weights are dropped as in one process with this seed."""
    seed = plan.problem.seed
    if seed is None:
        return None
    batch, heads = plan.problem.q.shape[:2]
    seeds = head_seeds(seed, batch, heads, plan.spans.start + part.rows.start, part.first)
    return lanes.queries(seeds).contiguous()


def _mask_of(plan: Plan, part: Part, lanes: Lanes) -> Tensor | None:
    """The keys that a part may look at, bool [rows, keys]: fetched for its head, and no padding."""
    first, end = (limit[:, None] for limit in plan.real)  # [B, 1]
    if lanes.folded:
        window = plan.windows[plan.spans.rank].to(first.device)[:, lanes.key_heads]  # [B, heads, 2]
        first, end = torch.maximum(first, window[..., 0]).flatten()[:, None], torch.minimum(end, window[..., 1])
        end = end.flatten()[:, None]
    elif plan.problem.key_padding_mask is None:
        return None
    place = torch.arange(part.first, part.end, device=first.device)
    return (place >= first) & (place < end)


def _bias_of(plan: Plan, part: Part, lanes: Lanes, buffers: Buffers) -> Bias | None:
    bias = plan.problem.bias
    if isinstance(bias, DecayBias):
        return _decay_of(plan, part, lanes, bias, buffers)
    if not isinstance(bias, LinearBias) or not lanes.folded:
        return bias
    sees = None if bias.sees is None else plan.problem.sights[lanes.query_heads[0] :][: lanes.group]
    future = None if bias.future is None else lanes.queries(_by_row(bias.future, lanes.batch))
    return LinearBias(lanes.queries(_by_row(bias.slopes, lanes.batch)), future=future, offset=bias.offset, sees=sees)


def _by_row(slopes: Tensor, batch: int) -> Tensor:
    """[H] or [B, H] -> [B, H]."""
    return torch.atleast_2d(slopes.detach()).expand(batch, -1)


def _decay_of(plan: Plan, part: Part, lanes: Lanes, bias: DecayBias, buffers: Buffers) -> DecayBias:
    levels = buffers.levels
    assert levels is not None
    if bias.rates is not None:
        times = lanes.keys(levels[:, :, 0])[:, 0] if lanes.folded else levels[:, 0, 0]
        rates = lanes.queries(_by_row(bias.rates, lanes.batch)) if lanes.folded else bias.rates.detach()
        return DecayBias.from_fields(times=times.contiguous(), rates=rates)
    past, *future = levels.split(lanes.group, dim=2)
    fields = {"gate_sums": past, "ahead_sums": future[0] if future else None}
    first, end = _visible(plan, part)
    found = {name: lanes.queries(sums.flatten(1, 2)) for name, sums in fields.items() if sums is not None}
    found["gate_first"] = lanes.queries(first)
    if future:
        found["ahead_end"] = lanes.queries(end)
    return DecayBias.from_fields(**{name: tensor.contiguous() for name, tensor in found.items()})


def _visible(plan: Plan, part: Part) -> tuple[Tensor, Tensor]:
    """First and one-past-last key that borders leave to each own token of a part, among its keys: int32 [B, H, keys].
    Of keys of other ranks there are no queries, and nobody asks."""
    levels, problem = plan.levels, plan.problem
    batch, heads, length, _ = problem.q.shape
    own = part.own(plan)
    assert levels.border_before is not None
    assert levels.border_after is not None
    closed = levels.gates[0].closed.expand(batch, -1, -1)
    index = plan.spans.start + torch.arange(length, device=closed.device)
    first = torch.maximum(torch.where(closed, index, 0).cummax(-1).values, levels.border_before[..., None])
    closed = levels.gates[-1].closed.expand(batch, -1, -1)
    nowhere = plan.spans.total
    later = torch.where(closed, index, nowhere).flip(-1).cummin(-1).values.flip(-1)
    end = torch.minimum(F.pad(later[..., 1:], (0, 1), value=nowhere), levels.border_after[..., None])
    keys = part.end - part.first
    all_first = torch.zeros((batch, heads, keys), dtype=torch.int32, device=first.device)
    all_end = torch.full_like(all_first, keys)
    place = slice(part.before(plan), part.before(plan) + own.stop - own.start)
    all_first[..., place] = (first[..., own] - part.first).clamp(0, keys).int()
    all_end[..., place] = (end[..., own] - part.first).clamp(0, keys).int()
    return all_first, all_end
