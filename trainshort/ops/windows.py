"""Certified windows: which keys can matter, proved from the norms of q and k.

For a query i at position p with slope m, and any vector c taken from every key (softmax does not change):

    skipped(f)  =  sum over keys j before block f of exp(score_ij)
                <= exp(-m p) * sum over those j of exp(s‖q_i‖‖k_j - c‖ + m j)      (Cauchy-Schwarz)
    total       >= sum over the keys near i of exp(score_ij)                       (the same shift by c)

so block f may be the first one visited as soon as skipped(f) <= tolerance * total. The sum over j depends on
the query through x = s‖q_i‖ alone and grows with x: it is tabulated once a head for a few values of x
(`edges`), as a running log-sum over key blocks, and each query uses the next edge above its own x. Finding
the window of a query block is then a binary search in that table. The future side of symmetric attention is
the mirror image, with half of the tolerance for each side.

Rounding is paid for: norms carry a slack of (D + 4) 2^-23 of their size, near scores one of (D + 36) 2^-23, which no
setting of torch for the precision of matrix products can exceed, because no matrix product of float32 is taken. A
NaN or an infinity in a norm makes the bound infinite, so that such a key is always visited and such a query visits
everything.
For a DecayBias -c_j stands for m j and -c_p for m p. Under powers of the distance (KerpleBias) the tail comes from a
line that no cost lies below, and the total from the costs themselves.

The proofs, and what skipping can cost in outputs and gradients, are in docs/proof.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainshort.ops import threads
from trainshort.ops.bias import Sight
from trainshort.ops.decay import DecayBias
from trainshort.ops.kerple import KerpleBias
from trainshort.ops.near import lse_lower_bound
from trainshort.ops.norms import block_norms_of, center_of, key_norms_of, row_norms
from trainshort.ops.problem import BLOCK, Problem
from trainshort.ops.splits import Split, split_problem

QUANTILES = (0.5, 0.9, 1.0)  # of x over a sample of queries: where the table has its edges
FAR = 2**40  # beyond every key and every block, and exact in a double
COST = 16  # of a number of q or k here, in multiplications
SHORT = 1024  # keys of a row
HUGE = 1e300  # stands for an infinite bound: above every threshold, and safe to add to


def certified_blocks(problem: Problem, block: int = BLOCK, *, every_head: bool = False) -> Tensor:
    """First and one-past-last key block for each query block: int32 [B, H, ceil(Tq / block), 2].

    every_head: look at heads too for which that would not pay, to know what can be proved of them.
    """
    if problem.q.device.type == "mps":  # has no float64, which the tables need
        return certified_blocks(problem.to("cpu"), block, every_head=every_head).to(problem.q.device)
    with torch.autocast(problem.q.device.type, enabled=False):
        return _certified_blocks(problem, block, every_head)


def _certified_blocks(problem: Problem, block: int, every_head: bool) -> Tensor:
    low, high = visible_blocks(problem, block)  # [B, H, query blocks]
    empty = high <= low
    every_head = every_head and problem.may_skip and min(problem.q.shape[2], problem.k.shape[2]) > 0
    heads = slice(0, problem.q.shape[1]) if every_head else promising_heads(problem, block)
    if heads is not None:
        first, last = _in_splits(problem.part(slice(None), heads), block)
        low, high = low.clone(), high.clone()
        low[:, heads] = torch.maximum(low[:, heads], first)
        high[:, heads] = torch.minimum(high[:, heads], last)
        if isinstance(problem.bias, DecayBias):
            low, high = _inside_borders(problem, low, high, block)
        # Monotone in the query block, so that each key block serves one contiguous range of query blocks.
        low = low.masked_fill(empty, FAR).flip(-1).cummin(-1).values.flip(-1)
        high = high.masked_fill(empty, 0).cummax(-1).values
    low, high = low.masked_fill(empty, 0), high.masked_fill(empty, 0)
    return torch.stack((low, high), dim=-1).to(torch.int32)


def _inside_borders(problem: Problem, low: Tensor, high: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Windows without the blocks that lie behind a border for all queries of a block."""
    place = problem.bias_positions()
    first, end = problem.decay.first_visible(place), problem.decay.end_visible(place)  # [B or 1, H, Tq]
    if first is not None:
        low = torch.maximum(low, _by_block(first, block, fill=FAR).amin(-1) // block)
    if end is not None:
        high = torch.minimum(high, -(-_by_block(end, block, fill=0).amax(-1) // block))
    return low, high


def promising_heads(problem: Problem, block: int = BLOCK) -> slice | None:
    """The heads whose slopes allow for skipping, before any norm is looked at; None where it would not pay.

    Whatever the norms are, a window is at least ln(1/tolerance)/m long. A head is worth the look if it could
    skip a quarter of its blocks, and the look as a whole if an eighth of all blocks could go; a half in short rows
    (`SHORT`), which a few kernel calls compute whole. Slopes that lie on a GPU are not read: every head is looked at.
    """
    if not problem.may_skip:
        return None
    heads = problem.q.shape[1]
    query_blocks, key_blocks = (-(-t.shape[2] // block) for t in (problem.q, problem.k))
    if query_blocks == 0 or key_blocks < 2:
        return None
    if isinstance(problem.bias, KerpleBias) and problem.causal and problem.q.shape[2] == 1:
        return None  # a step of decoding is cheaper than its window
    if problem.q.device.type != "cpu":
        return slice(0, heads)
    by_levels = isinstance(problem.bias, DecayBias)
    kept = _least_by_levels(problem, block) if by_levels else _least_by_slopes(problem, block)
    if float(kept.mean()) > (0.5 if _is_short(problem) else 0.875):
        return None
    promising = (kept <= 0.75).nonzero()[:, 0].tolist()
    if not promising:
        return None
    group = heads // problem.k.shape[1]  # whole groups, so that their keys are a slice as well
    first, end = promising[0], promising[-1] + 1
    return slice(first // group * group, -(-end // group) * group)


def _least_by_slopes(problem: Problem, block: int) -> Tensor:
    """The share of its blocks that a head visits at least, whatever the norms are: float64 [H]."""
    query_blocks, key_blocks = (-(-t.shape[2] // block) for t in (problem.q, problem.k))
    rise: Tensor | float = 0.0
    if isinstance(problem.bias, KerpleBias):
        steepest, rise = _envelope(problem, problem.bias)
    else:
        slopes = problem.linear.slopes.detach()
        if problem.linear.future is not None:
            slopes = torch.maximum(slopes, problem.linear.future.detach())
        steepest = torch.atleast_2d(slopes).amax(0).double()
    shortest = 1 + torch.ceil((math.log(1.0 / problem.tolerance) + rise) / steepest / block)  # blocks, [H]
    if problem.causal:  # a query block with n key blocks in sight visits at least min(n, shortest) of them
        sight = torch.arange(key_blocks - query_blocks + 1, key_blocks + 1, device="cpu").clamp(min=1).double()
        return torch.minimum(sight, shortest[:, None]).sum(-1) / sight.sum()
    return (2 * shortest - 1).clamp(max=key_blocks) / key_blocks


def _envelope(problem: Problem, bias: KerpleBias) -> tuple[Tensor, Tensor]:
    """Slopes and rises [H] of lines that the costs of all keys in sight lie above."""
    position = problem.positions()
    furthest = position.amax()
    if not problem.causal:
        furthest = torch.maximum(furthest, problem.k.shape[2] - 1 - position.amin())
    return bias.envelope(furthest.clamp_min(1).double(), math.log(1.0 / problem.tolerance))


def _least_by_levels(problem: Problem, block: int) -> Tensor:
    """The same where c falls by ln(1/tolerance), or a border lies, within the row: float64 [H]."""
    place = problem.bias_positions()[:, ::block]  # of the first query of each block, [B or 1, query blocks]
    far = math.log(1.0 / problem.tolerance)
    sight = place // block + 1 if problem.causal else torch.full_like(place, -(-problem.k.shape[2] // block))
    least = sight[:, None].double()
    for ahead in (False,) if problem.causal else (False, True):
        queries, heights = problem.decay.heights(place, ahead)
        ends = _by_block(heights, block)[..., -1].contiguous()
        batch = max(ends.shape[0], queries.shape[0])
        ends, queries = (t.expand(batch, -1, -1).contiguous() for t in (ends, queries))
        least = least - torch.searchsorted(ends, queries - far)
    border = problem.decay.first_visible(place)
    if border is not None and problem.causal:
        least = torch.minimum(least, (sight[:, None] - border // block).double())
    return (least.clamp(min=1).sum(-1) / sight[:, None].sum(-1)).mean(0)


def _is_short(problem: Problem) -> bool:
    """Plain causal rows of few keys."""
    others = (problem.key_padding_mask, problem.cu_seqlens, problem.query_start, problem.key_norms)
    same = problem.q.shape[2] == problem.k.shape[2] <= SHORT
    return same and problem.causal and all(other is None for other in others)


def visible_blocks(problem: Problem, block: int) -> tuple[Tensor, Tensor]:
    """The key blocks that hold a key in sight of a query block: [low, high), each int64 [B, H, blocks]."""
    limits = {}
    for sight, (low, high) in _limits(problem).items():
        blind = high <= low
        low, high = low.masked_fill(blind, FAR), high.masked_fill(blind, 0)
        low = _by_block(low, block, fill=FAR).amin(-1)
        high = _by_block(high, block, fill=0).amax(-1)
        limits[sight] = (low // block, -(-high // block))
    return _of_heads(problem, limits)


def visible_keys(problem: Problem) -> tuple[Tensor, Tensor]:
    """The keys in sight of each query: [first, end), int64 [B, H, Tq] each; none at all where end <= first.

    None, too, where a border lies between a query in padding and the real keys. (Backends ask for the borders of the
    nearest real key, so that their output there means nothing.)
    """
    low, high = _of_heads(problem, _limits(problem))
    if isinstance(problem.bias, DecayBias):
        place = problem.true_positions()
        first, end = problem.bias.first_visible(place), problem.bias.end_visible(place)
        low = low if first is None else torch.maximum(low, first)
        high = high if end is None else torch.minimum(high, end)
    return low, high


Limits = dict[Sight, tuple[Tensor, Tensor]]


def _limits(problem: Problem) -> Limits:
    """For heads that look one way or another, the keys [low, high) of each query: [B or 1, Tq] each."""
    first, end = problem.key_runs()
    position = problem.positions()
    limits: Limits = {}
    for sight in set(problem.sights):
        low = torch.maximum(first, position) if sight == "future" else first.expand_as(first + position)
        high = torch.minimum(end, position + 1) if sight == "past" else end.expand_as(end + position)
        limits[sight] = (low, high)
    return limits


def _of_heads(problem: Problem, limits: Limits) -> tuple[Tensor, Tensor]:
    """[B or 1, ...] for each way to look -> [B, H, ...]."""
    batch = problem.q.shape[0]
    low, high = (
        torch.stack([limits[sight][side].expand(batch, -1) for sight in problem.sights], dim=1) for side in (0, 1)
    )
    return low, high


def _by_block(rows: Tensor, block: int, fill: float | None = None) -> Tensor:
    """[..., T] -> [..., ceil(T / block), block], the last block filled up, by its last number if none is given."""
    missing = -rows.shape[-1] % block
    if missing and fill is None:
        rows = torch.cat((rows, rows[..., -1:].expand(*rows.shape[:-1], missing)), dim=-1)
    elif missing:
        rows = torch.nn.functional.pad(rows, (0, missing), value=fill)
    return rows.unflatten(-1, (-1, block))


def _in_splits(problem: Problem, block: int) -> tuple[Tensor, Tensor]:
    """_certified_sides, computed by several threads."""
    batch, heads, queries, dim = problem.q.shape
    each = float(COST * (queries + problem.k.shape[2]) * dim)
    splits = split_problem(problem, torch.full((batch, heads), each, dtype=torch.float64, device="cpu"))
    if len(splits) == 1:
        return _certified_sides(problem, block)
    first, last = (
        torch.empty((batch, heads, -(-queries // block)), dtype=torch.int64, device="cpu") for _ in range(2)
    )

    def compute(split: Split) -> None:
        own_first, own_last = _certified_sides(split.of(problem), block)
        split.queries(first).copy_(own_first)
        split.queries(last).copy_(own_last)

    threads.run(compute, splits)
    return first, last


class _Side(NamedTuple):
    """One side of a bias by heights: a key of height h weighs exp(h - g) for a query of height g, times exp(score).

    Heights rise towards the queries: m j and m p for a slope m, -c_j and -c_p for a decay.
    """

    queries: Tensor  # float64 [B or 1, H, Tq]
    ends: Tensor  # of the nearest key of each key block, float64 [B or 1, H, key blocks]
    fade: Tensor  # of all keys of a block less that, at most 0 and rising: [B or 1, H, 1 or key blocks, block]
    series: Tensor  # ln of the sum of exp(fade) over a block: [B or 1, H, 1 or key blocks]


def _slope_side(slopes: Tensor, position: Tensor, blocks: int, block: int) -> _Side:
    """slopes: [B or 1, H]; position: of the queries, [B or 1, 1, Tq]."""
    ends = (torch.arange(blocks, device=slopes.device) + 1) * block - 1
    inside = torch.arange(1 - block, 1, device=slopes.device)  # position relative to the end of the block
    queries = slopes[..., None] * position
    # Sums of numbers as large as these round to 2^-53 of them, a few times.
    rounding = 2.0**-50 * (queries.abs() + slopes[..., None] * (blocks * block))
    # All keys as long as the longest: a geometric series.
    series = torch.log(torch.expm1(-slopes * block) / torch.expm1(-slopes))
    return _Side(
        queries=queries - rounding,
        ends=(slopes[..., None] * ends).masked_fill(slopes[..., None] == 0, HUGE),  # without a slope nothing goes
        fade=(slopes[..., None] * inside)[:, :, None],
        series=series[..., None],
    )


def _level_side(queries: Tensor, heights: Tensor, block: int) -> _Side:
    """queries: [B or 1, H, Tq]; heights: [B or 1, H, Tk]."""
    by_block = _by_block(heights, block)
    fade = by_block - by_block[..., -1:]
    rounding = rounding_of_sums(heights[..., :1].abs().maximum(heights[..., -1:].abs()), by_block.shape[2])
    return _Side(queries - rounding, by_block[..., -1], fade, torch.logsumexp(fade, dim=-1))


def rounding_of_sums(largest: Tensor, blocks: int) -> Tensor:
    """What sums of heights may be off by in all: of near keys, of a threshold, and of a running log-sum over blocks.

    Each operation rounds to 2^-53 of numbers as large as these. A running sum does it once a block, and where c has
    fallen far and then stays as it is, every time the same way, until what a block adds is lost altogether.
    """
    return (blocks + 64) * 2.0**-53 * largest


def _envelope_side(problem: Problem, bias: KerpleBias, position: Tensor, block: int) -> _Side:
    """position: of the queries, [B or 1, 1, Tq]."""
    slopes, rises = (line[None] for line in _envelope(problem, bias))  # [1, H]
    side = _slope_side(slopes, position, -(-problem.k.shape[2] // block), block)
    return side._replace(queries=side.queries - (1.0 + 2.0**-50) * rises[..., None])


def _side(problem: Problem, block: int, ahead: bool) -> _Side:
    """One side of the bias of a problem. Later keys are mirrored: key j stands at blocks * block - 1 - j."""
    blocks = -(-problem.k.shape[2] // block)
    if isinstance(problem.bias, DecayBias):
        queries, heights = problem.decay.heights(problem.bias_positions(), ahead)
        missing = blocks * block - heights.shape[2]
        if ahead and missing:  # in front of the mirrored keys
            heights = torch.cat((heights[..., :1].expand(-1, -1, missing), heights), dim=-1)
        return _level_side(queries, heights, block)
    position = problem.positions()[:, None].double()  # [B or 1, 1, Tq]
    if isinstance(problem.bias, KerpleBias):
        return _envelope_side(problem, problem.bias, blocks * block - 1 - position if ahead else position, block)
    past, future = (slope.double() for slope in problem.linear.both_slopes(torch.float64))  # [B or 1, H]
    if ahead:
        return _slope_side(future, blocks * block - 1 - position - problem.linear.offset, blocks, block)
    return _slope_side(past, position, blocks, block)


def _certified_sides(problem: Problem, block: int) -> tuple[Tensor, Tensor]:
    """The first block that the past side proves necessary, and one past the last of the future side."""
    dim = problem.q.shape[3]
    slack = 1.0 + (dim + 4) * 2.0**-23
    looks_back = [sight != "future" for sight in problem.sights]
    looks_ahead = [sight != "past" for sight in problem.sights]
    sides = torch.tensor([back + ahead for back, ahead in zip(looks_back, looks_ahead, strict=True)], device="cpu")
    budget = torch.log(problem.tolerance / sides.double()).to(problem.q.device)[None, :, None]  # [1, H, 1]

    with torch.no_grad():
        query_norm = row_norms(problem.q).double() * (abs(problem.scale) * slack)  # x, [B, H, Tq]
        center = center_of(problem)  # [B, Hkv, D], or None
        by_block = block_norms_of(problem, block, slack) if problem.causal else None  # [B, Hkv, key blocks]
        norms = key_norms_of(problem, center, slack) if by_block is None else by_block  # [B, Hkv, Tk]
        near = lse_lower_bound(problem, center, query_norm, norms.amax(-1))  # [B, H, Tq]
        norms = norms.repeat_interleave(problem.q.shape[1] // norms.shape[1], dim=1)
        edges = _edges(query_norm)  # [B, H, G]
        position = problem.positions()[:, None]  # [B or 1, 1, Tq]
        run_first, run_end = (limit[:, None] for limit in problem.key_runs())  # [B or 1, 1, Tq]
        # Where no lower bound is known, a query visits all that is in its sight. So does one whose x is not
        # finite, because then `near` is not either.
        unknown = ~torch.isfinite(near)
        back_heads, ahead_heads = (
            torch.tensor(looks, device=problem.q.device)[:, None] for looks in (looks_back, looks_ahead)
        )
        sees = (back_heads & (position >= run_first)) | (ahead_heads & (position < run_end))
        stuck = unknown & (run_end > run_first) & sees
        near = near.masked_fill(unknown, math.inf)
        shape = (*problem.q.shape[:2], -(-problem.q.shape[2] // block))
        first = torch.zeros(shape, dtype=torch.int64, device=problem.q.device)
        last = torch.full_like(first, FAR)
        if any(looks_back):
            back = _side(problem, block, ahead=False)
            threshold = budget + back.queries + near
            tail = _Tail(norms, back, block, by_block is not None)
            first = _skippable(tail, block, query_norm, edges, threshold)
            needed = (run_first // block).expand_as(stuck).masked_fill(~stuck, FAR)
            first = torch.minimum(first, _by_block(needed, block, fill=FAR).amin(-1))
            first = first.masked_fill(~back_heads, 0)
        if any(looks_ahead):
            keys = problem.k.shape[2]
            blocks = -(-keys // block)
            # Mirrored, so that the tail grows from the far end.
            mirrored = torch.nn.functional.pad(norms, (0, blocks * block - keys), value=-math.inf).flip(-1)
            ahead = _side(problem, block, ahead=True)
            threshold = budget + ahead.queries + near
            tail = _Tail(mirrored, ahead, block, False)
            skipped = _skippable(tail, block, query_norm, edges, threshold)
            skipped = skipped.masked_fill(~ahead_heads, 0)
            last = blocks - skipped
            needed = (-(-run_end // block)).expand_as(stuck).masked_fill(~stuck, 0)
            last = torch.maximum(last, _by_block(needed, block, fill=0).amax(-1))
    return first, last


def _edges(query_norm: Tensor) -> Tensor:
    """A few values of x for each head, the last at or above every finite one: float64 [B, H, G]."""
    finite = torch.where(torch.isfinite(query_norm), query_norm, 0.0)
    if query_norm.shape[2] <= BLOCK:
        return finite.amax(-1, keepdim=True).double()
    step = max(1, query_norm.shape[2] // 256)
    sample = finite[:, :, ::step].sort(-1).values
    picks = [round(quantile * (sample.shape[2] - 1)) for quantile in QUANTILES]
    edges = torch.cat((sample[:, :, picks], finite.amax(-1, keepdim=True)), dim=-1)
    return edges.double()


class _Tail:
    """Log-sums over blocks of keys of exp(x * norm + height), for any x."""

    def __init__(self, norms: Tensor, side: _Side, block: int, by_block: bool) -> None:
        """norms: [B, H, Tk], -inf where there is no key; or [B, H, key blocks] that bound all keys of a block."""
        self.fade: Tensor | None = None
        if by_block:
            self.longest = norms  # [B, H, key blocks]
            self.series = side.series
        else:
            tail = _by_block(norms, block, fill=-math.inf)  # [B, H, key blocks, block]
            self.longest = tail.amax(-1)
            spread = (tail - self.longest[..., None]).nan_to_num(nan=0.0, posinf=0.0)
            self.spread = spread.masked_fill(torch.isneginf(tail), -math.inf)
            self.fade = side.fade.to(norms.dtype)
        # The largest term is at most `fade` away from zero.
        self.rounding = 1e-5 - 2.0**-22 * side.fade[..., 0]
        self.places = side.ends

    def table(self, x: Tensor) -> Tensor:
        """ln of the sum over all keys up to each block's end, of exp(x * norm + slope * key): [B, H, key blocks]."""
        if self.fade is None:
            sums = self.series
        else:
            sums = torch.logsumexp(self.spread * x[..., None].to(self.spread.dtype) + self.fade, dim=-1).double()
        sums = sums + x * self.longest.double() + self.rounding
        sums = sums.nan_to_num(nan=HUGE, posinf=HUGE, neginf=-HUGE)
        return torch.logcumsumexp(sums + self.places, dim=-1)


def _skippable(tail: _Tail, block: int, query_norm: Tensor, edges: Tensor, threshold: Tensor) -> Tensor:
    """How many leading key blocks each query block may skip: int64 [B, H, query blocks].

    query_norm, threshold [B, H, Tq]; edges [B, H, G]. A query with a threshold of infinity has no say.
    """
    skip = None
    below = None
    for edge in edges.unbind(-1):
        x = edge[..., None]  # [B, H, 1]
        least = threshold
        if edges.shape[-1] > 1:
            mine = query_norm <= x if below is None else (query_norm > below) & (query_norm <= x)
            least = threshold.masked_fill(~mine, math.inf)
        least = _by_block(least, block, fill=math.inf).amin(-1)  # [B, H, query blocks]
        count = torch.searchsorted(tail.table(x), least, right=True)
        skip = count if skip is None else torch.minimum(skip, count)
        below = x
    assert skip is not None
    return skip
