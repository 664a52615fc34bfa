"""The rows of a rank as ordinary attention calls.

Rows at the front (and without `causal` at the back) of a span may need keys of other ranks; the others need their own
rank's alone. Where these are most they are computed while the keys of others are on their way. Else one call takes
all rows: two fill a GPU less well.

Heads need different numbers of keys, and attention takes one run of keys for all heads. So fetched keys lie in a
buffer as long as the longest head needs. Where a head needs fewer, the centre of the keys stands in for those that
were not fetched: the bound by which they weigh little is one for the centre too, because lengths are counted from
there. Its value is that of the nearest own key, which all rows see: so outputs stay means of values in sight. Under
gates no query sees these.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainshort.ops.bias import Bias
from trainshort.ops.context.exchange import level_offset, own_levels
from trainshort.ops.context.plan import Places, Plan
from trainshort.ops.decay import DecayBias
from trainshort.ops.dropout import head_seeds
from trainshort.ops.problem import BLOCK, Problem

MOST = 0.25  # of the rows: where more than these may need keys of others, all are computed together


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


class Fetched(NamedTuple):
    """Keys of another rank, in the order of `places`."""

    places: Places  # keys: in the whole sequence
    levels: Tensor | None  # [n, L]
    k: Tensor  # [n, D]
    v: Tensor


class Buffers(NamedTuple):
    """The keys of a part, own and fetched: [B, Hkv, keys, D]."""

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
    center = torch.zeros_like(k[:, :, :1]) if plan.center is None else plan.center[:, :, None].to(k.dtype)
    k, v = (
        torch.cat([front.expand(-1, -1, before, -1), tensor, back.expand(-1, -1, after, -1)], dim=2)
        for front, tensor, back in ((center, k, center), (v[:, :, :1], v, v[:, :, -1:]))
    )
    levels = None if levels is None else F.pad(levels, (before, after), value=math.inf)
    for rank in part.ranks(plan):
        if rank not in fetched:
            continue
        rows, heads, keys = fetched[rank].places
        index = (rows, heads, keys - part.first)
        k[index], v[index] = fetched[rank].k, fetched[rank].v
        own_numbers = fetched[rank].levels
        if levels is not None and own_numbers is not None:
            levels.movedim(2, 3)[index] = own_numbers + level_offset(plan, rank)[rows, heads]
    return Buffers(k, v, None if levels is None else _continued(plan, part, levels))


def _continued(plan: Plan, part: Part, levels: Tensor) -> Tensor:
    """Levels that go on, where keys were not fetched, as the last that were: sums never rise. Times are those of all
    heads, and known as far as any head needs them."""
    window = (plan.windows[plan.spans.rank] - part.first).to(levels.device)  # [B, Hkv, 2]
    if plan.levels.since is not None:
        levels = levels.amin(1, keepdim=True).expand(-1, levels.shape[1], -1, -1)
        window = _widest(window)[:, None].expand(-1, levels.shape[1], -1)
    place = torch.arange(part.end - part.first, device=levels.device)
    place = torch.minimum(torch.maximum(place, window[..., :1]), window[..., 1:] - 1)
    place = place.clamp(0, part.end - part.first - 1)
    return levels.gather(3, place[:, :, None].expand(-1, -1, levels.shape[2], -1))


def _widest(windows: Tensor) -> Tensor:
    """[B, Hkv, 2] -> [B, 2]"""
    return torch.stack((windows[..., 0].amin(1), windows[..., 1].amax(1)), dim=-1)


def problem_of(plan: Plan, part: Part, q: Tensor, buffers: Buffers) -> Problem:
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
        q=q[:, :, part.rows],
        k=buffers.k,
        v=buffers.v,
        bias=_bias_of(plan, part, buffers),
        causal=plan.problem.causal,
        scale=plan.problem.scale,
        tolerance=plan.tolerance,
        key_padding_mask=None if part.packed else _mask_of(plan, part),
        cu_seqlens=cu_seqlens,
        query_start=None if aligned else start,
        dropout=plan.problem.dropout,
        seed=_seed_of(plan, part),
    )


def _seed_of(plan: Plan, part: Part) -> Tensor | None:
    """So that the same weights are dropped as in one process with this seed."""
    seed = plan.problem.seed
    if seed is None:
        return None
    batch, heads = plan.problem.q.shape[:2]
    return head_seeds(seed, batch, heads, plan.spans.start + part.rows.start, part.first)


def _mask_of(plan: Plan, part: Part) -> Tensor | None:
    """The keys that a part may look at, bool [B, keys]: no padding, and of known times."""
    first, end = plan.real  # [B]
    if plan.levels.since is not None and first.shape[0] > 1:
        known = _widest(plan.windows[plan.spans.rank].to(first.device))
        first, end = torch.maximum(first, known[:, 0]), torch.minimum(end, known[:, 1])
    elif plan.problem.key_padding_mask is None:
        return None
    place = torch.arange(part.first, part.end, device=first.device)
    return (place >= first[:, None]) & (place < end[:, None])


def _bias_of(plan: Plan, part: Part, buffers: Buffers) -> Bias | None:
    bias, levels = plan.problem.bias, buffers.levels
    if not isinstance(bias, DecayBias):
        return bias
    assert levels is not None
    if bias.rates is not None:
        return DecayBias.from_fields(times=levels[:, 0, 0].contiguous(), rates=bias.rates.detach())
    past, *future = levels.split(levels.shape[2] // len(plan.levels.gates), dim=2)
    first, end = _visible(plan, part)
    found = {"gate_sums": past.flatten(1, 2), "gate_first": first}
    if future:
        found |= {"ahead_sums": future[0].flatten(1, 2), "ahead_end": end}
    return DecayBias.from_fields(**{name: tensor.contiguous() for name, tensor in found.items()})


def _visible(plan: Plan, part: Part) -> tuple[Tensor, Tensor]:
    """First and one-past-last key that borders, and what was fetched, leave to each own token of a part, among its
    keys: int32 [B, H, keys]. Of keys of other ranks there are no queries, and nobody asks."""
    levels, problem = plan.levels, plan.problem
    batch, heads, length, _ = problem.q.shape
    own = part.own(plan)
    assert levels.border_before is not None
    assert levels.border_after is not None
    low, high = (
        limit.to(problem.q.device).repeat_interleave(heads // problem.k.shape[1], dim=1)
        for limit in plan.windows[plan.spans.rank].unbind(-1)
    )  # [B, H]
    closed = levels.gates[0].closed.expand(batch, -1, -1)
    index = plan.spans.start + torch.arange(length, device=closed.device)
    first = torch.where(closed, index, 0).cummax(-1).values
    first = torch.maximum(first, torch.maximum(levels.border_before, low)[..., None])
    closed = levels.gates[-1].closed.expand(batch, -1, -1)
    nowhere = plan.spans.total
    later = torch.where(closed, index, nowhere).flip(-1).cummin(-1).values.flip(-1)
    end = F.pad(later[..., 1:], (0, 1), value=nowhere)
    end = torch.minimum(end, torch.minimum(levels.border_after, high)[..., None])
    keys = part.end - part.first
    all_first = torch.zeros((batch, heads, keys), dtype=torch.int32, device=first.device)
    all_end = torch.full_like(all_first, keys)
    place = slice(part.before(plan), part.before(plan) + own.stop - own.start)
    all_first[..., place] = (first[..., own] - part.first).clamp(0, keys).int()
    all_end[..., place] = (end[..., own] - part.first).clamp(0, keys).int()
    return all_first, all_end
