"""A bounded cache whose keys fade by slopes: every token lets all keys before it fade alike, in all texts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainshort.models.bounded_keys import CLOSE, BoundedKeys
from trainshort.models.config import ModelConfig
from trainshort.models.ring_sizes import RingSizes
from trainshort.ops import ring_step
from trainshort.ops.bias import Bias, LinearBias
from trainshort.ops.dispatch import INTERPRETED, backend_for
from trainshort.ops.ring_step import Lines
from trainshort.ops.rings import Span


class SlopedKeys(BoundedKeys):
    def __init__(
        self, config: ModelConfig, slopes: Tensor, sizes: RingSizes, padding: Tensor | None, *, dtype: torch.dtype
    ) -> None:
        """slopes: float64 [H]."""
        self.slopes = slopes
        with torch.inference_mode(False):
            self.kernel_slopes = slopes.float()
        self.lines = Lines(slopes, config.kv_heads, torch.float64 if dtype == torch.float64 else torch.float32)
        super().__init__(config, sizes, padding, dtype=dtype, has_gates=False)

    def lay_out(self) -> None:
        super().lay_out()
        self.lines.forget()

    def tensors(self) -> list[Tensor]:
        return super().tensors() + list(self.lines.lines.values())

    def attend_one(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, bias: Bias, scale: float, length: int, replayed: bool
    ) -> Tensor:
        step = self._step(layer, scale, self.kernel_slopes)
        if backend_for(q) == "triton" or (replayed and INTERPRETED):
            from trainshort.ops.triton import ring_step as kernels

            return kernels.attend(q, k, v, step)
        return ring_step.attend(q, k, v, step, length, self.lines)

    def _step_fading(self) -> tuple[Tensor, Tensor]:
        capacity = self.capacity_of[:, None]  # [L, 1, Hkv]
        left = self.place - capacity  # the key that lay in the new one's slot
        gone = left >= self.first_of[:, None]
        if self.padding is not None:
            gone = gone & (left >= self.padding[:, None])
        gone = gone.expand_as(self.step_evicted)
        penalty = self.slopes * self._by_query(capacity)
        return torch.where(self._by_query(gone), penalty, math.inf), self.slopes

    def _piece_bias(self, span: Span, bias: Bias, tokens: int) -> Bias:
        return LinearBias(self.kernel_slopes[self._query_heads(span)])

    def _further(self, layer: int, bias: Bias, tokens: int) -> Tensor:
        return self.slopes[:, None] * torch.arange(1, tokens + 1, dtype=torch.float64, device=self.device)

    def _penalty(self, layer: int, span: Span, end: int) -> Tensor:
        count = span.norms.shape[2]
        distance = (end - 1 - span.low) - torch.arange(count, dtype=torch.float64, device=self.device)
        penalty = (self.slopes[self._query_heads(span), None] * distance)[None]
        real = self._real(span.low, count)
        return penalty if real is None else torch.where(real[:, None], penalty, math.inf)

    def _sizes_at_first(self, layer: int, spans: Sequence[Span], longest: Tensor) -> list[int]:
        return self.sizes.at_first(layer, longest, self.slopes)

    def _sizes_later(self, layer: int, spans: Sequence[Span] | None, longest: Tensor, length: int) -> list[int]:
        rings, targets = self.rings[layer], self.targets[layer]
        assert targets is not None
        near = (self.excess[layer] > -CLOSE).unflatten(1, (self.config.kv_heads, -1)).any(2).any(0).tolist()
        close = [
            near[head] and capacity == targets[head] and length >= rings.first[head] + capacity
            for head, capacity in enumerate(rings.capacities)  # not those that have just become larger
        ]
        return self.sizes.later(layer, longest, self.slopes, targets, close)
