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
from trainshort.ops.context.bounds import Bounds, Rows, Run, edges_of, tail_table
from trainshort.ops.context.call import Call, Spans, agree
from trainshort.ops.context.levels import Known, Levels, join_levels, known_of, make_gates
from trainshort.ops.context.transport import Gather, Protocol
from trainshort.ops.decay import DecayBias, pick
from trainshort.ops.problem import BLOCK, Problem
from trainshort.ops.windows import rounding_of_sums


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
    told = _told(call, known_of(call, gates), certified)
    gathered = yield Gather(told)
    totals, borders, times, runs, *others = (torch.stack(each) for each in zip(*gathered, strict=True))
    levels = join_levels(call, spans, gates, Known(totals, borders, times))
    real = _real_keys(spans, runs)
    past, future = _runs_in_sight(call, spans, real)
    found: tuple[Bounds, Tensor, Tensor] | None = None
    if certified:
        samples, largest = others
        center = bounds_module.center_of(samples, problem.q.dtype).to(problem.accumulate_dtype)
        largest = largest.amax(0).clamp_min(bounds_module.SMALLEST)
        blocks = max(-(-length // BLOCK) for length in spans.lengths)
        gathered = yield Gather(_bounds(problem, levels, center, largest, blocks).tensors())
        found = Bounds.gathered(gathered), center, largest
    windows, most, rows = _windows(call, spans, levels, (past, future), found)
    gathered = yield Gather([windows])
    on_cpu = torch.stack([own for (own,) in gathered]).cpu()
    return Plan(
        call=call,
        spans=spans,
        levels=levels,
        certified=certified,
        real=real,
        center=None if found is None else found[1],
        windows=on_cpu,
        traffic=traffic_of(spans, on_cpu, problem.q.device),
        front=rows[0],
        back=rows[1],
        documents=_documents(call, spans),
        everything=int(((windows == most).all(-1) & (most[..., 0] < most[..., 1] - spans.lengths[rank])).sum()),
    )


@torch.no_grad()
def _told(call: Call, known: Known, certified: bool) -> list[Tensor]:
    problem = call.problem
    batch, _, length, _ = problem.q.shape
    mask = problem.key_padding_mask
    run = torch.zeros((2, batch), dtype=torch.int64, device=problem.q.device)  # first real key, and how many
    run[1] = length
    if mask is not None and length:
        run[0], run[1] = mask.to(torch.int8).argmax(-1), mask.sum(-1)
    told = [*known, run]
    if certified:
        norms = bounds_module.query_norms(problem)
        finite = torch.where(torch.isfinite(norms), norms, 0.0)
        largest = finite.amax(-1) if length else finite.new_zeros(finite.shape[:2])
        told += [bounds_module.sample_of(problem), largest]
    return told


_bounds = torch.no_grad()(bounds_module.bounds_of)


def _real_keys(spans: Spans, runs: Tensor) -> tuple[Tensor, Tensor]:
    """First and one-past-last real key of each row of the batch. runs: [ranks, 2, B]."""
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
    past, future = (
        Run(first.clamp_min(low).clamp_max(high), end.clamp_max(high).clamp_min(low), (low, high))
        for low, high in documents
    )
    return past, future


def _documents(call: Call, spans: Spans) -> list[int] | None:
    if call.borders is None:
        return None
    inside = [border - spans.start for border in call.borders if spans.start <= border <= spans.end]
    return sorted(set(inside))


@torch.no_grad()
def _windows(
    call: Call, spans: Spans, levels: Levels, runs: tuple[Run, Run], found: tuple[Bounds, Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """The keys that this rank needs, int64 [B, Hkv, 2], its own span included; all in sight, likewise; and how many
    rows at the front and at the back of the span need keys of others."""
    problem = call.problem
    batch, heads, length, _ = problem.q.shape
    past, future = runs
    low = torch.full((batch, heads), spans.start, dtype=torch.int64, device=problem.q.device)
    high = torch.full_like(low, spans.end)
    most_low, most_high = low, high
    front = back = 0
    if length:
        looks_back, looks_ahead = (
            torch.tensor([sight != other for sight in problem.sights], device=low.device)
            for other in ("future", "past")
        )
        furthest = past.first[:, None].expand_as(low)
        if levels.border_before is not None:
            furthest = torch.maximum(furthest, levels.border_before)
        most_low = torch.where(looks_back, torch.minimum(furthest, low), low)
        furthest = future.end[:, None].expand_as(high)
        if levels.border_after is not None:
            furthest = torch.minimum(furthest, levels.border_after)
        most_high = torch.where(looks_ahead, torch.maximum(furthest, high), high)
        low, high, front, back = most_low, most_high, length, length
        if found is not None:
            low, high, front, back = _certified(call, spans, levels, runs, found, (most_low, most_high))
    group = heads // problem.k.shape[1]

    def of_key_heads(first: Tensor, end: Tensor) -> Tensor:
        first, end = first.unflatten(1, (-1, group)).amin(2), end.unflatten(1, (-1, group)).amax(2)
        return torch.stack((first, end), dim=-1)

    return of_key_heads(low, high), of_key_heads(most_low, most_high), (front, back)


def _certified(
    call: Call,
    spans: Spans,
    levels: Levels,
    runs: tuple[Run, Run],
    found: tuple[Bounds, Tensor, Tensor],
    most: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, int, int]:
    """The keys that are needed of both sides, [B, H] each, and the numbers of rows that need some."""
    problem, (bounds, center, largest) = call.problem, found
    length = problem.q.shape[2]
    past, future = runs
    front = slice(0, min(past.document[1] - spans.start, length))
    last = slice(max(future.document[0] - spans.start, 0), length)
    sides = torch.tensor([1 + (sight == "both") for sight in problem.sights], device=problem.q.device)
    budget = torch.log(problem.tolerance / 2 / sides.double())[None, :, None]  # [1, H, 1]
    rows = bounds_module.rows_of(call, spans, levels, bounds, center, front, past)
    needed, behind = _needed_behind(spans, levels, bounds, rows, largest, budget, past)
    low = torch.maximum(torch.where(behind.any(-1), needed, spans.start), most[0])
    count = _rows_of(behind & (most[0] < spans.start)[..., None])
    if problem.causal:
        return low, most[1], count, 0
    if last != front:
        rows = bounds_module.rows_of(call, spans, levels, bounds, center, last, future)
    needed, ahead = _needed_ahead(spans, levels, bounds, rows, largest, budget, future)
    high = torch.minimum(torch.where(ahead.any(-1), needed, spans.end), most[1])
    return low, high, count, _rows_of(ahead.flip(-1) & (most[1] > spans.end)[..., None])


def _rows_of(needs: Tensor) -> int:
    """How many rows it takes to hold all that need something: bool [B, H, rows]."""
    places = torch.arange(1, needs.shape[-1] + 1, device=needs.device)
    return int((needs * places).amax())


def _needed_behind(
    spans: Spans, levels: Levels, bounds: Bounds, rows: Rows, largest: Tensor, budget: Tensor, run: Run
) -> tuple[Tensor, Tensor]:
    """The first key that is needed of earlier ranks, int64 [B, H], and which rows need any, bool [B, H, rows]."""
    ranks = range(spans.rank)
    tails = _Tails(spans, levels, bounds, ranks, side=0)
    place = rows.first + torch.arange(rows.problem.q.shape[2], device=largest.device) + spans.start
    sees = (place >= run.first[:, None]) & (run.end > run.first)[:, None]
    skipped, needs = _skipped(tails, levels, rows, largest, budget, sees, ahead=False)
    first = torch.cat((tails.first, tails.first.new_full((1,), spans.start)))[skipped]
    return first, needs


def _needed_ahead(
    spans: Spans, levels: Levels, bounds: Bounds, rows: Rows, largest: Tensor, budget: Tensor, run: Run
) -> tuple[Tensor, Tensor]:
    """One past the last key that is needed of later ranks, and which rows need any."""
    ranks = range(len(spans.lengths) - 1, spans.rank, -1)
    tails = _Tails(spans, levels, bounds, ranks, side=1)
    place = rows.first + torch.arange(rows.problem.q.shape[2], device=largest.device) + spans.start
    sees = (place < run.end[:, None]) & (run.end > run.first)[:, None]
    skipped, needs = _skipped(tails, levels, rows, largest, budget, sees, ahead=True)
    end = torch.cat((tails.end, tails.end.new_full((1,), spans.end)))[skipped]
    return end, needs


class _Tails:
    """The blocks of other ranks on one side, from the furthest to the nearest."""

    def __init__(self, spans: Spans, levels: Levels, bounds: Bounds, ranks: range, side: int) -> None:
        order = slice(None) if side == 0 else slice(None, None, -1)
        device = bounds.height.device
        first: list[int] = []
        end: list[int] = []
        zero, most, height = ([bounds.height.new_zeros((*bounds.height.shape[2:4], 0))] for _ in range(3))
        for rank in ranks:
            length, start = spans.lengths[rank], spans.starts[rank]
            own = range(-(-length // BLOCK))[order]
            first += [start + block * BLOCK for block in own]
            end += [start + min(length, (block + 1) * BLOCK) for block in own]
            index = torch.tensor(list(own), dtype=torch.int64, device=device)
            zero.append(bounds.at_zero[rank, side][..., index].double())
            most.append(bounds.at_most[rank, side][..., index].double())
            # Counted from the start of this rank's own span, so that numbers stay small.
            base = (levels.bases[side][rank] - levels.bases[side][spans.rank])[..., None]
            height.append(bounds.height[rank, side][..., index] + base)
        self.first = torch.tensor(first, dtype=torch.int64, device=device)
        self.end = torch.tensor(end, dtype=torch.int64, device=device)
        self.zero, self.most, self.height = (torch.cat(each, dim=-1) for each in (zero, most, height))


def _skipped(
    tails: _Tails, levels: Levels, rows: Rows, largest: Tensor, budget: Tensor, sees: Tensor, ahead: bool
) -> tuple[Tensor, Tensor]:
    """How many of the furthest blocks all rows may skip, int64 [B, H], and which rows may not skip all of them."""
    blocks = tails.zero.shape[-1]
    skip = torch.full(largest.shape, blocks, dtype=torch.int64, device=largest.device)
    needs = torch.zeros_like(rows.near, dtype=torch.bool)
    if blocks == 0:
        return skip, needs
    height = _query_heights(levels, rows, ahead)
    rounding = rounding_of_sums(height.abs() + tails.height.abs().amax(-1, keepdim=True), blocks)
    threshold = budget + height - rounding + rows.near
    unknown = ~torch.isfinite(rows.near) | ~torch.isfinite(threshold)
    threshold = threshold.masked_fill(unknown, math.inf)
    below = None
    for edge in edges_of(rows.norms).unbind(-1):
        x = edge[..., None]  # [B, H, 1]
        mine = rows.norms <= x if below is None else (rows.norms > below) & (rows.norms <= x)
        own = threshold.masked_fill(~mine, math.inf)
        table = tail_table(tails.zero, tails.most, tails.height, x / largest[..., None])
        count = torch.searchsorted(table, own.amin(-1, keepdim=True), right=True)[..., 0]
        skip = torch.minimum(skip, count)
        needs = needs | (own < table[..., -1:])
        below = x
    stuck = unknown & sees[:, None]
    return skip.masked_fill(stuck.any(-1), 0), needs | stuck


def _query_heights(levels: Levels, rows: Rows, ahead: bool) -> Tensor:
    """The heights of queries, float64 [B or 1, H, rows], counted from the start of the span."""
    problem = rows.problem
    if isinstance(problem.bias, LinearBias):
        past, future = (slopes.detach()[..., None] for slopes in problem.bias.both_slopes(torch.float64))
        position = problem.positions()[:, None].double() + rows.first
        return -future * (position + problem.bias.offset) if ahead else past * position
    return pick(levels.heights[ahead], rows.first + problem.bias_positions()[:, None])


def inner_tolerance(plan: Plan) -> float:
    """For what is fetched and not visited."""
    return plan.problem.tolerance / 2 if plan.certified else plan.problem.tolerance
