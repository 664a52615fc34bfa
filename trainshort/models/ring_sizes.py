"""How many keys each head of a bounded cache keeps: choices, no part of the proof.

A head is to keep what queries need that are somewhat longer than any so far. What is learned of their sizes outlives
a rerun of the text, so that it is not learned again by failing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainshort.models.config import ModelConfig
from trainshort.ops.problem import BLOCK

MARGIN = 1.5  # rings are made for queries so many times as long as any before
ADAPT = 64  # steps between two looks at what queries need
LEAST_MARGIN = 1.2  # and made larger once they would not do for queries so many times as long


class BoundedCacheError(RuntimeError):
    """Evicted keys may have held more than the tolerance, and the text could not or should not be run again.

    A bounded cache raises it with on_failure="raise". Tokens that are fed again after it run the text again.
    """


class RingSizes:
    """What queries have asked for so far, by layer, row and query head, and what that makes of rings."""

    def __init__(self, config: ModelConfig, batch_size: int, tolerance: float, device: torch.device) -> None:
        """tolerance: the softmax mass that evicted keys may hold."""
        self.kv_heads, self.tolerance, self.margin = config.kv_heads, tolerance, MARGIN
        self.least = [[BLOCK] * config.kv_heads for _ in range(config.num_layers)]
        shape = (config.num_layers, batch_size, config.num_heads)
        self.query_norm = torch.zeros(shape, dtype=torch.float64, device=device)  # the largest x = |scale| ‖q‖
        self.demand = torch.full(shape, -math.inf, dtype=torch.float64, device=device)  # x longest - log-sum-exp
        self.key_norm: Tensor | None = None  # [L, 1, H]: what no key exceeds, where that is known

    def expect_norms(self, queries: Tensor, keys: Tensor) -> None:
        """Norms have bounds that none exceeds: x [L, H], and ‖k‖ [L, H]. Rings are made for these, with no margin."""
        self.query_norm.copy_(queries[:, None])
        self.key_norm = keys[:, None].to(self.query_norm)
        self.margin = 1.0

    def expect_demand(self, layer: int, demand: Tensor) -> None:
        """Queries of a layer may ask for as much as this, [B, H]."""
        self.demand[layer] = torch.maximum(self.demand[layer], demand)

    def at_first(self, layer: int, longest: Tensor, slopes: Tensor) -> list[int]:
        """Keys to keep by key head, when of queries nothing is known but norms."""
        self.demand[layer] = torch.maximum(self.demand[layer], self.query_norm[layer] * longest)
        needed = self._needed(layer, longest, slopes, self.margin)
        return [max(least, count) for least, count in zip(self.least[layer], needed, strict=True)]

    def later(
        self, layer: int, longest: Tensor, slopes: Tensor, targets: Sequence[int], close: Sequence[bool]
    ) -> list[int]:
        """The same later on: more where it would no longer do, a quarter more where a certificate came close."""
        least = self._needed(layer, longest, slopes, min(self.margin, LEAST_MARGIN))
        wanted = self._needed(layer, longest, slopes, self.margin)
        return [
            max(target, want if need > target else 0, _whole_blocks(target * 1.25) if near else 0)
            for target, need, want, near in zip(targets, least, wanted, close, strict=True)
        ]

    def expect_more(self, failed: Tensor, targets: Sequence[Sequence[int] | None]) -> None:
        """After a failure in these heads, bool [L, B, H]: they keep twice as many, and all expect longer queries."""
        heads = failed.unflatten(2, (self.kv_heads, -1)).any(-1).any(1).tolist()  # [L][Hkv]
        for layer, (row, sizes) in enumerate(zip(heads, targets, strict=True)):
            for head, bad in enumerate(row):
                if bad and sizes is not None:
                    self.least[layer][head] = 2 * sizes[head]
        self.margin = max(MARGIN, 1.0 + 2.0 * (self.margin - 1.0))

    def _needed(self, layer: int, longest: Tensor, slopes: Tensor, margin: float) -> list[int]:
        """Keys that each key head needs if queries come to be `margin` times as long as the longest so far.

        As in the proof of windows: W >= (x K - lse + ln(1/tolerance) - ln(1 - e^-m)) / m. longest: K, [B, H].
        """
        nats = self.nats(layer, longest, margin) - torch.log(-torch.expm1(-slopes))
        keys = (nats / slopes).clamp_min(1.0).unflatten(1, (self.kv_heads, -1)).amax((0, 2))
        counts: list[float] = keys.tolist()
        self._require_finite(layer, all(math.isfinite(count) for count in counts))
        return [_whole_blocks(min(count, 2.0**40) + 1) for count in counts]

    def nats(self, layer: int, longest: Tensor, margin: float) -> Tensor:
        """By how much evicted keys must have faded, all together, for queries so much longer: [B, H]."""
        nats = self.demand[layer] + (margin - 1.0) * self.query_norm[layer] * longest
        return nats - math.log(self.tolerance) + 0.01

    def by_levels(
        self, layer: int, longest: Tensor, faded: Sequence[Tensor], targets: Sequence[int] | None
    ) -> list[int]:
        """Keys to keep by key head under gates, from how much each key that is there has faded by now.

        faded: for neighbouring key heads, [B, heads, N, G]: what the evicted keys would weigh together if this one
        and all before it were evicted too, as a logarithm. It never falls from key to key. A ring is as long as what
        cannot be evicted now, and the keys to come before the next look, rounded up to a power of two of blocks; it
        becomes shorter once a quarter would do.
        """
        if targets is None:
            self.demand[layer] = torch.maximum(self.demand[layer], self.query_norm[layer] * longest)
        wanted, least = (
            self._kept_by_levels(layer, longest, faded, margin)
            for margin in (self.margin, min(self.margin, LEAST_MARGIN))
        )
        if targets is None:
            return wanted
        return [
            want if need > target else 2 * want if 4 * want <= target else target
            for target, need, want in zip(targets, least, wanted, strict=True)
        ]

    def _kept_by_levels(self, layer: int, longest: Tensor, faded: Sequence[Tensor], margin: float) -> list[int]:
        budget = -self.nats(layer, longest, margin)
        self._require_finite(layer, bool(torch.isfinite(budget).all()))
        budgets = budget.unflatten(1, (self.kv_heads, 1, -1))  # [B, Hkv, 1, G]
        kept, head = [], 0
        for sums in faded:
            stays = (~(sums <= budgets[:, head : head + sums.shape[1]])).sum(2)  # NaN stays, and fails
            kept += stays.amax((0, 2)).tolist()
            head += sums.shape[1]
        return [_power_of_blocks(count + ADAPT + 1) for count in kept]

    @staticmethod
    def _require_finite(layer: int, finite: bool) -> None:
        if not finite:
            raise BoundedCacheError(
                f"layer {layer} has queries or keys that are not finite (NaN or infinite), which no certificate "
                "covers: use a full cache to see where they come from"
            )


def _whole_blocks(keys: float) -> int:
    return math.ceil(keys / BLOCK) * BLOCK


def _power_of_blocks(keys: int) -> int:
    return BLOCK * 2 ** math.ceil(math.log2(max(1.0, keys / BLOCK)))
