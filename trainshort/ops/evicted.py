"""Keys that were evicted from a cache: what is left of them is a bound of all that they could weigh.

For a query with x = s‖q‖ the evicted keys of a head together weigh at most exp(E(x)),

    E(x) = ln sum over evicted j of exp(x‖k_j - c‖ - penalty_j),

relative to exp(s q.c), whatever vector c is taken from every key. The penalty of a key is m (p - j) for a head of
slope m; under forget gates it is what the log gates of all tokens after it sum up to, without the sign. E is known at
POINTS values of x from 0 to `end`. It is convex in x, a log-sum-exp of straight lines, so between two of these values
the chord lies above it. Beyond `end` it rises by at most the longest norm for each unit of x. With every token all
penalties grow alike, so E fades by that much, and the key that the token evicts is added: memory and work a token do
not depend on how many keys are gone.

Tables are float64 and every step rounds up, so they never fall below the sums they bound. The proof is in
docs/proof-cache.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

POINTS = 16  # values of x in a table
NOTHING = -1e30  # the logarithm of zero, but safe to multiply by zero
AT_ONCE = 2**21  # numbers of a temporary tensor
ROUNDING = 2.0**-40  # of a step in float64, relative, with room to spare


class EvictedKeys:
    """The tables of all layers, rows and query heads, as of the last token.

    Penalties and what tables fade by are float64 and must not be more than they are. A penalty of infinity stands for
    a key that weighs nothing, or for none.
    """

    def __init__(self, layers: int, batch: int, heads: int, device: torch.device | None = None) -> None:
        shape = (layers, batch, heads)
        self.table = torch.full((*shape, POINTS), NOTHING, dtype=torch.float64, device=device)
        self.end = torch.ones(shape, dtype=torch.float64, device=device)
        self.steps = torch.arange(POINTS, dtype=torch.float64, device=device) / (POINTS - 1)

    def points(self) -> Tensor:
        """The values of x in the tables, [L, B, H, POINTS]."""
        return self.end[..., None] * self.steps

    def stretch(self, layer: int, end: Tensor, longest: Tensor) -> None:
        """Let a layer's tables reach to other values of x, [B, H]: bounds at these, so chords still lie above."""
        points = end[..., None] * self.steps
        self.table[layer] = self.at(points, longest, layer)
        self.end[layer] = end

    def fade(self, layer: int, nats: Tensor) -> None:
        """Let the penalties of all of a layer's keys grow, by [H] or [B, H]."""
        self.table[layer] = _faded(self.table[layer], nats)

    def add(self, layer: int, heads: slice, norms: Tensor, penalty: Tensor) -> None:
        """Add keys to query heads of a layer. norms: [B, heads, N]; penalty: [B or 1, heads, N]."""
        table = self.table[layer, :, heads]
        points = self.points()[layer, :, heads, :, None]  # [B, heads, POINTS, 1]
        weightless = penalty == math.inf
        least = penalty.masked_fill(weightless, 0.0) * (1.0 - ROUNDING)
        points = points * (1.0 + ROUNDING)
        size = max(1, AT_ONCE // max(1, table.numel()))
        for first in range(0, norms.shape[2], size):
            some = slice(first, first + size)
            terms = points * norms[:, :, None, some].double() - least[:, :, None, some]
            terms = terms.masked_fill(weightless[:, :, None, some], NOTHING)
            sums = torch.logsumexp(terms, -1)
            sums += _rounding(sums)
            torch.logaddexp(table, sums, out=sums)
            table.copy_(sums + _rounding(sums))

    def step(self, norms: Tensor, penalty: Tensor, nats: Tensor) -> None:
        """One token in all layers: fade, and add the key that it evicts.

        norms and its penalty: [L, B, H]; nats to fade by: [H] or [L, B, H].
        """
        weightless = (penalty == math.inf)[..., None]
        products, penalty = self.points() * norms.double()[..., None], penalty[..., None]
        terms = products - penalty + ROUNDING * (products + penalty + 1.0)
        terms = terms.masked_fill(weightless, NOTHING)
        torch.logaddexp(_faded(self.table, nats), terms, out=terms)
        self.table.copy_(terms + _rounding(terms))

    def at(self, x: Tensor, longest: Tensor, layer: int | None = None) -> Tensor:
        """An upper bound of E at x [..., H, N], for all layers or one; longest: the largest norm, [..., H]."""
        table, end = (self.table, self.end) if layer is None else (self.table[layer], self.end[layer])
        place = x / end[..., None] * (POINTS - 1)
        index = place.nan_to_num(nan=0.0).clamp(0, POINTS - 2).long()
        low, high = table.gather(-1, index), table.gather(-1, index + 1)
        beyond = (x - end[..., None]).clamp_min(0.0) * longest.double()[..., None]  # stays NaN if x is
        bound = low + (place - index).clamp_max(1.0) * (high - low) + beyond
        bound = bound + ROUNDING * (low.abs() + high.abs() + beyond)
        return torch.where((low < NOTHING / 2) & ~torch.isnan(bound), NOTHING, bound)  # for long queries too


def _faded(table: Tensor, nats: Tensor) -> Tensor:
    table = (table - (nats * (1.0 - ROUNDING))[..., None]).clamp_min(NOTHING)
    return table + _rounding(table)


def _rounding(sums: Tensor) -> Tensor:
    return ROUNDING * (sums.abs() + 1.0)
