"""A bounded cache whose keys fade by forget gates, as the text says: when a head forgets is not known in advance.

Every key keeps its level, the running sum c of log gates up to it, for each query head of its group. A key j has
faded by c_j - c_p when token p is the last. Keys that may not be seen any more, those before a gate of zero and
padding, have a level of infinity: they weigh nothing, and are free to go. From the levels follows which keys can be
evicted now; rings are as long as the others need (ring_sizes.py), which is everything while gates stay open.

Levels are float64, and relative to a token that is not far back, so that they stay exact in texts without end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainshort.models.bounded_keys import BoundedKeys
from trainshort.models.config import ModelConfig
from trainshort.models.ring_sizes import RingSizes
from trainshort.ops import ring_step
from trainshort.ops.bias import Bias
from trainshort.ops.decay import DecayBias
from trainshort.ops.gate_sums import running_sums
from trainshort.ops.ring_step import Levels
from trainshort.ops.rings import Span

LOWEST = -(2.0**13)  # of the last token's level: below, levels are counted from it
LEVEL_ROUNDING = 2.0**-44  # of a difference of levels, relative to these, with room to spare


class GatedKeys(BoundedKeys):
    def __init__(self, config: ModelConfig, sizes: RingSizes, padding: Tensor | None, *, dtype: torch.dtype) -> None:
        super().__init__(config, sizes, padding, dtype=dtype, has_gates=True)
        with torch.inference_mode(False):
            self.last = torch.zeros_like(sizes.query_norm)  # the level of the last token, [L, B, H]
            # Of the token at work: the level of the key that it evicts, and by how much it lets others fade.
            self.step_level, self.step_fade = torch.full_like(self.last, math.inf), torch.zeros_like(self.last)
            self.no_slopes = torch.zeros(config.num_heads, dtype=torch.float32, device=self.device)

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), self.last, self.step_level, self.step_fade]

    def decay(self, layer: int, log_gates: Tensor, length: int) -> DecayBias:
        """Levels of the next tokens, [B, H, T], and what of them a gate of zero hides: a first position of 0 means
        that a token sees what was there before, n > 0 that it sees the n-th of these tokens and later ones."""
        if self.padding is not None and length < self.most_padding:
            index = torch.arange(length, length + log_gates.shape[2], device=self.device)
            log_gates = log_gates.masked_fill((index < self.padding[:, None])[:, None], 0.0)
        last = self.last[layer, ..., None]
        before = (last, torch.zeros_like(last, dtype=torch.int32)) if length else None
        return DecayBias.from_sums(*running_sums(log_gates, before, start=1))

    def attend_one(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, bias: Bias, scale: float, length: int, replayed: bool
    ) -> Tensor:
        levels, first = _levels_of(bias)
        level, closed = levels[..., 0], first[..., 0] > 0
        rings, step = self.rings[layer], self._step(layer, scale, self.no_slopes)
        assert rings.levels is not None
        if self.device.type != "cpu" or bool(closed.any()):
            hidden = closed.unflatten(1, (-1, 1, self.group))  # [B, Hkv, 1, G]
            for run in rings.runs:
                rings.slots_of(rings.levels, run).masked_fill_(hidden[:, run.heads], math.inf)
        slots = step.offset + self.place % step.capacity
        self.step_level[layer] = rings.levels.index_select(1, slots).flatten(1)
        self.step_fade[layer] = falls(self.last[layer], level).masked_fill(closed, math.inf)
        rings.levels.index_copy_(1, slots, level.unflatten(1, (-1, self.group)))
        self.last[layer] = level
        return ring_step.attend(q, k, v, step, length, Levels(rings, level, self.wide))

    def _step_fading(self) -> tuple[Tensor, Tensor]:
        return falls(self.step_level, self.last), self.step_fade

    def _piece_levels(self, bias: Bias) -> Tensor:
        return _levels_of(bias)[0].unflatten(1, (-1, self.group)).transpose(2, 3)

    def _piece_bias(self, span: Span, bias: Bias, tokens: int) -> Bias:
        levels, held = _by_query_head(span), span.keys.shape[2] - tokens
        hidden = levels == math.inf  # the first keys of a head, if any
        highest = levels.masked_fill(hidden, -math.inf).amax(-1, keepdim=True)
        first = _levels_of(bias)[1][:, self._query_heads(span)]
        seen = torch.where(first > 0, held + first - 1, hidden.sum(-1, keepdim=True)).to(torch.int32)
        firsts = torch.nn.functional.pad(seen, (held, 0))  # of tokens before the piece nobody asks
        return DecayBias.from_sums(torch.where(hidden, highest, levels), firsts)

    def _further(self, layer: int, bias: Bias, tokens: int) -> Tensor:
        levels, first = _levels_of(bias)
        return falls(self.last[layer, ..., None], levels).masked_fill(first > 0, math.inf)

    def _end_piece(self, layer: int, spans: Sequence[Span], bias: Bias) -> None:
        """Hide what was before the last gate of zero, and padding; count levels from the last token where due."""
        levels, firsts = _levels_of(bias)
        shift = _shift(levels[..., -1])
        self.last[layer] = levels[..., -1] - shift
        for span in spans:
            assert span.levels is not None
            heads, count = self._query_heads(span), span.keys.shape[2]
            first = firsts[:, heads, -1]
            cut = torch.where(first > 0, count - levels.shape[2] + first - 1, 0).unflatten(1, (-1, 1, self.group))
            index = torch.arange(count, device=self.device)
            hidden = index[:, None] < cut
            real = self._real(span.low, count)
            if real is not None:
                hidden = hidden | ~real[:, None, :, None]
            moved = span.levels - shift[:, heads].unflatten(1, (-1, 1, self.group))
            span.levels = moved.masked_fill(hidden, math.inf)

    def _penalty(self, layer: int, span: Span, end: int) -> Tensor:
        return falls(_by_query_head(span), self.last[layer, :, self._query_heads(span), None])

    def adapt(self, length: int) -> None:
        for layer, rings in enumerate(self.rings):
            assert rings.levels is not None
            shift = _shift(self.last[layer])
            self.last[layer] -= shift
            for run in rings.runs:
                view = rings.slots_of(rings.levels, run)
                view -= shift.unflatten(1, (-1, 1, self.group))[:, run.heads]
        super().adapt(length)

    def _sizes_at_first(self, layer: int, spans: Sequence[Span], longest: Tensor) -> list[int]:
        return self.sizes.by_levels(layer, longest, self._faded(layer, spans, None), None)

    def _sizes_later(self, layer: int, spans: Sequence[Span] | None, longest: Tensor, length: int) -> list[int]:
        return self.sizes.by_levels(layer, longest, self._faded(layer, spans, length), self.targets[layer])

    def _faded(self, layer: int, spans: Sequence[Span] | None, length: int | None) -> list[Tensor]:
        """For each key that is there: what would have been evicted up to it, for a query of length 0; in logarithms,
        [B, heads, N, G], by runs of heads. Without spans, of the keys in rings after so many tokens."""
        if spans is not None:
            parts = [(span.heads, span.levels) for span in spans]
        else:
            assert length is not None
            rings = self.rings[layer]
            assert rings.levels is not None
            parts = [(run.heads, rings.ordered(rings.levels, run, length)) for run in rings.runs]
        last = self.last[layer].unflatten(1, (-1, 1, self.group))
        gone = self.evicted.table[layer, ..., 0].unflatten(1, (-1, 1, self.group))  # [B, Hkv, 1, G]
        faded = []
        for heads, levels in parts:
            assert levels is not None
            sums = torch.logcumsumexp(-falls(levels, last[:, heads]), 2)
            faded.append(torch.logaddexp(sums, gone[:, heads]))
        return faded


def falls(before: Tensor, after: Tensor) -> Tensor:
    """By how much levels fell from one token to a later one, never more than that: infinite from infinity."""
    fall = before - after - LEVEL_ROUNDING * (before.abs() + after.abs())
    return torch.where(before == math.inf, math.inf, fall.clamp_min(0.0))


def _shift(last: Tensor) -> Tensor:
    """What is taken from all levels: those of the last tokens where these have become large."""
    return torch.where(last < LOWEST, last, 0.0)


def _by_query_head(span: Span) -> Tensor:
    """Levels of a span, [B, heads, N]."""
    assert span.levels is not None
    return span.levels.transpose(2, 3).flatten(1, 2)


def _levels_of(bias: Bias) -> tuple[Tensor, Tensor]:
    assert isinstance(bias, DecayBias)
    assert bias.gate_sums is not None
    assert bias.gate_first is not None
    return bias.gate_sums, bias.gate_first
