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

Rounding is paid for: norms and near scores carry a slack of (D + 4) 2^-23 of their size. A NaN or an infinity
in a norm makes the bound infinite, so that such a key is always visited and such a query visits everything.
The proofs, and what skipping can cost in outputs and gradients, are in docs/attention.md.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from trainshort.attention.bias import LinearBias
from trainshort.attention.problem import BLOCK, Problem

NEAR = 32  # queries of a tile share their near keys
FOLD = 4  # tiles whose products are taken together
RUNS = (32, 256)  # how many near keys are averaged, multiples of NEAR: short for steep slopes, long for gentle ones
QUANTILES = (0.25, 0.5, 0.75, 0.9, 0.97, 1.0)  # of x over a sample of queries: where the table has its edges
FAR = 2**40  # beyond every key and every block, and exact in a double
HUGE = 1e300  # stands for an infinite bound: above every threshold, and safe to add to


def certified_blocks(problem: Problem, block: int = BLOCK) -> Tensor:
    """First and one-past-last key block for each query block: int32 [B, H, ceil(Tq / block), 2]."""
    low, high = visible_blocks(problem, block)  # [B, H, query blocks]
    empty = high <= low
    heads = _promising_heads(problem, block)
    if heads is not None:
        first, last = _certified_sides(_some_heads(problem, heads), block)
        low, high = low.clone(), high.clone()
        low[:, heads] = torch.maximum(low[:, heads], first)
        high[:, heads] = torch.minimum(high[:, heads], last)
        # Monotone in the query block, so that each key block serves one contiguous range of query blocks.
        low = low.masked_fill(empty, FAR).flip(-1).cummin(-1).values.flip(-1)
        high = high.masked_fill(empty, 0).cummax(-1).values
    low, high = low.masked_fill(empty, 0), high.masked_fill(empty, 0)
    return torch.stack((low, high), dim=-1).to(torch.int32)


def _promising_heads(problem: Problem, block: int) -> slice | None:
    """The heads whose slopes allow for skipping, before any norm is looked at; None where it would not pay.

    Whatever the norms are, a window is at least ln(1/tolerance)/m long. A head is worth the look if it could
    skip a quarter of its blocks, and the look as a whole if an eighth of all blocks could go. Slopes that lie
    on a GPU are not read: every head is looked at.
    """
    if not isinstance(problem.bias, LinearBias) or problem.tolerance <= 0.0:
        return None
    heads = problem.q.shape[1]
    query_blocks, key_blocks = (-(-t.shape[2] // block) for t in (problem.q, problem.k))
    if query_blocks == 0 or key_blocks < 2:
        return None
    slopes = problem.bias.slopes.detach()
    if problem.bias.future is not None:
        slopes = torch.maximum(slopes, problem.bias.future.detach())
    if slopes.device.type != "cpu":
        return slice(0, heads)
    steepest = torch.atleast_2d(slopes).amax(0).double()
    shortest = 1 + torch.ceil(math.log(1.0 / problem.tolerance) / steepest / block)  # blocks, [H]
    if problem.causal:  # a query block with n key blocks in sight visits at least min(n, shortest) of them
        sight = torch.arange(key_blocks - query_blocks + 1, key_blocks + 1).clamp(min=1).double()
        kept = torch.minimum(sight, shortest[:, None]).sum(-1) / sight.sum()
    else:
        kept = (2 * shortest - 1).clamp(max=key_blocks) / key_blocks
    if float(kept.mean()) > 0.875:
        return None
    promising = (kept <= 0.75).nonzero()[:, 0].tolist()
    if not promising:
        return None
    group = heads // problem.k.shape[1]  # whole groups, so that their keys are a slice as well
    first, end = promising[0], promising[-1] + 1
    return slice(first // group * group, -(-end // group) * group)


def _some_heads(problem: Problem, heads: slice) -> Problem:
    """The same problem for a range of heads."""
    bias = problem.bias
    assert isinstance(bias, LinearBias)
    group = problem.q.shape[1] // problem.k.shape[1]
    keys = slice(heads.start // group, heads.stop // group)
    return replace(
        problem,
        q=problem.q[:, heads],
        k=problem.k[:, keys],
        v=problem.v[:, keys],
        bias=LinearBias(
            bias.slopes[..., heads],
            future=None if bias.future is None else bias.future[..., heads],
            offset=bias.offset,
            sees=None if bias.sees is None else bias.sees[heads],
        ),
        key_norms=None if problem.key_norms is None else problem.key_norms[:, keys],
    )


def visible_blocks(problem: Problem, block: int) -> tuple[Tensor, Tensor]:
    """The key blocks that hold a key in sight of a query block: [low, high), each int64 [B, H, blocks]."""
    first, end = problem.key_runs()
    position = problem.positions()
    limits = {}
    for sight in set(problem.sights):
        low = torch.maximum(first, position) if sight == "future" else first.expand_as(first + position)
        high = torch.minimum(end, position + 1) if sight == "past" else end.expand_as(end + position)
        blind = high <= low
        low = low.masked_fill(blind, FAR)
        high = high.masked_fill(blind, 0)
        low = _by_block(low, block, fill=FAR).amin(-1)
        high = _by_block(high, block, fill=0).amax(-1)
        limits[sight] = (low // block, -(-high // block))
    batch = problem.q.shape[0]
    low, high = (
        torch.stack([limits[sight][side].expand(batch, -1) for sight in problem.sights], dim=1)
        for side in (0, 1)
    )
    return low, high


def _by_block(rows: Tensor, block: int, fill: float) -> Tensor:
    """[..., T] -> [..., ceil(T / block), block], the last block filled up."""
    missing = -rows.shape[-1] % block
    if missing:
        rows = torch.nn.functional.pad(rows, (0, missing), value=fill)
    return rows.unflatten(-1, (-1, block))


def _certified_sides(problem: Problem, block: int) -> tuple[Tensor, Tensor]:
    """The first block that the past side proves necessary, and one past the last of the future side."""
    dim = problem.q.shape[3]
    slack = 1.0 + (dim + 4) * 2.0**-23
    past, future = (slope.double() for slope in problem.slopes(torch.float64))  # [B or 1, H]
    looks_back = [sight != "future" for sight in problem.sights]
    looks_ahead = [sight != "past" for sight in problem.sights]
    sides = torch.tensor([back + ahead for back, ahead in zip(looks_back, looks_ahead, strict=True)])
    budget = torch.log(problem.tolerance / sides.double()).to(past.device)[None, :, None]  # [1, H, 1]

    with torch.no_grad():
        reach = _norm(problem.q) * (abs(problem.scale) * slack * slack)  # x, [B, H, Tq]
        center = _center(problem)  # [B, Hkv, D], or None
        norms = _key_norms(problem, center, slack)  # [B, Hkv, Tk], -inf where there is no key
        near = _near_score(problem, center, reach, norms)  # [B, H, Tq]
        edges = _edges(reach)  # [B, H, G]
        position = problem.positions()[:, None].double()  # [B or 1, 1, Tq]
        run_first, run_end = (limit[:, None] for limit in problem.key_runs())  # [B or 1, 1, Tq]
        # Where no near key vouches for a query, it visits all that is in its sight.
        stuck = torch.isneginf(near) & (run_end > run_first)
        near = near.masked_fill(torch.isneginf(near), math.inf)
        shape = (*problem.q.shape[:2], -(-problem.q.shape[2] // block))
        first = torch.zeros(shape, dtype=torch.int64, device=problem.q.device)
        last = torch.full_like(first, FAR)
        if any(looks_back):
            threshold = budget + past[..., None] * position + near
            first = _skippable(problem, block, norms, past, reach, edges, threshold)
            needed = (run_first // block).expand_as(stuck).masked_fill(~(stuck & (position >= run_first)), FAR)
            first = torch.minimum(first, _by_block(needed, block, fill=FAR).amin(-1))
            first = first.masked_fill(~torch.tensor(looks_back, device=first.device)[:, None], 0)
        if any(looks_ahead):
            assert isinstance(problem.bias, LinearBias)
            keys = problem.k.shape[2]
            blocks = -(-keys // block)
            # Mirrored: key j stands at blocks * block - 1 - j, so that the tail grows from the far end.
            mirrored = torch.nn.functional.pad(norms, (0, blocks * block - keys), value=-math.inf).flip(-1)
            place = blocks * block - 1 - position - problem.bias.offset
            threshold = budget + future[..., None] * place + near
            skipped = _skippable(problem, block, mirrored, future, reach, edges, threshold)
            skipped = skipped.masked_fill(~torch.tensor(looks_ahead, device=last.device)[:, None], 0)
            last = blocks - skipped
            needed = (-(-run_end // block)).expand_as(stuck).masked_fill(~(stuck & (position < run_end)), 0)
            last = torch.maximum(last, _by_block(needed, block, fill=0).amax(-1))
    return first, last


def _norm(rows: Tensor) -> Tensor:
    """Lengths of the rows, in at least float32."""
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(rows, dim=-1, dtype=dtype)


def _center(problem: Problem) -> Tensor | None:
    """A vector to take from every key, [B, Hkv, D]: the mean of a sample where that makes them shorter.

    Any vector is sound. Keys of trained models share a large common part, which says nothing of where
    attention goes and would only widen the windows.
    """
    k = problem.k
    if problem.key_norms is not None:
        return None  # the norms given are those of the keys as they are
    step = max(1, k.shape[2] // 64)
    sample = k[:, :, ::step].to(torch.float32 if k.dtype != torch.float64 else k.dtype)  # [B, Hkv, S, D]
    real = _real_keys(problem)
    if real is not None:
        sample = sample.masked_fill(~real[:, None, ::step, None], 0.0)
    mean = sample.mean(2)
    shorter = _norm(sample - mean[:, :, None]).sum(-1) < 0.9 * _norm(sample).sum(-1)
    if k.device.type == "cpu" and not bool(shorter.any()):
        return None
    return torch.where(shorter[..., None] & torch.isfinite(mean), mean, 0.0)


def _real_keys(problem: Problem) -> Tensor | None:
    """Keys that some query may see: bool [B or 1, Tk], or None where that is all of them."""
    mask = problem.key_padding_mask
    keys, queries = problem.k.shape[2], problem.q.shape[2]
    start = problem.start
    if not problem.causal or (isinstance(start, int) and start + queries >= keys):
        return mask
    index = torch.arange(keys, device=problem.k.device)
    written = index <= problem.positions()[:, -1:]
    return written if mask is None else mask & written


def _key_norms(problem: Problem, center: Tensor | None, slack: float) -> Tensor:
    """Upper bounds of ‖k_j - c‖: [B, Hkv, Tk], -inf for keys that nobody sees."""
    k, given = problem.k, problem.key_norms
    keys = k.shape[2]
    if given is not None:
        norms = given.detach().to(torch.float64 if k.dtype == torch.float64 else torch.float32)
        if norms.dim() == 2:
            norms = norms[..., None].expand(-1, -1, keys)
        elif norms.shape[2] != keys:
            norms = norms.repeat_interleave(BLOCK, dim=2)[:, :, :keys]
        norms = norms * slack
    elif center is None:
        norms = _norm(k) * slack
    else:
        length = _norm(k)
        shift = _norm(center)[..., None]
        overlap = (k.to(center.dtype) @ center[..., None])[..., 0]
        # ‖k - c‖² = ‖k‖² - 2 k.c + ‖c‖², whose rounding is at most (D + 4) 2^-23 (‖k‖ + ‖c‖)².
        square = length * length - 2.0 * overlap + shift * shift
        rounding = (slack - 1.0) * (length + shift) ** 2
        centered = torch.sqrt(square.clamp_min(0.0) + rounding) * slack
        norms = torch.where(shift > 0, centered, length * slack)
        norms = torch.where(torch.isfinite(length), norms, math.inf)
    norms = torch.where(torch.isnan(norms), math.inf, norms)
    real = _real_keys(problem)
    return norms if real is None else norms.masked_fill(~real[:, None], -math.inf)


def _edges(reach: Tensor) -> Tensor:
    """A few values of x for each head, the last at or above every finite one: float64 [B, H, G]."""
    finite = torch.where(torch.isfinite(reach), reach, 0.0)
    step = max(1, reach.shape[2] // 256)
    sample = finite[:, :, ::step].sort(-1).values
    picks = [round(quantile * (sample.shape[2] - 1)) for quantile in QUANTILES]
    edges = torch.cat((sample[:, :, picks], finite.amax(-1, keepdim=True)), dim=-1)
    return edges.double()


def _near_score(problem: Problem, center: Tensor | None, reach: Tensor, norms: Tensor) -> Tensor:
    """A lower bound of each query's log-sum-exp, from keys close to it: float64 [B, H, Tq], or -inf."""
    start, queries, keys = problem.start, problem.q.shape[2], problem.k.shape[2]
    aligned = isinstance(start, int) and start >= 0 and start + queries <= keys and queries > 64
    if aligned:
        near = _mean_key_score(problem, center, start, norms.dtype)
        if problem.key_padding_mask is not None:
            near = torch.maximum(near, _nearest_score(problem, center, norms.dtype))
    else:
        near = _nearest_score(problem, center, norms.dtype)
    # A score is rounded by at most (D + 36) 2^-23 s‖q‖ times the longest key, which ‖k - c‖ + ‖c‖ bounds.
    group = problem.q.shape[1] // problem.k.shape[1]
    longest = norms.amax(-1).clamp_min(0.0).double()  # [B, Hkv]
    if center is not None:
        longest = longest + 2.0 * _norm(center)
    longest = longest.repeat_interleave(group, dim=1)[..., None]  # [B, H, 1]
    return near.double() - (problem.q.shape[3] + 36) * 2.0**-23 * reach.double() * longest - 1e-5


def _mean_key_score(problem: Problem, center: Tensor | None, start: int, dtype: torch.dtype) -> Tensor:
    """Jensen's bound from the mean of n neighbouring keys: LSE >= ln n + s q.mean(k) - m mean(distance).

    Queries are taken in tiles of NEAR; the keys are the n just before the tile (and, where the future is in
    sight, just after it), for each n of RUNS that stays inside the query's own sequence.
    """
    assert isinstance(problem.bias, LinearBias)
    q, k, scale = problem.q, problem.k, problem.scale
    heads, queries = q.shape[1], q.shape[2]
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
    past, future = (slope[..., None].to(dtype) for slope in problem.slopes(torch.float64))  # [B or 1, H, 1]

    neighbours, gains = [], []  # mean keys [B, Hkv, tiles, D]; ln n - cost, -inf where out of sight [B, H, Tq]
    for run in RUNS:
        for ahead in (False,) if problem.causal else (False, True):
            steps = run // NEAR
            from_tile = (tile + 1 if ahead else tile - steps).clamp(0, whole)
            to_tile = (tile + 1 + steps if ahead else tile).clamp(0, whole)
            neighbours.append(((sums[:, :, to_tile] - sums[:, :, from_tile]) / steps).to(dtype))
            if ahead:
                gain = math.log(run) - future * (NEAR - offset + (run - 1) / 2 - problem.bias.offset)
            else:
                gain = math.log(run) - past * (offset + (run + 1) / 2)
            place = (low + from_tile * NEAR).repeat_interleave(NEAR)[:queries]
            inside = (to_tile - from_tile == steps).repeat_interleave(NEAR)[:queries]
            inside = inside & (place >= first) & (place + run <= end)  # [B or 1, Tq]
            gain = gain.masked_fill(~inside[:, None], -math.inf)
            blind = [sight == ("past" if ahead else "future") for sight in problem.sights]
            gains.append(gain.masked_fill(torch.tensor(blind, device=q.device)[:, None], -math.inf))
    # One product for FOLD tiles against the mean keys of all of them, of which each tile takes its own.
    folds = -(-tiles // FOLD)
    mean = torch.stack(neighbours, dim=-2)  # [B, Hkv, tiles, C, D]
    mean = torch.nn.functional.pad(mean, (0, 0, 0, 0, 0, folds * FOLD - tiles)).unflatten(2, (folds, FOLD))
    mean = mean.flatten(3, 4).transpose(-2, -1).repeat_interleave(heads // k.shape[1], dim=1)
    missing = folds * FOLD * NEAR - queries
    query = torch.nn.functional.pad(q, (0, 0, 0, missing)) if missing else q
    score = query.unflatten(2, (folds, FOLD * NEAR)).to(dtype) @ mean  # [B, H, folds, FOLD * NEAR, FOLD * C]
    score = score.unflatten(-1, (FOLD, -1)).unflatten(3, (FOLD, NEAR))  # [B, H, folds, FOLD, NEAR, FOLD, C]
    score = score.diagonal(dim1=3, dim2=5).movedim(-1, 3)  # [B, H, folds, FOLD, NEAR, C]
    score = score.flatten(2, 4)[:, :, :queries] * scale
    best = score[..., 0] + gains[0]
    for column, gain in enumerate(gains[1:], start=1):
        best = torch.maximum(best, score[..., column] + gain)
    return best


def _nearest_score(problem: Problem, center: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The score of the nearest key in sight (of the 64 nearest, where there are few queries)."""
    position = problem.positions()
    first, end = problem.key_runs()
    queries = problem.q.shape[2]
    width = 64 if queries <= 64 else 1
    anchor = torch.minimum(torch.maximum(position, first), end - 1)  # [B or 1, Tq]
    group = problem.q.shape[1] // problem.k.shape[1]
    past, future = (slope[..., None, None] for slope in problem.slopes(dtype))
    columns = []
    for piece in range(0, queries, 2048):
        rows = slice(piece, piece + 2048)
        index = anchor[:, rows, None] - torch.arange(width, device=anchor.device)  # [B or 1, T, W]
        inside = (index >= first[:, rows, None]) & (index < end[:, rows, None])
        index = index.expand(problem.q.shape[0], -1, -1)
        batch = torch.arange(problem.q.shape[0], device=index.device)[:, None, None]
        safe = index.clamp(0, max(problem.k.shape[2] - 1, 0))
        keys = problem.k.transpose(1, 2)[batch, safe].to(dtype)  # [B, T, W, Hkv, D]
        if center is not None:
            keys = keys - center[:, None, None]
        query = problem.q[:, :, rows].to(dtype).unflatten(1, (-1, group))  # [B, Hkv, G, T, D]
        score = problem.scale * torch.einsum("bngtd,btwnd->bngtw", query, keys).flatten(1, 2)
        distance = (index - position[:, rows, None])[:, None]  # [B, 1, T, W]
        seen = inside[:, None]
        for sight, sign in (("past", 1), ("future", -1)):
            blind = torch.tensor([s == sight for s in problem.sights], device=index.device)
            seen = seen & ~(blind[:, None, None] & (sign * distance > 0))
        assert isinstance(problem.bias, LinearBias)
        score = score + problem.bias.at(distance.to(dtype), past, future)
        columns.append(torch.logsumexp(score.masked_fill(~seen, -math.inf), dim=-1))
    return torch.cat(columns, dim=-1)


def _skippable(
    problem: Problem,
    block: int,
    norms: Tensor,
    slopes: Tensor,
    reach: Tensor,
    edges: Tensor,
    threshold: Tensor,
) -> Tensor:
    """How many leading key blocks each query block may skip: int64 [B, H, query blocks].

    norms [B, Hkv, Tk]; slopes [B or 1, H]; reach, threshold [B, H, Tq]; edges [B, H, G].
    """
    batch, heads, queries = reach.shape
    group = heads // norms.shape[1]
    tail = _by_block(norms, block, fill=-math.inf)  # [B, Hkv, key blocks, block]
    longest = tail.amax(-1)  # [B, Hkv, key blocks]
    spread = (tail - longest[..., None]).nan_to_num(nan=0.0, posinf=0.0)  # -inf stays: no key there
    spread = spread.masked_fill(torch.isneginf(tail), -math.inf)
    longest, spread = (t.repeat_interleave(group, dim=1) for t in (longest, spread))
    inside = torch.arange(1 - block, 1, device=norms.device)  # position relative to the end of the block
    fade = (slopes[..., None] * inside).to(norms.dtype)[:, :, None]  # [B or 1, H, 1, block]
    ends = (torch.arange(tail.shape[2], device=norms.device) + 1) * block - 1
    rounding = 1e-5 + 2.0**-22 * block * slopes[..., None]  # the largest term is at most `fade` away from zero
    bad = ~(torch.isfinite(reach) & torch.isfinite(threshold)) & ~torch.isposinf(threshold)

    skip = None
    below = torch.full_like(edges[..., :1], -1.0)
    for edge in edges.unbind(-1):
        x = edge[..., None]  # [B, H, 1]
        weights = torch.logsumexp(spread * x[..., None].to(norms.dtype) + fade, dim=-1)  # [B, H, key blocks]
        block_sum = weights.double() + x * longest.double() + rounding
        block_sum = block_sum.nan_to_num(nan=HUGE, posinf=HUGE, neginf=-HUGE)
        table = torch.logcumsumexp(block_sum + slopes[..., None] * ends, dim=-1)  # rises with the block
        mine = (reach > below) & (reach <= x)
        least = threshold.masked_fill(~mine, math.inf).masked_fill(bad, -math.inf)
        least = _by_block(least, block, fill=math.inf).amin(-1)  # [B, H, query blocks]
        count = torch.searchsorted(table.contiguous(), least.contiguous(), right=True)
        skip = count if skip is None else torch.minimum(skip, count)
        below = x
    assert skip is not None
    return skip
