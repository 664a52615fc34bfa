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
LEAST_MARGIN = 1.2  # and made larger once they would not do for queries so many times as long


class BoundedCacheError(RuntimeError):
    """Evicted keys may have held more than the tolerance, and the text could not or should not be run again."""


class RingSizes:
    """What queries have asked for so far, by layer, row and query head, and what that makes of rings."""

    def __init__(self, config: ModelConfig, batch_size: int, tolerance: float, device: torch.device) -> None:
        """tolerance: the softmax mass that evicted keys may hold."""
        self.kv_heads, self.tolerance, self.margin = config.kv_heads, tolerance, MARGIN
        self.least = [[BLOCK] * config.kv_heads for _ in range(config.num_layers)]
        shape = (config.num_layers, batch_size, config.num_heads)
        self.query_norm = torch.zeros(shape, dtype=torch.float64, device=device)  # the largest x = |scale| ‖q‖
        self.demand = torch.full(shape, -math.inf, dtype=torch.float64, device=device)  # x longest - log-sum-exp

    def at_first(self, layer: int, longest: Tensor, slopes: Tensor) -> list[int]:
        """Keys to keep by key head, when of queries nothing is known but norms."""
        self.demand[layer] = torch.maximum(self.demand[layer], self.query_norm[layer] * longest)
        needed = self._needed(layer, longest, slopes, self.margin)
        return [max(least, count) for least, count in zip(self.least[layer], needed, strict=True)]

    def later(
        self, layer: int, longest: Tensor, slopes: Tensor, targets: Sequence[int], close: Sequence[bool]
    ) -> list[int]:
        """The same later on: more where it would no longer do, a quarter more where a certificate came close."""
        least = self._needed(layer, longest, slopes, LEAST_MARGIN)
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
        self.margin = 1.0 + 2.0 * (self.margin - 1.0)

    def _needed(self, layer: int, longest: Tensor, slopes: Tensor, margin: float) -> list[int]:
        """Keys that each key head needs if queries come to be `margin` times as long as the longest so far.

        As in the proof of windows: W >= (x K - lse + ln(1/tolerance) - ln(1 - e^-m)) / m. longest: K, [B, H].
        """
        nats = self.demand[layer] + (margin - 1.0) * self.query_norm[layer] * longest
        nats = nats - torch.log(-torch.expm1(-slopes)) - math.log(self.tolerance) + 0.01
        keys = (nats / slopes).clamp_min(1.0).unflatten(1, (self.kv_heads, -1)).amax((0, 2))
        counts: list[float] = keys.tolist()
        if not all(math.isfinite(count) for count in counts):
            raise BoundedCacheError(
                f"layer {layer} has queries or keys that are not finite (NaN or infinite), which no certificate "
                "covers: use a full cache to see where they come from"
            )
        return [_whole_blocks(min(count, 2.0**40) + 1) for count in counts]


def _whole_blocks(keys: float) -> int:
    return math.ceil(keys / BLOCK) * BLOCK
