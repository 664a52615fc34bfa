"""Which keys each rank needs of the others.

Ranks tell each other their sizes, then what their heights go on from and a sample of their keys, then bounds of their
blocks of keys, and at last which keys they need: for each row of the batch and key head one range, the rank's own
span included. Half of the tolerance pays for what is not fetched, the other half for what is fetched and not visited.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainshort.ops.bias import LinearBias
from trainshort.ops.context import bounds as bounds_module
from trainshort.ops.context.bounds import Bounds, Found, Rows, Run, edges_of
from trainshort.ops.context.call import Call, Spans, agree
from trainshort.ops.context.levels import Gates, Levels, join_levels, known_of, make_gates
from trainshort.ops.context.transport import Gather, Protocol
from trainshort.ops.decay import DecayBias, pick
from trainshort.ops.near import NEAR
from trainshort.ops.problem import BLOCK, Problem
from trainshort.ops.windows import HUGE, rounding_of_sums


class Places(NamedTuple):
    """Keys of one rank that another needs: row of the batch, key head, and place in the owner's span; int64 [n]."""

    rows: Tensor
    heads: Tensor
    keys: Tensor

    @property
    def size(self) -> int:
        return self.rows.shape[0]


class Traffic(NamedTuple):
    """By rank: the keys that this one needs of it, and those of this one that it needs."""

    wanted: list[Places]
    asked: list[Places]


def traffic_of(spans: Spans, windows: Tensor, device: torch.device) -> Traffic:
    """Reader and owner list the same keys in the same order, so that no index is sent. windows: of every rank, on the
    CPU, [ranks, B, Hkv, 2]."""
    me, size, kv_heads = spans.rank, len(spans.lengths), windows.shape[2]
    starts = torch.tensor(spans.starts)[:, None]
    ends = starts + torch.tensor(spans.lengths)[:, None]
    first, end = windows.flatten(1, 2).unbind(-1)  # [ranks, B * Hkv]
    wanted = torch.maximum(first[me], starts) - starts, torch.minimum(end[me], ends) - starts
    asked = first.clamp_min(spans.start) - spans.start, end.clamp_max(spans.end) - spans.start
    first, end = (torch.cat(both) for both in zip(wanted, asked, strict=True))  # [2 * ranks, B * Hkv]
    count = (end - first).clamp_min(0)
    count[[me, size + me]] = 0
    sizes, count = count.sum(1).tolist(), count.flatten()
    shift = first.flatten() - (count.cumsum(0) - count)  # from the place in the list to that among the keys
    row = torch.arange(windows.shape[1]).repeat_interleave(kv_heads).repeat(2 * size)
    head = torch.arange(kv_heads).repeat(2 * size * windows.shape[1])
    count, *lanes = torch.stack((count, shift, row, head)).to(device)
    total = sum(sizes)
    shift, rows, heads = torch.stack(lanes).repeat_interleave(count, dim=1, output_size=total)
    keys = shift + torch.arange(total, device=device)
    listed = [Places(*each) for each in zip(*(index.split(sizes) for index in (rows, heads, keys)), strict=True)]
    return Traffic(listed[:size], listed[size:])


@dataclass
class Plan:
    """What a rank computes of a call, and what it needs of the others for it."""

    call: Call
    spans: Spans
    levels: Levels
    certified: bool  # whether windows were sought; else everything in sight is fetched
    tolerance: float  # for what is fetched, or the rank's own, and not visited
    real: tuple[Tensor, Tensor]  # first and one-past-last key that is no padding, int64 [B] each
    center: Tensor | None  # that bounds of keys were counted from, [B, Hkv, D]
    windows: Tensor  # of every rank, on the CPU: int64 [ranks, B, Hkv, 2]
    traffic: Traffic
    front: int  # the first rows of the span that need keys of earlier ranks,
    back: int  # and the last that need keys of later ones: numbers of rows
    documents: list[int] | None  # borders of documents inside the span, counted from its start
    everything: int  # windows for which all keys in sight on other ranks are fetched, if there are any

    @property
    def problem(self) -> Problem:
        return self.call.problem


def make_plan(rank: int, make: Callable[[], Call], device: torch.device) -> Protocol:
    """The protocol that returns a Plan. make: checks and describes the call, or raises."""
    call, spans = yield from agree(rank, make, device)
    problem = call.problem
    gates = make_gates(call, spans)
    certified = problem.may_skip and isinstance(problem.bias, (LinearBias, DecayBias))
    certified = certified and spans.total > 0 and problem.q.shape[0] > 0
    told = _told(call, gates, certified)
    gathered = (yield Gather(list(told.values()))) if told else []
    of_all = dict(zip(told, (torch.stack(each) for each in zip(*gathered, strict=True)), strict=True))
    levels = join_levels(call, spans, gates, of_all)
    real = _real_keys(call, spans, of_all)
    past, future = _runs_in_sight(call, spans, real)
    found: Found | None = None
    if certified:
        center = bounds_module.center_of(of_all["sample"], problem.q.dtype).to(problem.accumulate_dtype)
        largest = of_all["largest"].amax(0).clamp_min(bounds_module.SMALLEST)
        blocks = max(-(-length // BLOCK) for length in spans.lengths)
        own, means = _bounds(call, levels, center, largest, blocks)
        gathered = yield Gather(own.tensors())
        found = Found(Bounds.gathered(gathered), center, largest, means)
    needed = _windows(call, spans, levels, (past, future), found)
    batch, _, length, _ = problem.q.shape
    numbers = needed.numbers(problem.k.shape[1], length)
    gathered = yield Gather([numbers[: numbers.shape[0] // 2 - 1]])
    windows = torch.stack([own for (own,) in gathered])
    on_cpu = torch.cat((windows.flatten(), numbers[windows.shape[1] :])).cpu()
    windows, most, (front, back) = on_cpu.split([windows.numel(), windows.shape[1], 2])
    windows = windows.view(len(spans.lengths), 2, batch, -1).movedim(1, 3)
    most = most.view(2, batch, -1).movedim(0, 2)
    others = most[..., 0] < most[..., 1] - length  # whether keys of other ranks are in sight
    # What may be left out is left out twice: half of the tolerance for what is not fetched.
    halves = 2 if certified and bool(others.any()) else 1
    return Plan(
        call=call,
        spans=spans,
        levels=levels,
        certified=certified,
        tolerance=problem.tolerance / halves,
        real=real,
        center=None if found is None else found.center,
        windows=windows,
        traffic=traffic_of(spans, windows, problem.q.device),
        front=int(front),
        back=int(back),
        documents=_documents(call, spans),
        everything=int(((windows[rank] == most).all(-1) & others).sum()),
    )


@torch.no_grad()
def _told(call: Call, gates: list[Gates], certified: bool) -> dict[str, Tensor]:
    """What other ranks are told before bounds are."""
    problem = call.problem
    mask = problem.key_padding_mask
    told = known_of(call, gates)
    if mask is not None:
        first = mask.to(torch.int8).argmax(-1) if mask.shape[1] else mask.sum(-1)
        told["run"] = torch.stack((first, mask.sum(-1)))  # first real key, and how many: int64 [2, B]
    if certified:
        told |= {"sample": bounds_module.sample_of(problem), "largest": bounds_module.largest_query(problem)}
    return told


_bounds = torch.no_grad()(bounds_module.bounds_of)


def _real_keys(call: Call, spans: Spans, of_all: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """First and one-past-last real key of each row of the batch."""
    if call.problem.key_padding_mask is None:
        zero = torch.zeros(call.problem.q.shape[0], dtype=torch.int64, device=call.problem.q.device)
        return zero, zero + spans.total
    runs = of_all["run"]  # [ranks, 2, B]
    starts = torch.tensor(spans.starts, device=runs.device)[:, None]
    first, count = runs[:, 0], runs[:, 1]
    there = count > 0
    low = torch.where(there, starts + first, spans.total).amin(0)
    high = torch.where(there, starts + first + count, 0).amax(0)
    broken = count.sum(0) != (high - low).clamp_min(0)
    if bool(broken.any()):
        raise ValueError(
            "key_padding_mask must be one contiguous run of True a row (left or right padding), over the spans of "
            f"all ranks together: row {int(broken.nonzero()[0])} has a hole"
        )
    return torch.minimum(low, high), high


def _runs_in_sight(call: Call, spans: Spans, real: tuple[Tensor, Tensor]) -> tuple[Run, Run]:
    """What the first rows of a span may see of earlier ranks, and the last rows of later ones."""
    documents = [(0, spans.total)] * 2
    if call.borders is not None and spans.end > spans.start:
        borders = call.borders
        for side, place in enumerate((spans.start, spans.end - 1)):
            index = bisect.bisect_right(borders, place) - 1
            documents[side] = (borders[index], borders[index + 1])
    first, end = real
    if call.borders is None:
        whole = Run(first, end, (0, spans.total))
        return whole, whole
    past, future = (Run(first.clamp(low, high), end.clamp(low, high), (low, high)) for low, high in documents)
    return past, future


def _documents(call: Call, spans: Spans) -> list[int] | None:
    if call.borders is None:
        return None
    inside = [border - spans.start for border in call.borders if spans.start <= border <= spans.end]
    return sorted(set(inside))


class Windows(NamedTuple):
    """The keys that a rank needs, its own span included, and all in sight: first and one-past-last, [B, H] each; and
    how many rows at the front and at the back of the span hold all that need keys of others."""

    low: Tensor
    high: Tensor
    most_low: Tensor
    most_high: Tensor
    behind: Tensor | None = None  # None: all of them
    ahead: Tensor | None = None

    def numbers(self, kv_heads: int, length: int) -> Tensor:
        """Keys by key head, [4, B, Hkv], and two numbers of rows: int64 in one row, for one wait."""
        group = self.low.shape[1] // kv_heads
        limits = torch.stack(torch.broadcast_tensors(self.low, self.high, self.most_low, self.most_high))
        if group > 1:
            limits = limits.unflatten(2, (-1, group))
            limits = torch.stack((limits[::2].amin(3), limits[1::2].amax(3)), dim=1)
        rows = [
            limits.new_full((1,), length) if count is None or not count.numel() else count.flatten().amax(0, True)
            for count in (self.behind, self.ahead)
        ]
        return torch.cat((limits.flatten(), *rows))


@torch.no_grad()
def _windows(call: Call, spans: Spans, levels: Levels, runs: tuple[Run, Run], found: Found | None) -> Windows:
    problem = call.problem
    batch, heads, length, _ = problem.q.shape
    past, future = runs
    low = torch.full((batch, heads), spans.start, dtype=torch.int64, device=problem.q.device)
    high = torch.full_like(low, spans.end)
    if length == 0:
        nothing = torch.zeros_like(low)
        return Windows(low, high, low, high, nothing, nothing)
    most_low, most_high = low, high
    sights = set(problem.sights)
    if sights != {"future"}:
        furthest = past.first[:, None]
        if levels.border_before is not None:
            furthest = torch.maximum(furthest, levels.border_before)
        most_low = torch.minimum(furthest, low)
        if "future" in sights:
            most_low = torch.where(_looks(problem, "past"), most_low, low)
    if sights != {"past"}:
        furthest = future.end[:, None]
        if levels.border_after is not None:
            furthest = torch.minimum(furthest, levels.border_after)
        most_high = torch.maximum(furthest, high)
        if "past" in sights:
            most_high = torch.where(_looks(problem, "future"), most_high, high)
    most = Windows(most_low, most_high, most_low, most_high)
    return most if found is None else _certified(call, spans, levels, runs, found, most)


def _looks(problem: Problem, way: str) -> Tensor:
    """Which heads look to the past or to the future, bool [H]."""
    return torch.tensor([sight in (way, "both") for sight in problem.sights], device=problem.q.device)


def _certified(
    call: Call, spans: Spans, levels: Levels, runs: tuple[Run, Run], found: Found, most: Windows
) -> Windows:
    problem = call.problem
    length = problem.q.shape[2]
    past, future = runs
    front = slice(0, min(past.document[1] - spans.start, length))
    last = slice(max(future.document[0] - spans.start, 0), length)
    behind = ahead = torch.zeros_like(most.low)
    rows: Rows | None = None
    if any(spans.lengths[: spans.rank]):
        before = bounds_module.tiles_before(spans, past)
        if found.means is not None and before is not None:
            needed, behind = _needed_by_kernel(call, spans, levels, found, front.stop, before)
        else:
            rows = bounds_module.rows_of(call, spans, levels, found, front, past)
            needed, behind = _needed(spans, levels, found, rows, past, ahead=False)
        most = most._replace(low=torch.maximum(needed, most.most_low))
        behind = behind * (most.most_low < spans.start)
    if not problem.causal and any(spans.lengths[spans.rank + 1 :]):
        if rows is None or last != front:
            rows = bounds_module.rows_of(call, spans, levels, found, last, future)
        needed, ahead = _needed(spans, levels, found, rows, future, ahead=True)
        most = most._replace(high=torch.minimum(needed, most.most_high))
        ahead = ahead * (most.most_high > spans.end)
    return most._replace(behind=behind, ahead=ahead)


def _needed(spans: Spans, levels: Levels, found: Found, rows: Rows, run: Run, ahead: bool) -> tuple[Tensor, Tensor]:
    """The first key that is needed of earlier ranks (ahead: one past the last of later ones), and how many rows it
    takes to hold all that need any, from the span's start (ahead: its end): int64 [B, H] each."""
    tails = Tails(spans, levels, found.bounds, ahead)
    place = spans.start + rows.first + torch.arange(rows.near.shape[2], device=rows.near.device)
    sees = place < run.end[:, None] if ahead else place >= run.first[:, None]
    height = _query_heights(levels, rows, ahead)
    x, reach = _by_tile(rows, rows.near + height, sees & (run.end > run.first)[:, None])
    largest_height = height.abs().amax(-1, keepdim=True) + tails.height.abs().amax(-1, keepdim=True)
    threshold = _budget(rows.problem) + reach - rounding_of_sums(largest_height, tails.height.shape[-1])
    stuck = torch.isneginf(threshold) | torch.isnan(threshold)
    threshold = threshold.masked_fill(stuck, math.inf)
    edges = edges_of(x)  # [B, H, G]
    table = tails.table(edges, found)  # [B, H, G, blocks]
    mine = x[:, :, None] <= edges[..., None]
    mine[:, :, 1:] &= x[:, :, None] > edges[:, :, :-1, None]
    own = torch.where(mine, threshold[:, :, None], math.inf)  # [B, H, G, tiles]
    skip = torch.searchsorted(table, own.amin(-1, keepdim=True), right=True).amin((2, 3))
    needs = (own < table[..., -1:]).any(2) | stuck
    needs = needs.flip(-1) if ahead else needs
    count = torch.arange(NEAR, NEAR * needs.shape[-1] + 1, NEAR, device=needs.device)
    return tails.keys[skip.masked_fill(stuck.any(-1), 0)], (needs * count).amax(-1)


def _needed_by_kernel(
    call: Call, spans: Spans, levels: Levels, found: Found, rows: int, before: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The same of earlier ranks. rows: the first of the span; before: as `tiles_before` says."""
    from trainshort.ops.triton import borders

    assert found.means is not None
    problem, bounds = call.problem, found.bounds
    rank, tiles = before
    means = torch.cat((bounds.means[rank], found.means), dim=2)
    slopes = problem.linear.slopes
    x, least = borders.queries(problem.q[:, :, :rows], means, tiles, found.center, slopes, problem.scale)
    bases = levels.bases[0] - levels.bases[0][spans.rank]
    others = borders.Others(
        bounds.at_zero, bounds.at_most, bounds.height, bounds.longest, bases, spans.rank, spans.total,
        math.log(problem.tolerance / 2),
    )  # fmt: skip
    skip, count = borders.needed(x, least, others, found.center, found.largest, slopes)
    return _keys_of_blocks(spans, bounds, ahead=False)[skip], count


def _budget(problem: Problem) -> Tensor | float:
    """ln of what may be left out on one side, for each head: [H, 1]."""
    if problem.causal:
        return math.log(problem.tolerance / 2)
    sides = torch.tensor([1 + (sight == "both") for sight in problem.sights], device=problem.q.device)
    return torch.log(problem.tolerance / 2 / sides.double())[:, None]


class Tails:
    """The blocks of other ranks on one side, from the furthest to the nearest: [B, H, blocks] each."""

    def __init__(self, spans: Spans, levels: Levels, bounds: Bounds, ahead: bool) -> None:
        self.keys = _keys_of_blocks(spans, bounds, ahead)
        ranks = slice(spans.rank + 1, None) if ahead else slice(0, spans.rank)
        # Heights are counted from the start of this rank's own span, so that numbers stay small.
        base, side = levels.bases[ahead], int(ahead)
        base = (base - base[spans.rank])[..., None]
        self.zero, self.most, self.height = (
            _in_a_row(numbers[ranks], ahead)
            for numbers in (bounds.at_zero[:, side], bounds.at_most[:, side], bounds.height[:, side] + base)
        )

    def table(self, x: Tensor, found: Found) -> Tensor:
        """ln of what all blocks up to each can weigh for queries of height 0: [B, H, G, blocks], from the furthest
        on. x: [B, H, G]."""
        largest = found.largest[..., None]
        longest = found.bounds.longest.amax(0).double()
        longest = longest.repeat_interleave(largest.shape[1] // longest.shape[1], dim=1)[..., None]  # [B, H, 1]
        share = (x / largest).clamp_max(1.0)[..., None]
        beyond = ((x - largest).clamp_min(0.0) * longest)[..., None]
        low, high, heights = (each[:, :, None].double() for each in (self.zero, self.most, self.height))
        sums = low + share * (high - low) + beyond
        sums = torch.where(torch.isneginf(low), -HUGE, sums + heights).nan_to_num(nan=HUGE, posinf=HUGE, neginf=-HUGE)
        return torch.logcumsumexp(sums, dim=-1)


def _keys_of_blocks(spans: Spans, bounds: Bounds, ahead: bool) -> Tensor:
    """The first key that is needed (ahead: one past the last) when so many of the furthest blocks are left out."""
    ranks = slice(spans.rank + 1, None) if ahead else slice(0, spans.rank)
    starts, lengths = (
        torch.tensor(each[ranks], dtype=torch.int64)[:, None] for each in (spans.starts, spans.lengths)
    )
    block = torch.arange(bounds.height.shape[-1])  # of the longest span: others have none in some
    keys = (starts + torch.minimum((block + int(ahead)) * BLOCK, lengths)).flatten()
    own = keys.new_tensor([spans.end if ahead else spans.start])
    return torch.cat((keys.flip(0) if ahead else keys, own)).to(bounds.height.device)


def _in_a_row(numbers: Tensor, reverse: bool) -> Tensor:
    """[ranks, B, H, blocks] -> [B, H, ranks * blocks]"""
    numbers = numbers.movedim(0, 2).flatten(2)
    return numbers.flip(-1) if reverse else numbers


def _by_tile(rows: Rows, reach: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """The largest x of each tile of NEAR rows, and the least bound: infinite where no row sees any of these keys, and
    minus that where nothing is known of one that does. reach: [B, H, rows]; sees: [B, rows]."""
    known = torch.isfinite(reach)
    reach = torch.where(known, reach, torch.where(sees[:, None], -math.inf, math.inf))
    x = rows.norms.masked_fill(torch.isposinf(reach), 0.0)
    missing = -reach.shape[2] % NEAR
    x, reach = (
        torch.nn.functional.pad(tensor, (0, missing), value=fill).unflatten(2, (-1, NEAR))
        for tensor, fill in ((x, 0.0), (reach, math.inf))
    )
    return x.amax(-1), reach.amin(-1)


def _query_heights(levels: Levels, rows: Rows, ahead: bool) -> Tensor:
    """The heights of queries, float64 [B or 1, H, rows], counted from the start of the span."""
    problem = rows.problem
    if isinstance(problem.bias, LinearBias):
        past, future = (slopes.detach()[..., None] for slopes in problem.bias.both_slopes(torch.float64))
        position = problem.positions()[:, None].double() + rows.first
        return -future * (position + problem.bias.offset) if ahead else past * position
    return pick(levels.heights[ahead], rows.first + problem.bias_positions()[:, None])
