"""The keys and values of a bounded cache: rings in all layers, tables of what was evicted, and certificates.

A token alone goes through `attend_one` in every layer; its certificates follow for all layers at once, in
`finish_step`. A piece of a text is certified in each layer (`attend_piece`), against what was evicted before it; what
then has no place is evicted. Nobody here looks whether certificates hold: `excess` says it, on the device.

How keys fade is left to others: by slopes in bounded_slopes.py, by gates in bounded_gates.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from trainshort.models.config import ModelConfig
from trainshort.models.ring_sizes import RingSizes
from trainshort.ops.bias import Bias
from trainshort.ops.dispatch import attend_with_lse
from trainshort.ops.evicted import NOTHING, EvictedKeys
from trainshort.ops.norms import row_norms
from trainshort.ops.problem import BLOCK, make_problem
from trainshort.ops.ring_step import RingStep, lengths_above, products
from trainshort.ops.rings import Rings, Span

FIRST_CAPACITY = 256  # keys of a ring at the start; they double until a head has what it needs
SETTLE = 1024  # tokens after which a cache decides what its heads need; before, it keeps everything
CLOSE = 2.0  # nats: certificates that hold by less ask for larger rings


class BoundedKeys(ABC):
    """Of `batch_size` rows. How many tokens there are is the caller's to know; `place` counts them on the device."""

    def __init__(
        self, config: ModelConfig, sizes: RingSizes, padding: Tensor | None, *, dtype: torch.dtype, has_gates: bool
    ) -> None:
        """padding: int64 [B], leading tokens of each row that are none."""
        self.config, self.sizes, self.padding = config, sizes, padding
        self.device, self.dtype = sizes.query_norm.device, dtype
        self.group = config.num_heads // config.kv_heads
        self.levels = self.group if has_gates else 0  # numbers that each key keeps of gates
        self.tolerance = sizes.tolerance  # as much again is for keys that are there and not visited
        self.most_padding = 0 if padding is None else int(padding.max())
        layers, batch, kv_heads = config.num_layers, sizes.query_norm.shape[1], config.kv_heads
        wide = self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        with torch.inference_mode(False):  # these may be written to in other modes than the one they are made in
            like = torch.empty((batch, config.width), dtype=dtype, device=self.device)
            at_first = [FIRST_CAPACITY] * kv_heads
            self.rings = [Rings(like, at_first, [0] * kv_heads, self.levels) for _ in range(layers)]
            self.place = torch.zeros(1, dtype=torch.int64, device=self.device)
            by_key, by_query = (layers, batch, kv_heads), (layers, batch, config.num_heads)
            double: dict[str, Any] = {"dtype": torch.float64, "device": self.device}
            single: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
            self.center = torch.zeros((*by_key, config.width), dtype=wide, device=self.device)
            self.center_norm = torch.zeros(by_key, **double)
            self.longest = torch.zeros(by_key, **single)  # of ‖k - center‖
            self.excess = torch.full(by_query, -math.inf, **double)  # of certificates, in nats: above 0 they fail
            # Of the token at work, by layer:
            self.step_norm = torch.zeros(by_query, **single)
            self.step_lse = torch.zeros(by_query, dtype=wide, device=self.device)
            self.step_evicted = torch.zeros(by_key, **single)
            self.evicted = EvictedKeys(layers, batch, config.num_heads, self.device)
        self.targets: list[list[int] | None] = [None] * layers  # keys that heads are to have; None: not settled
        self.stepping = False
        self.lay_out()

    def lay_out(self) -> None:
        """After rings have changed: where they lie, as tensors."""
        with torch.inference_mode(False):
            self.capacity_of, self.first_of, self.offset_of = (
                torch.tensor([getattr(rings, name) for rings in self.rings], dtype=torch.int64, device=self.device)
                for name in ("capacities", "first", "offsets")
            )  # int64 [L, Hkv]
        self.full_at = 2**62  # the length at which a ring that may become larger is full
        for rings, targets in zip(self.rings, self.targets, strict=True):
            for head, capacity in enumerate(rings.capacities):
                if targets is None or capacity < targets[head]:
                    self.full_at = min(self.full_at, rings.first[head] + capacity)

    def tensors(self) -> list[Tensor]:
        """All that is kept from token to token."""
        kept = [self.place, self.center, self.center_norm, self.longest, self.excess, self.step_norm, self.step_lse]
        kept += [self.step_evicted, self.evicted.table, self.evicted.end, self.sizes.query_norm, self.sizes.demand]
        return kept + [buffer for rings in self.rings for buffer in rings.buffers().values()]

    def wanted(self) -> list[list[int]]:
        """By layer and key head: the most keys that a ring may come to hold, as far as that is known."""
        both = zip(self.rings, self.targets, strict=True)
        return [rings.capacities if targets is None else targets for rings, targets in both]

    # How keys fade.

    @abstractmethod
    def attend_one(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, bias: Bias, scale: float, length: int, replayed: bool
    ) -> Tensor:
        """One token: q [B, H, D]; k, v [B, Hkv, D]; length: tokens before. replayed: by kernels that count too."""

    @abstractmethod
    def _step_fading(self) -> tuple[Tensor, Tensor]:
        """Of the token at work in all layers: the penalty of the key that it evicts, [L, B, H], infinite where there
        is none, and by how much it lets all keys before it fade, [H] or [L, B, H]."""

    @abstractmethod
    def _piece_bias(self, span: Span, bias: Bias, tokens: int) -> Bias:
        """The bias of a span whose last tokens are those of a piece; bias: what the caller gave for the piece."""

    @abstractmethod
    def _further(self, layer: int, bias: Bias, tokens: int) -> Tensor:
        """By how much what was evicted before a piece has faded for each of its tokens, [H, T] or [B, H, T]."""

    @abstractmethod
    def _penalty(self, layer: int, span: Span, end: int) -> Tensor:
        """Of the keys of a span after `end` tokens, [B or 1, heads, N]: infinite for padding."""

    @abstractmethod
    def _sizes_at_first(self, layer: int, spans: Sequence[Span], longest: Tensor) -> list[int]:
        """Keys to keep by key head, when of queries nothing is known but norms."""

    @abstractmethod
    def _sizes_later(self, layer: int, spans: Sequence[Span] | None, longest: Tensor, length: int) -> list[int]:
        """The same later on. spans: what there is besides rings, after a piece."""

    def _piece_levels(self, bias: Bias) -> Tensor | None:
        """What the keys of a piece keep of its gates, [B, Hkv, T, G]."""
        return None

    def _end_piece(self, layer: int, spans: Sequence[Span], bias: Bias) -> None:
        """After a piece was certified, and before anything of it is stored."""
        return

    # One token.

    def _step(self, layer: int, scale: float, slopes: Tensor) -> RingStep:
        self.stepping = True
        return RingStep(
            rings=self.rings[layer],
            slopes=slopes,
            scale=scale,
            tolerance=self.tolerance,
            place=self.place,
            capacity=self.capacity_of[layer],
            first=self.first_of[layer],
            offset=self.offset_of[layer],
            center=self.center[layer],
            longest=self.longest[layer],
            before=self.step_evicted[layer],
            x=self.step_norm[layer],
            lse=self.step_lse[layer],
            padding=self.padding,
            most_padding=self.most_padding,
        )

    def finish_step(self) -> None:
        """Tables and certificates of one token, in all layers."""
        self.stepping = False
        self.evicted.step(self._by_query(self.step_evicted), *self._step_fading())
        capacity = self._by_query(self.capacity_of[:, None])  # [L, 1, H]
        longest = self._by_query(self.longest)
        x, lse = self.step_norm.double(), self.step_lse.double()
        bound = self.evicted.at(x[..., None], longest)[..., 0]
        excess = bound - lse + self._slack(x, lse, longest, self._by_query(self.center_norm), capacity)
        self._record(slice(None), excess - math.log(self.tolerance), bound, lse)
        torch.maximum(self.sizes.query_norm, x, out=self.sizes.query_norm)
        if self.targets[0] is not None:  # before, nothing was taken from keys: they are longer than they will be
            torch.maximum(self.sizes.demand, x * longest - lse, out=self.sizes.demand)

    # Pieces of a text.

    def attend_piece(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, bias: Bias, scale: float, length: int
    ) -> Tensor:
        """All keys that are there and those of the piece stay until all of its queries are done."""
        if self.padding is not None and length < self.most_padding:  # what padding holds is never multiplied
            index = torch.arange(length, length + k.shape[2], device=self.device)
            hidden = (index < self.padding[:, None])[:, None, :, None]
            k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
        norms = lengths_above(k - self.center[layer, :, :, None])
        piece = Span(slice(0, k.shape[1]), length, k, v, norms, self._piece_levels(bias))
        spans = self._with_piece(layer, piece)
        outs, sums = [], []
        for span in spans:
            problem = make_problem(
                q[:, self._query_heads(span)],
                span.keys,
                span.values,
                self._piece_bias(span, bias, k.shape[2]),
                scale=scale,
                tolerance=self.tolerance,
                key_padding_mask=self._real(span.low, span.keys.shape[2]),
            )
            out, lse = attend_with_lse(problem)
            outs.append(out)
            sums.append(lse)
        torch.maximum(self.longest[layer], norms.amax(-1), out=self.longest[layer])
        further = self._further(layer, bias, k.shape[2])
        most_keys = max(span.keys.shape[2] for span in spans)
        self._certify_piece(layer, q, torch.cat(sums, 1).double(), further, scale, most_keys, length)
        self.evicted.fade(layer, further[..., -1])
        self._end_piece(layer, spans, bias)
        self._keep(layer, spans, tokens=k.shape[2])
        if layer == self.config.num_layers - 1:
            self.lay_out()
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _real(self, low: int, count: int) -> Tensor | None:
        """Which of so many keys from `low` on are no padding: bool [B, count], or None for all."""
        if self.padding is None or low >= self.most_padding:
            return None
        return torch.arange(low, low + count, device=self.device) >= self.padding[:, None]

    def _with_piece(self, layer: int, piece: Span) -> list[Span]:
        """All keys that are there, and behind them those of the piece."""
        if piece.low == 0:
            return [piece]
        spans = []
        for run in self.rings[layer].runs:
            held, new = self.rings[layer].span(run, piece.low), piece.part(run.heads).tensors()
            joined = {name: torch.cat((rows, new[name]), 2) for name, rows in held.tensors().items()}
            spans.append(Span(run.heads, held.low, **joined))
        return spans

    def _certify_piece(
        self, layer: int, q: Tensor, lse: Tensor, further: Tensor, scale: float, most_keys: int, length: int
    ) -> None:
        """Against what was evicted before the piece. lse: [B, H, T], of up to so many keys."""
        tokens = q.shape[2]
        x = lengths_above(q).double() * abs(scale)
        lse = lse - products(q, self.center[layer]).double() * scale
        longest = self._by_query(self.longest[layer])
        bound = self.evicted.at(x, longest, layer)
        center_norm = self._by_query(self.center_norm[layer])[..., None]
        keys = torch.full((), most_keys, device=self.device)
        excess = bound - further - lse + self._slack(x, lse, longest[..., None], center_norm, keys)
        real = self._real(length, tokens)
        demand = x * longest[..., None] - lse
        if real is not None:
            lse, x = (torch.where(real[:, None], each, 0.0) for each in (lse, x))
            excess, demand = (torch.where(real[:, None], each, -math.inf) for each in (excess, demand))
        self._record(slice(layer, layer + 1), excess[None] - math.log(self.tolerance), bound[None], lse[None])
        self.sizes.query_norm[layer] = torch.maximum(self.sizes.query_norm[layer], x.amax(-1))
        if self.targets[layer] is not None:
            self.sizes.demand[layer] = torch.maximum(self.sizes.demand[layer], demand.amax(-1))

    def _record(self, layers: slice, excess: Tensor, bound: Tensor, lse: Tensor) -> None:
        """Keep the largest excess of each head. One that rests on a sum that is no number counts as failed."""
        excess = torch.where(torch.isfinite(lse), excess, math.nan)
        excess = torch.where(bound < NOTHING / 2, -math.inf, excess)  # nothing was evicted
        if excess.dim() == 4:
            excess = excess.amax(-1)
        self.excess[layers] = torch.maximum(self.excess[layers], excess)

    def _slack(self, x: Tensor, lse: Tensor, longest: Tensor, center_norm: Tensor, keys: Tensor) -> Tensor:
        """How much too large a log-sum-exp may be: its scores, its sum and its shift are rounded."""
        of_scores = 4 * (self.config.width + 8) * 2.0**-23 + _coarse_products(self.dtype)
        return of_scores * x * (longest + 2.0 * center_norm) + 2.0**-20 * (lse.abs() + 1.0) + 2.0**-23 * keys

    # What stays and what goes.

    def make_room(self, length: int, steps: int) -> None:
        """Let nothing move in so many steps of one token."""
        if length + steps > self.full_at:
            for layer, rings in enumerate(self.rings):
                self._keep(layer, [rings.span(run, length) for run in rings.runs], ahead=steps)
            self.lay_out()

    def adapt(self, length: int) -> None:
        """Between steps: let rings become larger whose certificates come close to failing, and make those shorter
        that need no longer be so long. The former move once they are full, the latter now."""
        settled = [layer for layer, sizes in enumerate(self.targets) if sizes is not None]
        changed = [layer for layer in settled if self._adapt_layer(layer, length)]
        for layer in changed:
            rings, wanted = self.rings[layer], self.wanted()[layer]
            if any(now > most for now, most in zip(rings.capacities, wanted, strict=True)):
                self._keep(layer, [rings.span(run, length) for run in rings.runs])
        if changed:
            self.lay_out()

    def _keep(self, layer: int, spans: Sequence[Span], *, tokens: int = 0, ahead: int = 0) -> None:
        """Store what spans hold, evict what has no place, and make rings larger or settle on their sizes where due.

        tokens: how many of the last ones are new. ahead: tokens to make room for besides.
        """
        rings = self.rings[layer]
        end = spans[0].low + spans[0].keys.shape[2]
        settles = self.targets[layer] is None and end + ahead > SETTLE
        if settles:
            self._settle(layer, spans)
        elif self.targets[layer] is not None and tokens:
            self._adapt_layer(layer, end - tokens, spans)
        lows = [span.low for span in spans for _ in range(span.heads.stop - span.heads.start)]
        capacities = [self._capacity(layer, head, end + ahead - low) for head, low in enumerate(lows)]
        kept = [max(low, end - capacity) for low, capacity in zip(lows, capacities, strict=True)]
        # Norms are others after settling, and levels after a piece.
        fresh = settles or capacities != rings.capacities or bool(self.levels and tokens)
        if fresh:
            self.rings[layer] = rings = Rings(spans[0].keys, capacities, kept, self.levels)
        for span in spans:
            own = range(span.heads.start, span.heads.stop)
            for _, alike in groupby(own, key=lambda head: (capacities[head], kept[head])):
                heads = list(alike)
                part = span.part(slice(heads[0], heads[-1] + 1))
                gone = kept[heads[0]] - span.low
                if gone > 0:
                    self._evict(layer, part.first(gone), end)
                rings.store(part.after(gone if fresh else max(gone, end - tokens - span.low)))

    def _evict(self, layer: int, span: Span, end: int) -> None:
        """Let tables stand for keys from now on; `end` tokens are there."""
        norms = span.norms.repeat_interleave(self.group, 1)
        self.evicted.add(layer, self._query_heads(span), norms, self._penalty(layer, span, end))

    def _capacity(self, layer: int, head: int, needed: int) -> int:
        """Slots of a ring that has to hold so many keys, if its head wants as many: they double up to that."""
        now, targets = self.rings[layer].capacities[head], self.targets[layer]
        most = SETTLE if targets is None else targets[head]
        if needed <= now <= most:
            return now
        return min(most, max(2 * now if needed > now else now, -(-needed // BLOCK) * BLOCK))

    def _settle(self, layer: int, spans: Sequence[Span]) -> None:
        """Choose a centre and the sizes of the rings, from all keys so far."""
        for span in spans:
            real = self._real(span.low, span.keys.shape[2])
            # A bound of norms that is known says nothing of differences.
            known = self.sizes.key_norm is not None
            center = torch.zeros_like(span.keys[:, :, 0]) if known else _center(span.keys, real)
            self.center[layer, :, span.heads] = center
            span.norms = lengths_above(span.keys - center[:, :, None])
            norms = span.norms if real is None else span.norms.masked_fill(~real[:, None], 0.0)
            self.longest[layer, :, span.heads] = norms.amax(-1)
        self.center_norm[layer] = lengths_above(self.center[layer]).double()
        longest = self._by_query(self.longest[layer])
        self.evicted.stretch(layer, (2.0 * self.sizes.query_norm[layer]).clamp_min(2.0**-20), longest)
        if self.sizes.key_norm is not None:
            self._expect_the_worst(layer, self.sizes.query_norm[layer], self.sizes.key_norm[layer])
        self.targets[layer] = self._sizes_at_first(layer, spans, longest)

    def _expect_the_worst(self, layer: int, x: Tensor, key_norm: Tensor) -> None:
        """Where norms have bounds: a query's own key has not faded, so its log-sum-exp is at least -x‖k‖."""
        keys = torch.full((), 2.0**21, device=self.device)  # of a sum
        lse = x * key_norm + math.log(2.0**21)
        slack = self._slack(x, lse, key_norm, torch.zeros_like(x), keys)
        self.sizes.expect_demand(layer, 2.0 * x * key_norm + slack)

    def _adapt_layer(self, layer: int, length: int, spans: Sequence[Span] | None = None) -> bool:
        """Whether rings of a layer should have other sizes from now on."""
        targets, longest = self.targets[layer], self._by_query(self.longest[layer])
        self.targets[layer] = self._sizes_later(layer, spans, longest, length)
        if self.targets[layer] == targets:
            return False
        end = torch.maximum(self.evicted.end[layer], 2.0 * self.sizes.query_norm[layer])
        self.evicted.stretch(layer, end, longest)
        return True

    def _query_heads(self, span: Span) -> slice:
        return slice(span.heads.start * self.group, span.heads.stop * self.group)

    def _by_query(self, by_key: Tensor) -> Tensor:
        """[..., Hkv] -> [..., H]."""
        return by_key if self.group == 1 else by_key[..., None].expand(*by_key.shape, self.group).flatten(-2)


def _center(keys: Tensor, real: Tensor | None) -> Tensor:
    """A vector to take from every key, [B, heads, D]: their mean, where that makes them shorter."""
    rows = keys.float() if keys.dtype != torch.float64 else keys
    count = torch.full((), rows.shape[2], device=keys.device) if real is None else real.sum(-1)[:, None, None]
    mean = rows.sum(2) / count.clamp_min(1)  # padding is stored as zeros
    apart = row_norms(rows - mean[:, :, None])
    if real is not None:
        apart = apart.masked_fill(~real[:, None], 0.0)
    shorter = apart.sum(-1) < 0.9 * row_norms(rows).sum(-1)
    return torch.where(shorter[..., None] & torch.isfinite(mean), mean, 0.0)


def _coarse_products(dtype: torch.dtype) -> float:
    """Rounding of matrix products beyond float32's, relative, where torch's settings allow for it."""
    settings = [place.matmul.fp32_precision for place in (torch.backends.mkldnn, torch.backends.cuda)]
    coarse = dtype in (torch.float32, torch.float16) and not {"tf32", "bf16"}.isdisjoint(settings)
    return 2.0**-6 if coarse else 0.0  # bfloat16 is multiplied as it is
