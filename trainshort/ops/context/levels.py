"""The bias of a sequence whose gates, times or positions lie on several ranks.

Proofs and sums need *heights*, numbers that rise towards the queries, so that a key of height h weighs e^(h - g) for
a query of height g, times e^score: m j for a slope m, -c_j for gates with running sums c, slope times time for times
(later keys: -m j, c_j, minus slope times time). A rank knows heights from the start of its own span; `Levels.bases`
has what is added to those of each rank, so that they go on from one to the next.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainshort.ops.bias import Bias, LinearBias
from trainshort.ops.context.call import Call, Spans
from trainshort.ops.decay import DecayBias
from trainshort.ops.gate_sums import running_sums

UNIT = 2**32  # times that are integers travel in two parts, so that float64 holds each exactly


class Gates(NamedTuple):
    """One side of the gates of a span: running sums from its first token on, that one included."""

    sums: Tensor  # float64 [B or 1, H, T], differentiable
    closed: Tensor  # bool, which gates are borders


@dataclass
class Levels:
    """The levels of one rank's span, and how they go on in the others."""

    bias: Bias | None
    gates: list[Gates]  # of the past, and of the future where that has gates
    since: Tensor | None  # times after the first of the span, float64 [B or 1, T]
    heights: list[Tensor]  # of the past and, without `causal`, of the future: float64 [B or 1, H, T]
    bases: list[Tensor]  # for each of them what every rank adds: float64 [ranks, B or 1, H]
    time_bases: Tensor | None  # the first time of each rank after that of the first one: float64 [ranks, B]
    border_before: Tensor | None = None  # the last border on earlier ranks or -1: int64 [B, H]
    border_after: Tensor | None = None  # the first border on later ranks, or the length


def make_gates(call: Call, spans: Spans) -> list[Gates]:
    bias = call.problem.bias
    if not isinstance(bias, DecayBias) or bias.rates is not None:
        return []
    if not bias.given:
        raise TypeError(
            "under context_parallel a DecayBias must be made of log gates or times, ts.DecayBias(log_gates) or "
            "ts.DecayBias.at(times, slopes), on the device of q: others do not know how a span goes on"
        )
    found = []
    for gates in bias.given:
        if gates is None:
            continue
        zero = gates.new_zeros((*gates.shape[:2], 1))
        sums, last = running_sums(gates, (zero.double(), zero.int()), start=1)
        closed = last == torch.arange(1, gates.shape[2] + 1, device=gates.device)
        if spans.start == 0:  # no link crosses the first token of all
            sums = running_sums(gates)[0]
            closed = closed & (torch.arange(gates.shape[2], device=gates.device) > 0)
        found.append(Gates(sums, closed))
    return found


def known_of(call: Call, gates: list[Gates]) -> dict[str, Tensor]:
    """What a rank tells of its own gates or times."""
    q, bias = call.problem.q, call.problem.bias
    batch, heads, length, _ = q.shape
    if not isinstance(bias, DecayBias):
        return {}
    if bias.times is not None:  # the first time in two parts, and the last after the first: [3, B]
        times = torch.zeros((3, batch), dtype=torch.float64, device=q.device)
        if length and bias.given[0] is not None:
            times[:2] = torch.stack(_in_parts(torch.atleast_2d(bias.given[0])[:, 0]))
            times[2] = bias.times[:, -1]
        return {"times": times}
    totals = torch.zeros((2, batch, heads), dtype=torch.float64, device=q.device)  # of the gates of both sides
    # First and last closed gate of either side, counted from the span's start.
    borders = torch.full((2, 2, batch, heads), -1.0, dtype=torch.float64, device=q.device)
    if length:
        index = torch.arange(length, device=q.device)
        for side, own in enumerate(gates):
            totals[side] = own.sums.detach()[..., -1]
            last = torch.where(own.closed, index, -1).amax(-1)
            first = torch.where(own.closed, index, length).amin(-1)
            borders[side] = torch.stack((torch.where(last < 0, -1, first), last))
    return {"totals": totals, "borders": borders}


def _in_parts(times: Tensor) -> tuple[Tensor, Tensor]:
    if times.is_floating_point():
        return times.double(), torch.zeros_like(times, dtype=torch.float64)
    times = times.to(torch.int64)  # where UNIT is one
    return torch.div(times, UNIT, rounding_mode="floor").double(), torch.remainder(times, UNIT).double()


def join_levels(call: Call, spans: Spans, gates: list[Gates], known: dict[str, Tensor]) -> Levels:
    """The levels of this rank, with what all ranks told, [ranks, ...] each."""
    problem = call.problem
    bias, length = problem.bias, problem.q.shape[2]
    levels = Levels(bias, gates, None, [], [], None)
    if isinstance(bias, LinearBias):
        index = torch.arange(length, dtype=torch.float64, device=problem.q.device)
        starts = torch.tensor(spans.starts, dtype=torch.float64, device=problem.q.device)[:, None, None]
        past, future = (slopes.detach() for slopes in bias.both_slopes(torch.float64))  # [B or 1, H]
        for slopes in (past,) if problem.causal else (past, -future):
            levels.heights.append(slopes[..., None] * index)
            levels.bases.append(slopes * starts)
    elif isinstance(bias, DecayBias) and bias.rates is not None:
        _join_times(levels, bias, spans, known)
    elif isinstance(bias, DecayBias):
        _join_gates(levels, spans, known)
    return levels


def _join_times(levels: Levels, bias: DecayBias, spans: Spans, known: dict[str, Tensor]) -> None:
    assert bias.times is not None
    assert bias.rates is not None
    assert bias.given[0] is not None
    present = [rank for rank, length in enumerate(spans.lengths) if length]
    unit = 1 if bias.given[0].is_floating_point() else UNIT
    first = known["times"][present[0] if present else 0]
    since = (known["times"][:, 0] - first[0]) * unit + (known["times"][:, 1] - first[1])  # [ranks, B]
    for before, after in itertools.pairwise(present):
        if not bool((since[after] >= since[before] + known["times"][before, 2]).all()):
            raise ValueError(
                f"DecayBias times must be finite and never go back, and that from rank to rank too: those of rank "
                f"{after} begin before those of rank {before} end"
            )
    levels.since, levels.time_bases = bias.times, since
    rates = torch.atleast_2d(bias.rates.detach()).double()
    height, base = rates[..., None] * bias.times[:, None], rates * since[..., None]
    levels.heights, levels.bases = [height, -height], [base, -base]


def _join_gates(levels: Levels, spans: Spans, known: dict[str, Tensor]) -> None:
    rank, starts = spans.rank, spans.starts
    before = torch.cat((torch.zeros_like(known["totals"][:1]), known["totals"][:-1].cumsum(0)))  # [ranks, 2, B, H]
    for side, (gates, sign) in enumerate(zip(levels.gates, (-1.0, 1.0), strict=False)):
        levels.heights.append(sign * gates.sums.detach())
        levels.bases.append(sign * before[:, side])
    offset = torch.tensor(starts, dtype=torch.float64, device=known["borders"].device)[:, None, None]
    first, last = known["borders"][:, -1 if len(levels.gates) > 1 else 0, 0], known["borders"][:, 0, 1]
    nowhere = torch.full_like(last[:1], -1.0)
    before_me = torch.where(last >= 0, last + offset, -1.0)[:rank]
    levels.border_before = torch.cat((nowhere, before_me)).amax(0).long()
    after_me = torch.where(first >= 0, first + offset, float(spans.total))[rank + 1 :]
    levels.border_after = torch.cat((nowhere + spans.total + 1, after_me)).amin(0).long()
