"""What is near a query: a lower bound of its log-sum-exp, from keys close to it.

A window is certified against this bound, so a better one makes windows shorter. The bound is cheap because it
compares queries with means of neighbouring keys, by Jensen's inequality, and never takes an exponential.

Inner products are float32 products that are added up, or matrix products of float64: torch's settings may let a
matrix product of float32 round to TF32 or bfloat16, and the bound must hold under every setting.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainshort.ops.decay import DecayBias
from trainshort.ops.kerple import KerpleBias
from trainshort.ops.norms import portions, row_norms
from trainshort.ops.problem import Problem

NEAR = 32  # queries of a tile share their near keys
RUNS = (32, 256)  # near keys that are averaged, multiples of NEAR: few for steep slopes, many for gentle ones


def lse_lower_bound(problem: Problem, center: Tensor | None, query_norm: Tensor, longest: Tensor) -> Tensor:
    """A lower bound of each query's log-sum-exp, from keys close to it: float64 [B, H, Tq], or -inf.

    query_norm: s‖q‖, [B, H, Tq]; longest: the largest ‖k - c‖, [B, Hkv].
    """
    start, queries, keys = problem.start, problem.q.shape[2], problem.k.shape[2]
    if isinstance(start, int) and start >= 0 and start + queries <= keys and queries > 64:
        near = mean_key_score(problem, center, start).double()
        if problem.key_padding_mask is not None or isinstance(problem.bias, KerpleBias):  # powers may be steep
            near = torch.maximum(near, nearest_score(problem, center))
    else:
        near = nearest_score(problem, center)
    return with_slack(problem, near, center, query_norm, longest)


def with_slack(problem: Problem, near: Tensor, center: Tensor | None, query_norm: Tensor, longest: Tensor) -> Tensor:
    """A lower bound as it was computed, less what its rounding may have added. longest: of keys it was taken from."""
    if isinstance(problem.bias, KerpleBias):  # its costs are rounded powers
        near = near - 2.0**-40 * near.abs()
    # A score is rounded by at most (D + 36) 2^-23 s‖q‖ times the longest key; ‖k - c‖ + 2‖c‖ is no less.
    group = problem.q.shape[1] // problem.k.shape[1]
    longest = longest.clamp_min(0.0).double()
    if center is not None:
        longest = longest + 2.0 * row_norms(center)
    longest = longest.repeat_interleave(group, dim=1)[..., None]  # [B, H, 1]
    return near - (problem.q.shape[3] + 36) * 2.0**-23 * query_norm * longest - 1e-5


def mean_key_score(problem: Problem, center: Tensor | None, start: int) -> Tensor:
    """Jensen's bound from the mean of n neighbouring keys: LSE >= ln n + s q.mean(k) - m mean(distance).

    Queries are taken in tiles of NEAR; the keys are the n just before the tile (and, where the future is in
    sight, just after it), for each n of RUNS that stays inside the query's own sequence.
    """
    q, k, scale, dtype = problem.q, problem.k, problem.scale, problem.accumulate_dtype
    queries = q.shape[2]
    tiles = -(-queries // NEAR)
    before = min(start // NEAR, max(RUNS) // NEAR)  # tiles of keys in front of the first query
    low = start - before * NEAR
    after = 0 if problem.causal else min((k.shape[2] - start - queries) // NEAR, max(RUNS) // NEAR)
    whole = (min(start + queries, k.shape[2]) - low) // NEAR + max(after, 0)
    near = k[:, :, low : low + whole * NEAR]
    if problem.key_padding_mask is not None:
        near = near.masked_fill(~problem.key_padding_mask[:, None, low : low + whole * NEAR, None], 0.0)
    means = near.unflatten(2, (whole, NEAR)).mean(3, dtype=dtype)  # [B, Hkv, whole, D]
    if center is not None:
        means = means - center[:, :, None]
    # Summed in float64, so that a run is the difference of two sums without losing its last digits.
    sums = torch.nn.functional.pad(means.double(), (0, 0, 1, 0)).cumsum(2)
    tile = torch.arange(tiles, device=q.device) + before  # index of a tile's own keys among `means`
    first, end = (limit.expand(-1, queries) for limit in problem.key_runs())
    offset = (torch.arange(queries, device=q.device) % NEAR).to(dtype)  # place of a query in its tile
    gain_of: _LinearGain | _DecayGain | _PowerGain
    if isinstance(problem.bias, DecayBias):
        gain_of = _DecayGain(problem, low, whole)
    elif isinstance(problem.bias, KerpleBias):
        gain_of = _PowerGain(problem.bias, queries, q.device)
    else:
        gain_of = _LinearGain(problem, offset)

    # Mean keys [B, Hkv, tiles, D]; ln n - cost, -inf where out of sight [B, H, Tq].
    neighbours: list[Tensor] = []
    gains: list[Tensor] = []
    for run in RUNS:
        for ahead in (False,) if problem.causal else (False, True):
            steps = run // NEAR
            from_tile = (tile + 1 if ahead else tile - steps).clamp(0, whole)
            to_tile = (tile + 1 + steps if ahead else tile).clamp(0, whole)
            neighbours.append(((sums[:, :, to_tile] - sums[:, :, from_tile]) / steps).to(dtype))
            gain = gain_of(run, ahead, from_tile)
            place = (low + from_tile * NEAR).repeat_interleave(NEAR)[:queries]
            inside = (to_tile - from_tile == steps).repeat_interleave(NEAR)[:queries]
            inside = inside & (place >= first) & (place + run <= end)  # [B or 1, Tq]
            gain = gain.masked_fill(~inside[:, None], -math.inf)
            gain = gain_of.inside_borders(gain, place, place + run)
            blind = [sight == ("past" if ahead else "future") for sight in problem.sights]
            gains.append(gain.masked_fill(torch.tensor(blind, device=q.device)[:, None], -math.inf))
    best = None
    for mean, gain in zip(neighbours, gains, strict=True):
        score = _products(q, mean)[:, :, :queries] * scale + gain
        best = score if best is None else torch.maximum(best, score)
    assert best is not None
    return best


class _LinearGain:
    """ln n less the mean penalty of n neighbouring keys, for each query: [B or 1, H, Tq]."""

    def __init__(self, problem: Problem, offset: Tensor) -> None:
        """offset: the place of each query in its tile, [Tq]."""
        self.offset, self.ahead_offset = offset, problem.linear.offset
        self.past, self.future = (
            slope[..., None].to(offset.dtype) for slope in problem.linear.both_slopes(torch.float64)
        )  # [B or 1, H, 1]

    def __call__(self, run: int, ahead: bool, from_tile: Tensor) -> Tensor:
        """run: n; from_tile: the first tile of keys for each tile of queries."""
        if ahead:
            return math.log(run) - self.future * (NEAR - self.offset + (run - 1) / 2 - self.ahead_offset)
        return math.log(run) - self.past * (self.offset + (run + 1) / 2)

    def inside_borders(self, gain: Tensor, first: Tensor, end: Tensor) -> Tensor:
        return gain


class _PowerGain:
    """The same for a KerpleBias, in float64, from the cost of each of the n keys."""

    def __init__(self, bias: KerpleBias, queries: int, device: torch.device) -> None:
        self.bias = bias
        self.offset = torch.arange(min(queries, NEAR), device=device)
        self.place = torch.arange(queries, device=device) % NEAR  # of each query in its tile

    def __call__(self, run: int, ahead: bool, from_tile: Tensor) -> Tensor:
        nearest = NEAR - self.offset if ahead else self.offset + 1
        distance = nearest[:, None] + torch.arange(run, device=nearest.device)
        means = self.bias.at_distance(distance[None, None], torch.float64).mean(-1)  # [1, H, NEAR]
        return math.log(run) + means[:, :, self.place]

    def inside_borders(self, gain: Tensor, first: Tensor, end: Tensor) -> Tensor:
        return gain


class _DecayGain:
    """The same for a decay, in float64: ln n + c_i - mean(c_j)."""

    def __init__(self, problem: Problem, low: int, whole: int) -> None:
        """low, whole: first key and number of the tiles of keys."""
        place = problem.bias_positions()
        self.decay, self.queries = problem.decay, problem.q.shape[2]
        self.first, self.end = self.decay.first_visible(place), self.decay.end_visible(place)
        self.at_queries, self.means = [], []
        for ahead, levels in enumerate(self.decay.levels()):
            self.at_queries.append(self.decay.heights(place, bool(ahead))[0])
            tiles = levels[:, :, low : low + whole * NEAR].unflatten(2, (whole, NEAR))
            self.means.append(tiles.mean(-1) if whole else tiles.new_zeros(*levels.shape[:2], 1))

    def __call__(self, run: int, ahead: bool, from_tile: Tensor) -> Tensor:
        means = self.means[ahead]
        steps = min(run // NEAR, means.shape[2])
        mean = means.unfold(2, steps, 1).mean(-1)  # of `run` keys, from each tile on
        mean = mean[:, :, from_tile.clamp(0, mean.shape[2] - 1)].repeat_interleave(NEAR, dim=2)[:, :, : self.queries]
        penalty = self.at_queries[ahead] - mean if ahead else self.at_queries[ahead] + mean
        return math.log(run) - penalty

    def inside_borders(self, gain: Tensor, first: Tensor, end: Tensor) -> Tensor:
        """first, end: of the keys of each query, [Tq]."""
        if self.first is not None:
            gain = gain.masked_fill(first < self.first, -math.inf)
        return gain if self.end is None else gain.masked_fill(end > self.end, -math.inf)


def _products(q: Tensor, mean: Tensor) -> Tensor:
    """Inner products of the queries [B, H, Tq, D] with a vector for their tile of NEAR, [B, Hkv, tiles, D]."""
    tiles, dtype = mean.shape[2], mean.dtype
    missing = tiles * NEAR - q.shape[2]
    query = torch.nn.functional.pad(q, (0, 0, 0, missing)) if missing else q
    query = query.unflatten(2, (tiles, NEAR)).unflatten(1, (mean.shape[1], -1))  # [B, Hkv, G, tiles, NEAR, D]
    products = torch.empty(query.shape[:-1], dtype=dtype, device=q.device)
    for part in portions(query):
        products[part] = (query[part] * mean[part][:, :, None, :, None]).sum(-1)
    return products.flatten(1, 2).flatten(2, 3)


def nearest_score(problem: Problem, center: Tensor | None) -> Tensor:
    """The score of the nearest key in sight (of the 64 nearest, where there are few queries), in float64.

    Queries may stand far behind the last key: their distances times the slope have more digits than a float32.
    """
    position, place = problem.positions(), problem.bias_positions()
    first, end = problem.key_runs()
    queries = problem.q.shape[2]
    width = 64 if queries <= 64 else 1
    anchor = torch.minimum(torch.maximum(position, first), end - 1)  # [B or 1, Tq]
    group = problem.q.shape[1] // problem.k.shape[1]
    columns = []
    at_once = 1024 // width
    for piece in range(0, queries, at_once):
        rows = slice(piece, piece + at_once)
        index = anchor[:, rows, None] - torch.arange(width, device=anchor.device)  # [B or 1, T, W]
        inside = (index >= first[:, rows, None]) & (index < end[:, rows, None])
        index = index.expand(problem.q.shape[0], -1, -1)
        batch = torch.arange(problem.q.shape[0], device=index.device)[:, None, None]
        safe = index.clamp(0, max(problem.k.shape[2] - 1, 0))
        keys = problem.k.transpose(1, 2)[batch, safe].double()  # [B, T, W, Hkv, D]
        if center is not None:
            keys = keys - center[:, None, None]
        query = problem.q[:, :, rows].double().unflatten(1, (-1, group))  # [B, Hkv, G, T, D]
        score = problem.scale * torch.einsum("bngtd,btwnd->bngtw", query, keys).flatten(1, 2)
        distance = (index - position[:, rows, None])[:, None]  # [B, 1, T, W]
        seen = inside[:, None]
        for sight, sign in (("past", 1), ("future", -1)):
            blind = torch.tensor([s == sight for s in problem.sights], device=index.device)
            seen = seen & ~(blind[:, None, None] & (sign * distance > 0))
        assert problem.bias is not None
        at_query, at_key = place[:, None, rows, None], index[:, None]
        hidden = problem.bias.hides(at_query, at_key)
        seen = seen if hidden is None else seen & ~hidden
        score = score + problem.bias.between(at_query, at_key, torch.float64)
        columns.append(torch.logsumexp(score.masked_fill(~seen, -math.inf), dim=-1))
    return torch.cat(columns, dim=-1)
