"""What keys on other ranks can weigh, from a few numbers for each block of 128 of them.

Take a block of keys, a query head with a centre c, norms n_j = ‖k_j - c‖ and heights h_j (levels.py), of which H is
the largest in the block. By Cauchy-Schwarz a query with x = s‖q‖ and height g gives the block at most

    e^(f(x) + H - g),    f(x) = ln sum over j of e^(x n_j + h_j - H).

f is convex, so for 0 <= x <= X it lies under its chord: f(x) <= f(0) + (x / X) (f(X) - f(0)); beyond X it rises by at
most the largest norm. With X the largest x of queries next to other ranks (of all of them), f(0), f(X) and H are
all that others need to know of the block, and running log-sums over blocks bound whole tails, as in ops/windows.py.
What a query has near its own place is bounded from below as in ops/near.py, where the means of the last keys in front
of a span come from the rank that has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from trainshort.ops.bias import Bias, LinearBias
from trainshort.ops.context.call import Call, Spans
from trainshort.ops.context.levels import Levels
from trainshort.ops.decay import DecayBias
from trainshort.ops.dispatch import backend_of
from trainshort.ops.near import NEAR, mean_key_score, nearest_score, with_slack
from trainshort.ops.norms import key_norms_of, row_norms
from trainshort.ops.problem import BLOCK, Problem
from trainshort.ops.windows import QUANTILES

TILES = 8  # of NEAR keys at the end of a span, whose means the next rank is told
SMALLEST = 2.0**-100  # X of queries that are all zero
ENDS = 1024  # rows at either end of a span, for X


def slack_of(problem: Problem) -> float:
    """For the rounding of a norm: see docs/proof.md."""
    return 1.0 + (problem.q.shape[3] + 4) * 2.0**-23


def uses_kernels(call: Call) -> bool:
    """Whether k and q are read once each, by the kernels of ops/triton/borders.py."""
    problem = call.problem
    plain = problem.causal and isinstance(problem.bias, LinearBias) and problem.key_padding_mask is None
    return plain and problem.q.shape[2] > 0 and backend_of(problem, call.backend) == "triton"


def query_norms(problem: Problem) -> Tensor:
    """x = s‖q‖, float64 [B, H, T]."""
    return row_norms(problem.q).double() * (abs(problem.scale) * slack_of(problem))


def largest_query(problem: Problem) -> Tensor:
    """The largest x of the queries next to other ranks, float64 [B, H]: what X is made of."""
    q = problem.q
    norms = row_norms(q[:, :, :ENDS] if problem.causal else torch.cat((q[:, :, :ENDS], q[:, :, -ENDS:]), dim=2))
    if norms.shape[2] == 0:
        return norms.new_zeros(norms.shape[:2], dtype=torch.float64)
    largest = norms.nan_to_num(nan=0.0, posinf=0.0).amax(-1).double()
    return largest * (abs(problem.scale) * slack_of(problem))


def sample_of(problem: Problem) -> Tensor:
    """Sum, number and sum of squares of a sample of the keys, float64 [B, Hkv, D + 2]."""
    k = problem.k
    step = max(1, k.shape[2] // 64)
    sample = k[:, :, ::step].double()
    if problem.key_padding_mask is None:
        count = sample.new_full((*k.shape[:2], 1), sample.shape[2])
    else:
        real = problem.key_padding_mask[:, ::step]
        sample = sample.masked_fill(~real[:, None, :, None], 0.0)
        count = real.sum(-1).double()[:, None, None].expand(-1, k.shape[1], -1)
    return torch.cat((sample.sum(2), count, sample.square().sum((2, 3))[..., None]), dim=-1)


def center_of(samples: Tensor, dtype: torch.dtype) -> Tensor:
    """The mean of all ranks' samples, as a key has it, where that makes keys shorter, else 0: [B, Hkv, D]. Any
    vector is sound."""
    total = samples.sum(0)
    sums, count, squares = total[..., :-2], total[..., -2:-1], total[..., -1:]
    mean = sums / count
    shorter = (sums * mean).sum(-1, keepdim=True) > 0.19 * squares  # not for NaN or where squares are infinite
    return torch.where(shorter, mean, 0.0).to(dtype)


@dataclass
class Bounds:
    """What a rank tells of its keys, or all ranks: then [ranks, ...]. For each side of `Levels.heights`."""

    at_zero: Tensor  # f(0), float32 [sides, B, H, blocks]
    at_most: Tensor  # f(X)
    height: Tensor  # H, float64 [sides, B, H, blocks], from the start of the span
    means: Tensor  # of the last TILES tiles of keys, [B, Hkv, TILES, D]; what a short span lacks is zero
    mean_heights: Tensor  # and of their heights, float64 [B, H, TILES]
    longest: Tensor  # the largest norm, float32 [B, Hkv]

    def tensors(self) -> list[Tensor]:
        return [self.height, self.mean_heights, self.means, self.at_zero, self.at_most, self.longest]

    @classmethod
    def gathered(cls, of_ranks: list[list[Tensor]]) -> Bounds:
        height, mean_heights, means, at_zero, at_most, longest = (
            torch.stack(each) for each in zip(*of_ranks, strict=True)
        )
        return cls(at_zero, at_most, height, means, mean_heights, longest)


class Found(NamedTuple):
    """What a rank knows of keys once all have told theirs."""

    bounds: Bounds  # of all ranks
    center: Tensor  # [B, Hkv, D]
    largest: Tensor  # X, float64 [B, H]
    means: Tensor | None  # of tiles of this rank's keys, where kernels found them


def bounds_of(
    call: Call, levels: Levels, center: Tensor, largest: Tensor, blocks: int
) -> tuple[Bounds, Tensor | None]:
    """Those of this rank's keys, and means of their tiles if they come with that. largest: X, [B, H]; blocks: room
    for those of the longest span."""
    problem = call.problem
    if uses_kernels(call):
        return _bounds_by_kernel(problem, levels, center, largest, blocks)
    batch, heads, length, _ = problem.q.shape
    group = heads // problem.k.shape[1]
    norms = key_norms_of(problem, center, slack_of(problem))  # [B, Hkv, T]
    longest = norms.amax(-1).clamp_min(0.0).float() if length else norms.new_zeros(norms.shape[:2]).float()
    tail = _by_block(norms.double().repeat_interleave(group, dim=1), blocks, -math.inf)
    zeros, mosts, ends = [], [], []
    for heights in levels.heights:
        high = _by_block(heights.expand(batch, -1, -1), blocks, -math.inf)  # [B, H, blocks, BLOCK]
        end = high.amax(-1)
        end = end.masked_fill(torch.isneginf(end), 0.0)
        away = (high - end[..., None]).masked_fill(torch.isneginf(tail), -math.inf)
        zeros.append(_upwards(torch.logsumexp(away, dim=-1)))
        mosts.append(_upwards(torch.logsumexp(away + (largest[..., None, None] * tail).nan_to_num(0.0), dim=-1)))
        ends.append(end)
    means, mean_heights = _tiles(problem, levels)
    return Bounds(torch.stack(zeros), torch.stack(mosts), torch.stack(ends), means, mean_heights, longest), None


def _bounds_by_kernel(
    problem: Problem, levels: Levels, center: Tensor, largest: Tensor, blocks: int
) -> tuple[Bounds, Tensor]:
    from trainshort.ops.triton import borders

    found = borders.keys(problem.k, center, problem.linear.slopes, largest, blocks)
    length, tiles = problem.k.shape[2], problem.k.shape[2] // NEAR
    if length % NEAR == 0 and tiles >= TILES:
        means = found.means[:, :, tiles - TILES : tiles]
        heights = torch.zeros((*largest.shape, TILES), dtype=torch.float64, device=means.device)  # nobody asks
    else:
        means, heights = _tiles(problem, levels)
    zero, most, height = (each[None] for each in (found.at_zero, found.at_most, found.height))
    return Bounds(zero, most, height, means, heights, found.longest.amax(-1)), found.means


def _by_block(rows: Tensor, blocks: int, fill: float) -> Tensor:
    """[..., T] -> [..., blocks, BLOCK]."""
    return torch.nn.functional.pad(rows, (0, blocks * BLOCK - rows.shape[-1]), value=fill).unflatten(-1, (-1, BLOCK))


def _upwards(numbers: Tensor) -> Tensor:
    """In float32, and not less than before. Infinite for what is no number."""
    up = (numbers + 2.0**-20 * numbers.abs() + 1e-5).float()
    return torch.where(torch.isnan(up), torch.where(torch.isneginf(numbers), -math.inf, math.inf), up).float()


def _tiles(problem: Problem, levels: Levels) -> tuple[Tensor, Tensor]:
    batch, heads, length, dim = problem.q.shape
    count = min(TILES, length // NEAR)
    means = problem.k.new_zeros((batch, problem.k.shape[1], TILES, dim), dtype=problem.accumulate_dtype)
    heights = torch.zeros((batch, heads, TILES), dtype=torch.float64, device=means.device)
    if count:
        last = slice(length - count * NEAR, length)
        means[:, :, -count:] = problem.k[:, :, last].unflatten(2, (count, NEAR)).mean(3, dtype=means.dtype)
        heights[..., -count:] = levels.heights[0][..., last].unflatten(2, (count, NEAR)).mean(3)
    return means, heights


@dataclass
class Run:
    """The keys of the whole sequence that some rows may see, if padding and borders of documents are all that counts.

    first, end: int64 [B]; document: where the document of these rows lies.
    """

    first: Tensor
    end: Tensor
    document: tuple[int, int]


@dataclass
class Rows:
    """Some rows of a rank's span, all of one document, and what is known of them."""

    problem: Problem  # of these queries and the keys at their places
    first: int  # the first of them in the span
    norms: Tensor  # x, [B, H, rows]
    near: Tensor  # a lower bound of the log-sum-exp, [B, H, rows]; not finite where none is known


def rows_of(call: Call, spans: Spans, levels: Levels, found: Found, rows: slice, real: Run) -> Rows:
    """real: the keys of the whole sequence that these rows may see. Centred: `near` is less s q.c."""
    problem = _part(call.problem, rows)
    bounds, center = found.bounds, found.center
    longest = bounds.longest.amax(0)
    norms = query_norms(problem)
    few = slice(0, None if problem.key_padding_mask is not None or not problem.bias_is_linear else 2 * NEAR)
    near = torch.full_like(norms, -math.inf)
    if rows.stop - rows.start > 2 * NEAR:
        near = mean_key_score(problem, center, 0).double()
    some = _queries(problem, few)
    near[:, :, few] = torch.maximum(near[:, :, few], nearest_score(some, center))
    if rows.start == 0:
        before = _with_tiles_before(problem, spans, levels, bounds, real)
        if before is not None:
            count = before.q.shape[2]
            start = before.k.shape[2] - count
            score = mean_key_score(before, center, start).double()
            blind = torch.tensor([sight == "future" for sight in problem.sights], device=score.device)
            score = score.masked_fill(blind[:, None], -math.inf)
            near[:, :, :count] = torch.maximum(near[:, :, :count], score)
    return Rows(problem, rows.start, norms, with_slack(problem, near, center, norms, longest))


def tiles_before(spans: Spans, real: Run) -> tuple[int, int] | None:
    """The rank in front of a span, and how many tiles at its end are of the document of the first rows."""
    ranks = [rank for rank in range(spans.rank) if spans.lengths[rank]]
    tiles = min(TILES, spans.lengths[ranks[-1]] // NEAR, (spans.start - real.document[0]) // NEAR) if ranks else 0
    return (ranks[-1], tiles) if tiles else None


def _part(problem: Problem, rows: slice) -> Problem:
    if rows.start == 0 and rows.stop == problem.q.shape[2]:
        return problem
    q, k, v = (tensor[:, :, rows] for tensor in (problem.q, problem.k, problem.v))
    bias = None if problem.bias is None else problem.bias.part(slice(None), slice(None), rows)
    return replace(problem, q=q, k=k, v=v, bias=bias)  # there is no padding where there are documents


def _queries(problem: Problem, rows: slice) -> Problem:
    """The same problem for its first queries."""
    return replace(problem, q=problem.q[:, :, rows], query_start=0)


def _with_tiles_before(problem: Problem, spans: Spans, levels: Levels, bounds: Bounds, real: Run) -> Problem | None:
    """The first rows, with tiles of keys in front of them that stand for those of the rank before: each key is the
    mean of its tile, which is all that `mean_key_score` looks at."""
    found = tiles_before(spans, real)
    if found is None:
        return None
    rank, tiles = found
    rows = slice(0, min(problem.q.shape[2], TILES * NEAR))
    before = bounds.means[rank, :, :, TILES - tiles :].repeat_interleave(NEAR, dim=2)
    k = torch.cat((before, problem.k[:, :, rows].to(before.dtype)), dim=2)
    mask = None
    if problem.key_padding_mask is not None:
        place = spans.start - NEAR * torch.arange(tiles, 0, -1, device=k.device)  # of the first key of each tile
        whole = (place >= real.first[:, None]) & (place + NEAR <= real.end[:, None])
        mask = torch.cat((whole.repeat_interleave(NEAR, dim=1), problem.key_padding_mask[:, rows]), dim=1)
    heights = bounds.mean_heights[rank, :, :, TILES - tiles :]
    bias = _bias_after_tiles(problem, spans, levels, heights, rank)
    q = problem.q[:, :, rows].to(before.dtype)
    return replace(problem, q=q, k=k, v=k, bias=bias, key_padding_mask=mask, causal=True)  # earlier keys are enough


def _bias_after_tiles(problem: Problem, spans: Spans, levels: Levels, heights: Tensor, rank: int) -> Bias | None:
    """The bias of the first rows and the tiles before them, whose mean heights [B, H, tiles] come from that rank."""
    if not isinstance(problem.bias, DecayBias):
        return problem.bias
    batch = problem.q.shape[0]
    count = heights.shape[2] * NEAR
    own = levels.heights[0][..., : TILES * NEAR].expand(batch, -1, -1)
    before = heights + (levels.bases[0][rank] - levels.bases[0][spans.rank])[..., None]
    sums = -torch.cat((before.repeat_interleave(NEAR, dim=2), own), dim=2)
    first = torch.zeros_like(sums, dtype=torch.int32)
    if levels.border_before is not None:
        index = torch.arange(own.shape[2], device=own.device)
        closed = levels.gates[0].closed[..., : own.shape[2]].expand(batch, -1, -1)
        far = (levels.border_before - spans.start + count).clamp_min(0)[..., None]
        first[..., count:] = torch.maximum(torch.where(closed, index + count, 0).cummax(-1).values, far).int()
    return DecayBias.from_fields(gate_sums=sums, gate_first=first)


def edges_of(norms: Tensor) -> Tensor:
    """A few values of x for each head, the last at or above every finite one: float64 [B, H, G]."""
    finite = torch.where(torch.isfinite(norms), norms, 0.0)
    sample = finite[:, :, :: max(1, norms.shape[2] // 256)].sort(-1).values
    picks = [round(quantile * (sample.shape[2] - 1)) for quantile in QUANTILES[:-1]]
    return torch.cat((sample[:, :, picks], finite.amax(-1, keepdim=True)), dim=-1)
