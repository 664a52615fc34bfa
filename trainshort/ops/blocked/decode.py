"""Decoding on a CPU: one query a row, straight to the keys of its window.

With a single query there is nothing to tile or to merge. What counts is to do little besides reading the keys that
can matter: a window in O(1) from the norms that a cache keeps, computed in plain numbers because a tensor operation
costs more than a head's whole arithmetic, and one kernel call for heads with windows of a similar length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import groupby

import torch
from torch import Tensor

from trainshort.ops.bias import LARGEST_SLOPE, LinearBias
from trainshort.ops.blocked import piece_kernels
from trainshort.ops.decay import DecayBias
from trainshort.ops.norms import UNDERFLOW
from trainshort.ops.problem import BLOCK, Problem
from trainshort.ops.threads import one_thread

LITTLE = 2**16  # numbers of the keys to read, below which one thread is as fast as several
ALL = slice(None)
# What a call of the kernel costs, in numbers that it reads; each key counts FIXED more of them than it has. Heads are
# computed LANES at a time: more on large machines, where less is to be saved.
CALL, FIXED, LANES = 125_000, 20, 2
SEARCH = 300_000  # numbers: so many are read sooner than it is found out which of them matter
LONGEST_KEPT_BIAS = 8192  # keys: longer rows of the bias are made anew, beside the keys they cost little


def why_not(problem: Problem) -> str | None:
    """Why this path does not take a problem, in words; None where it does."""
    q, k, v, mask, start = problem.q, problem.k, problem.v, problem.key_padding_mask, problem.query_start
    if q.shape[2] != 1 or not problem.is_decoding:
        return "it takes one causal query a row"
    if q.device.type != "cpu":
        return f"it runs on a CPU, got {q.device}"
    if problem.key_norms is None:
        return "it needs key_norms"
    if problem.dropout:
        return "it takes no dropout"
    if not isinstance(problem.bias, (LinearBias, DecayBias)):
        return "it needs a LinearBias or a DecayBias"
    if q.dtype not in (torch.float32, torch.float64):
        return f"it takes float32 and float64, got {q.dtype}"
    at_the_end = start is None or (not isinstance(start, Tensor) and start == k.shape[2] - 1)
    if not at_the_end or k.shape[2] == 0:
        return "the query must stand at the last key"
    if not (piece_kernels.has_plain_rows(k) and piece_kernels.has_plain_rows(v) and piece_kernels.has_plain_rows(q)):
        return "the rows of q, k and v must be contiguous and apart"
    if mask is not None and not bool(mask[:, -1].all()):
        return "the last key must be real"
    return None if piece_kernels.has_fused() else "this version of torch lacks the CPU kernel"


def attend(problem: Problem) -> Tensor | None:
    """Output [B, H, 1, D]; None where numbers came up that are not finite, or slopes or norms that can't be."""
    slopes = _slope_rows(problem)
    if not _are_good(problem, slopes):
        return None
    least, longest = _norms(problem)
    if any(norm < 0 for row in least for norm in row):
        return None
    done = _forward(problem, _lows(problem, slopes, longest), slopes)
    return None if done is None else done[0]


def _are_good(problem: Problem, slopes: Slopes) -> bool:
    """Whether no slopes are below 0, and c holds no NaN, which would go on to the last key."""
    if problem.bias_is_linear:
        return all(0.0 <= slope <= LARGEST_SLOPE for row in slopes for slope in row)
    rates = problem.decay.rates
    if rates is not None and not bool(((rates >= 0) & (rates <= LARGEST_SLOPE)).all()):
        return False
    return not bool(problem.decay.levels(slice(problem.k.shape[2] - 1, None))[0].isnan().any())


def windows_of(problem: Problem) -> Tensor:
    """The windows of this path in the form of certified windows: int32 [B, H, 1, 2]."""
    group = problem.q.shape[1] // problem.k.shape[1]
    lows = _lows(problem, _slope_rows(problem), _norms(problem)[1])
    first = [[low // BLOCK for low in row for _ in range(group)] for row in lows]
    low = torch.tensor(first, dtype=torch.int32, device="cpu")
    if low.shape[0] < problem.q.shape[0]:
        low = low.expand(problem.q.shape[0], -1)
    last = torch.full_like(low, -(-problem.k.shape[2] // BLOCK))
    return torch.stack((low, last), dim=-1)[:, :, None]


def forward(problem: Problem, windows: Tensor) -> tuple[Tensor, Tensor] | None:
    """Output [B, H, 1, D] and log-sum-exp [B, H, 1] of the scores of the keys in these windows.

    None where numbers that are not finite came up: hidden keys weigh nothing, but 0 * inf is not 0.
    """
    group = problem.q.shape[1] // problem.k.shape[1]
    lows: list[list[int]] = (windows[:, ::group, 0, 0] * BLOCK).tolist()
    return _forward(problem, lows if problem.key_padding_mask is not None else lows[:1], _slope_rows(problem))


Slopes = tuple[tuple[float, ...], ...]  # of every row of the batch, or one row for all


def _norms(problem: Problem) -> tuple[list[list[float]], list[list[float]]]:
    """The least and the largest of the norms that bound the keys, [B][Hkv]."""
    norms = problem.key_norms
    assert norms is not None
    if norms.dim() == 2:
        return norms.tolist(), norms.tolist()
    least, largest = norms.aminmax(dim=-1)
    return least.tolist(), largest.tolist()


def _lows(problem: Problem, slopes: Slopes, longest: list[list[float]]) -> list[list[int]]:
    """The first key to read for each key head: one list for the whole batch, or one a row under padding.

    The tail with the largest norm so far, against the query's own key: with N = s‖q‖K - s q.k_own + ln(1/tolerance),
    a geometric series for a slope, W >= (N - ln(1 - e^-m)) / m; for a decay `keys` times its largest term, so that
    all keys with c_j - c_own >= N + ln(keys) can go.
    """
    batch, heads, _, dim = problem.q.shape
    keys, kv_heads = problem.k.shape[2], problem.k.shape[1]
    everything = -(-kv_heads // LANES) * keys * (FIXED + dim)
    if problem.tolerance <= 0.0 or keys <= BLOCK or everything <= SEARCH:
        if problem.key_padding_mask is None:
            return [[0] * kv_heads]
        rows = [[0] * kv_heads] * batch
    else:
        own = problem.k[:, :, -1:]
        grouped = _grouped(problem.q, kv_heads)
        scores: list[list[list[float]]] = (grouped * own).sum(-1).tolist()  # [B, Hkv, G]
        lengths: list[list[list[float]]] = torch.linalg.vector_norm(grouped, dim=-1).tolist()
        tiny = dim**0.5 * UNDERFLOW
        # Twice the rounding of a norm and of an inner product, relative to s‖q‖K.
        slack = abs(problem.scale) * (1.0 + 4 * (dim + 4) * 2.0**-23)
        spare = -math.log(problem.tolerance) + 1e-5
        group = heads // kv_heads
        first_of = partial(_first_by_slope, slopes, keys) if problem.bias_is_linear else _FirstByLevel(problem)
        rows = []
        for row in range(batch):
            lows = []
            for head in range(kv_heads):
                norm = (longest[row][head] + tiny) * slack
                low = keys - 1  # a window holds the own key, however steep the slope
                for member in range(group):
                    nats = (lengths[row][head][member] + tiny) * norm - scores[row][head][member] * problem.scale
                    low = min(low, first_of(row, head * group + member, nats + spare))
                lows.append(low // BLOCK * BLOCK)
            rows.append(lows)
    if problem.key_padding_mask is not None:
        begins = problem.key_runs()[0][:, 0].tolist()
        hidden = [begin // BLOCK * BLOCK for begin in begins]
        return [
            _shared([max(low, first) for low in lows], keys, dim) for lows, first in zip(rows, hidden, strict=True)
        ]
    return [_shared([min(low) for low in zip(*rows, strict=True)], keys, dim)]


def _first_by_slope(slopes: Slopes, keys: int, row: int, head: int, nats: float) -> int:
    """The first key to read where keys may weigh e^nats times the own one, each less by its penalty."""
    slope = slopes[row if len(slopes) > 1 else 0][head]
    if slope == 0.0:
        return 0
    width = (nats - math.log(-math.expm1(-slope))) / slope
    # NaN compares false; a score of infinity gives -infinity: all of it.
    return math.floor(keys - width) if 0.0 <= width < keys else 0


class _FirstByLevel:
    """The same for a decay, in whole blocks: a binary search in c at their ends, which never rises."""

    def __init__(self, problem: Problem) -> None:
        self.keys = problem.k.shape[2]
        self.own = problem.decay.levels(slice(self.keys - 1, None))[0][..., 0].tolist()  # [B or 1][H]
        self.heights = -problem.decay.levels(slice(BLOCK - 1, None, BLOCK))[0]  # [B or 1, H, whole blocks]

    def __call__(self, row: int, head: int, nats: float) -> int:
        if not 0.0 <= nats < math.inf:
            return 0
        row = row if len(self.own) > 1 else 0
        own = -self.own[row][head]
        least = own - (nats + math.log(self.keys)) - 2.0**-50 * abs(own)
        return min(int(torch.searchsorted(self.heights[row, head], least)) * BLOCK, self.keys - 1)


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """The queries of a group as rows: [B, Hkv, G, D]."""
    return q if q.shape[1] == kv_heads else q[:, :, 0].unflatten(1, (kv_heads, -1))


def _slope_rows(problem: Problem) -> Slopes:
    if not problem.bias_is_linear:
        return ()
    slopes = problem.linear.slopes
    return (tuple(slopes.tolist()),) if slopes.dim() == 1 else tuple(map(tuple, slopes.tolist()))


def _shared(lows: list[int], keys: int, dim: int) -> list[int]:
    """Neighbouring heads get one first key where one call for all of them is faster than one for each.

    A call costs as much as reading some thousand keys, and what it reads takes as long as ceil(heads / LANES) of its
    longest windows.
    """
    call = CALL // (FIXED + dim)
    groups: list[tuple[int, int, int]] = []  # first key, heads, cost
    for low in lows:
        groups.append((low, 1, call + keys - low))
        while len(groups) > 1:
            (low_a, size_a, cost_a), (low_b, size_b, cost_b) = groups[-2:]
            first, size = min(low_a, low_b), size_a + size_b
            cost = call + -(-size // LANES) * (keys - first)
            if cost > cost_a + cost_b:
                break
            groups[-2:] = [(first, size, cost)]
    return [first for first, size, _ in groups for _ in range(size)]


def _forward(problem: Problem, lows: list[list[int]], slopes: Slopes) -> tuple[Tensor, Tensor] | None:
    batch, _, keys, dim = problem.k.shape
    read = sum(keys - low for row in lows for low in row) * dim * (batch if len(lows) == 1 else 1)
    with one_thread() if read <= LITTLE else nullcontext():
        return _attended(problem, lows, slopes)


def _attended(problem: Problem, lows: list[list[int]], slopes: Slopes) -> tuple[Tensor, Tensor] | None:
    if problem.key_padding_mask is None:
        parts = list(_calls(problem, slopes, ALL, lows[0], 0))
        out, lse = parts[0] if len(parts) == 1 else _joined(parts, 1)
    else:  # row by row, so that padding is not even multiplied by zero
        begins = problem.key_runs()[0][:, 0].tolist()
        each = [
            _joined(list(_calls(problem, slopes, slice(row, row + 1), lows[row], begin)), 1)
            for row, begin in enumerate(begins)
        ]
        out, lse = _joined(each, 0)
    if not math.isfinite(out.sum().item() + lse.sum().item()):
        return None
    if out.shape[2] > 1:
        out, lse = out.flatten(1, 2)[:, :, None], lse.flatten(1, 2)[:, :, None]
    return out, lse


def _joined(parts: list[tuple[Tensor, Tensor]], dim: int) -> tuple[Tensor, Tensor]:
    outs, sums = zip(*parts, strict=True)
    return torch.cat(outs, dim=dim), torch.cat(sums, dim=dim)


def _calls(
    problem: Problem, slopes: Slopes, rows: slice, lows: list[int], begin: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Output [rows, heads, G, D] and log-sum-exp of neighbouring key heads, for rows whose keys start at `begin`."""
    q, k, v, kv_heads, keys, head = problem.q, problem.k, problem.v, problem.k.shape[1], problem.k.shape[2], 0
    if rows != ALL:
        q, k, v = q[rows], k[rows], v[rows]
    q = _grouped(q, kv_heads)
    for low, heads in groupby(lows):
        first, head = head, head + len(list(heads))
        start = max(low, begin)
        part = slice(first, head)
        if problem.bias_is_linear:
            bias = _bias(slopes, q.dtype, rows, keys - start, kv_heads)[:, part]
        else:
            bias = _decay_bias(problem, rows, part, start)
        yield torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[:, part],
            k[:, part, start:],
            v[:, part, start:],
            0.0,
            False,
            attn_mask=bias,
            scale=problem.scale,
        )


def _bias(slopes: Slopes, dtype: torch.dtype, rows: slice, length: int, kv_heads: int) -> Tensor:
    """The bias of a query on its last `length` keys, [B or 1, Hkv, G, length]."""
    if len(slopes) == 1 and length <= LONGEST_KEPT_BIAS:
        return _kept_bias(slopes, dtype, kv_heads)[..., LONGEST_KEPT_BIAS - length :]
    return _make_bias(slopes if len(slopes) == 1 else slopes[rows], dtype, kv_heads, length)


def _decay_bias(problem: Problem, rows: slice, kv_heads: slice, start: int) -> Tensor:
    """c_own - c_j of the keys from `start` on, -inf behind a border: [B or 1, Hkv, G, keys]."""
    group = problem.q.shape[1] // problem.k.shape[1]
    heads = slice(kv_heads.start * group, kv_heads.stop * group)
    decay = problem.decay.part(rows, heads)
    levels = decay.levels(slice(start, None))[0]
    bias = (levels[..., -1:] - levels).to(problem.q.dtype)
    if decay.gate_first is not None:
        key = torch.arange(start, start + levels.shape[2], device=bias.device)
        bias = bias.masked_fill(key < decay.gate_first[..., -1:], -math.inf)
    return bias.unflatten(1, (-1, group))


@lru_cache(maxsize=4)
def _kept_bias(slopes: Slopes, dtype: torch.dtype, kv_heads: int) -> Tensor:
    return _make_bias(slopes, dtype, kv_heads, LONGEST_KEPT_BIAS)


def _make_bias(slopes: Slopes, dtype: torch.dtype, kv_heads: int, length: int) -> Tensor:
    distance = torch.arange(1 - length, 1, dtype=dtype, device="cpu")
    penalties = torch.tensor(slopes, dtype=dtype, device="cpu").unflatten(1, (kv_heads, -1))
    return penalties[..., None] * distance
