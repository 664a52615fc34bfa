"""A cache for texts without end, in memory that does not grow with them, and with a proof for what it forgets.

Each key head keeps its last keys in a ring (ops/rings.py), as many as can still matter for queries somewhat longer
than any so far. Of those evicted a bound remains of all that they could weigh (ops/evicted.py). So every query of
every layer has a certificate: if the evicted keys could have held more than half of the tolerance (the other half is
for keys that are there and skipped), the text is run again from its first token with larger rings. How large rings
are is a guess; that nothing was lost is not. The proof is in docs/attention.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from trainshort.models.cache import KeyValueCache
from trainshort.models.config import ModelConfig
from trainshort.ops import ring_step
from trainshort.ops.bias import Bias, LinearBias
from trainshort.ops.dispatch import INTERPRETED, attend_with_lse, backend_for
from trainshort.ops.evicted import NOTHING, EvictedKeys
from trainshort.ops.norms import row_norms
from trainshort.ops.problem import BLOCK, DEFAULT_TOLERANCE, make_problem
from trainshort.ops.ring_step import Lines, RingStep, lengths_above, products
from trainshort.ops.rings import Rings, Span
from trainshort.ops.tracing import is_recording
from trainshort.positions import build_position

FIRST_CAPACITY = 256  # keys of a ring at the start; they double until a head has what it needs
SETTLE = 1024  # tokens after which a cache decides what its heads need; before, it keeps everything
ADAPT = 64  # tokens between two looks at what was needed
MARGIN = 1.5  # rings are made for queries so many times as long as any before
LEAST_MARGIN = 1.2  # and made larger once they would not do for queries so many times as long
PIECE = {"cpu": 2048, "cuda": 16384}  # tokens of a text that are computed at once when it is run again
CLOSE = 2.0  # nats: certificates that hold by less ask for larger rings
TEXT_GROWTH = 2**18  # tokens: the text's buffer doubles up to here, then grows by as much

Compute = Callable[[Tensor], Tensor]  # tokens [B, T] -> hidden states, through `attend` of every layer


class BoundedCacheError(RuntimeError):
    """Evicted keys may have held more than the tolerance, and the text could not or should not be run again."""


@dataclass(frozen=True)
class CacheReport:
    """What a bounded cache holds. Printed, it is a short text."""

    tokens: int
    nbytes: int  # rings, tables and what belongs to them
    text_bytes: int  # the token ids, 4 bytes each, kept so that the text can be run again
    full_bytes: int  # keys and values of a cache that holds everything
    keys_held: int
    share_of_keys: float
    evictions: int
    reruns: int
    capacities: list[list[int]]  # by layer and key head: the most keys that a ring may come to hold

    def __str__(self) -> str:
        longest = max(map(max, self.capacities))
        return "\n".join(
            (
                f"{self.tokens:,} tokens in {self.nbytes:,} bytes, and {self.text_bytes:,} of token ids; "
                f"a full cache: {self.full_bytes:,}",
                f"keys held: {self.keys_held:,} ({self.share_of_keys:.2%}), evicted: {self.evictions:,}",
                f"the longest ring: {longest:,} keys; reruns: {self.reruns}",
            )
        )


class BoundedCache(KeyValueCache):
    """What `KeyValueCache(..., bounded=True)` makes.

    tolerance: the largest softmax mass that a query may lose; None: that of attention for this dtype.
    on_failure: "rerun" runs the text again where a certificate fails, "raise" raises a BoundedCacheError.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        capacity: int | None = None,
        *,
        bounded: bool = True,
        tolerance: float | None = None,
        on_failure: str = "rerun",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        self.tolerance = _checked_tolerance(tolerance, dtype)
        _check_options(config, batch_size, capacity, on_failure, bounded)
        self.config, self.batch_size, self.on_failure, self.dtype = config, batch_size, on_failure, dtype
        self.device = torch.device(torch.get_default_device() if device is None else device)
        if self.device.type == "mps":
            raise ValueError("a bounded cache needs float64 for its tables, which mps lacks: use a full cache there")
        self.growing = True
        self.padding: Tensor | None = None
        self.most_padding = 0
        self.reruns = 0
        self.margin = MARGIN
        self.deferred = False  # certificates are looked at later, by the caller
        self.slopes: Tensor | None = None  # float64 [H], on the device, from the first call on
        layers, kv_heads = config.num_layers, config.kv_heads
        self.least = [[BLOCK] * kv_heads for _ in range(layers)]
        shape = (layers, batch_size, config.num_heads)
        options: dict[str, Any] = {"dtype": torch.float64, "device": self.device}
        self.query_norm = torch.zeros(shape, **options)  # the largest |scale| ‖q‖ so far
        self.demand = torch.full(shape, -math.inf, **options)  # the largest x longest - log-sum-exp so far
        self.text = torch.zeros((batch_size, 0), dtype=torch.int32, device=self.device)
        self.remembered = 0  # tokens of it that were computed and certified
        self.sequences = None
        self._clear()

    def _clear(self) -> None:
        """Hold nothing. What was learned of the sizes of queries stays."""
        config, batch = self.config, self.batch_size
        layers, kv_heads = config.num_layers, config.kv_heads
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        like = torch.empty((batch, config.width), dtype=self.dtype, device=self.device)
        with torch.inference_mode(False):
            self.length = 0
            self.place = torch.zeros(1, dtype=torch.int64, device=self.device)  # `length`, for captured graphs
            self.rings = [Rings(like, [FIRST_CAPACITY] * kv_heads, [0] * kv_heads) for _ in range(layers)]
            self.targets: list[list[int] | None] = [None] * layers  # None: not settled
            self.center = torch.zeros((layers, batch, kv_heads, config.width), dtype=dtype, device=self.device)
            options: dict[str, Any] = {"dtype": torch.float64, "device": self.device}
            self.center_norm = torch.zeros((layers, batch, kv_heads), **options)
            single: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
            self.longest = torch.zeros((layers, batch, kv_heads), **single)  # of ‖k - center‖
            shape = (layers, batch, config.num_heads)
            self.excess = torch.full(shape, -math.inf, **options)  # of certificates, in nats: above 0 they fail
            # Of the token at work, by layer:
            self.step_norm = torch.zeros(shape, **single)
            self.step_lse = torch.zeros(shape, dtype=dtype, device=self.device)
            self.step_evicted = torch.zeros((layers, batch, kv_heads), **single)
        self.stepping = False
        self.whole = True  # no call was left halfway, and no certificate failed
        self.adapted = 0
        self.evicted: EvictedKeys | None = None
        self.lines: Lines | None = None
        if self.slopes is not None:
            self._prepare_tables(self.slopes)
        self._laid_out()

    def _laid_out(self) -> None:
        """Where rings lie, as tensors."""
        with torch.inference_mode(False):
            for name, lists in (
                ("capacity_of", [rings.capacities for rings in self.rings]),
                ("first_of", [rings.first for rings in self.rings]),
                ("offset_of", [rings.offsets for rings in self.rings]),
            ):
                setattr(self, name, torch.tensor(lists, dtype=torch.int64, device=self.device))
        self.full_at = 2**62  # the length at which a ring that may grow is full
        for rings, targets in zip(self.rings, self.targets, strict=True):
            for head, capacity in enumerate(rings.capacities):
                if targets is None or capacity < targets[head]:
                    self.full_at = min(self.full_at, rings.first[head] + capacity)
        self.capacity = min(self.full_at, self.text.shape[1])  # up to here every step is like the one before
        self.keys = [rings.keys for rings in self.rings]
        self.values = [rings.values for rings in self.rings]
        if self.lines is not None:
            self.lines.forget()

    capacity_of: Tensor  # int64 [L, Hkv]
    first_of: Tensor
    offset_of: Tensor

    def _prepare_tables(self, slopes: Tensor) -> None:
        with torch.inference_mode(False):
            self.evicted = EvictedKeys(self.config.num_layers, self.batch_size, slopes)
            self.kernel_slopes = slopes.float()
            self.lines = Lines(slopes, self.config.kv_heads, self.center.dtype)

    # What the model calls.

    def feed(self, tokens: Tensor, compute: Compute) -> Tensor:
        """Compute tokens [B, T] that go on after those here. Where certificates fail, the whole text is run again."""
        if self.deferred:
            self.reserve(tokens.shape[1])
            return self._computed(tokens, compute)
        out = None
        if self.whole:
            out = self._certified(tokens, compute)
            if out is None and self.on_failure == "raise":
                self._enlarge()
                raise BoundedCacheError(
                    f"after {self.remembered} tokens evicted keys could hold more than {self.tolerance:.1e} of a "
                    "query's softmax mass: feed these tokens again and the text is run again with more memory, or "
                    "make the cache with on_failure='rerun'"
                )
            if out is None:
                self._enlarge()
        while out is None:
            out = self._again(tokens, compute)
            if out is None:
                self._enlarge()
        self.remembered = self.length
        return out

    def _computed(self, tokens: Tensor, compute: Compute) -> Tensor:
        self._write(tokens)
        out = compute(tokens)
        self.advance(tokens.shape[1])
        return out

    def _certified(self, tokens: Tensor, compute: Compute) -> Tensor | None:
        """Hidden states, or None where a certificate fails."""
        self.whole = False
        self.reserve(tokens.shape[1])
        out = self._computed(tokens, compute)
        self.whole = not self.failed()
        if self.whole and tokens.shape[1] > 1:
            self.excess.fill_(-math.inf)  # from here on it tells of what comes next
        return out if self.whole else None

    def _again(self, tokens: Tensor, compute: Compute) -> Tensor | None:
        """The whole text, from its first token: a layer's keys depend on all tokens that the layers below saw."""
        self.reruns += 1
        self._clear()
        size = PIECE.get(self.device.type, 2048)
        for part in self.text[:, : self.remembered].to(tokens.dtype).split(size, dim=1):
            if part.shape[1] and self._certified(part, compute) is None:
                return None
        return self._certified(tokens, compute)

    def _enlarge(self) -> None:
        """After a failure: the heads it was in keep twice as many keys, and all of them expect longer queries."""
        failed = ~(self.excess <= 0.0)  # NaN fails
        if bool(torch.isnan(self.excess).any()) or not bool(torch.isfinite(self.longest).all()):
            raise BoundedCacheError(
                "queries, keys or scores are not finite (NaN or infinite), which no certificate covers: "
                "use a full cache to see where they come from"
            )
        heads = failed.unflatten(2, (self.config.kv_heads, -1)).any(-1).any(1).tolist()  # [L][Hkv]
        for layer, row in enumerate(heads):
            targets = self.targets[layer]
            for head, bad in enumerate(row):
                if bad and targets is not None:
                    self.least[layer][head] = 2 * targets[head]
        self.margin = 1.0 + 2.0 * (self.margin - 1.0)

    def failed(self) -> bool:
        """Whether a certificate failed since the text was last run from its first token. Waits for a GPU."""
        return not bool((self.failure_flag() <= 0.0).item())

    def failure_flag(self) -> Tensor:
        """The largest excess of all certificates so far, in nats, on the device: above 0, or NaN, one failed."""
        return self.excess.amax()

    def _write(self, tokens: Tensor) -> None:
        """Keep the ids of the next tokens, for running the text again."""
        if tokens.shape[1] == 1:
            self.text.index_copy_(1, self.place, tokens.to(torch.int32))  # in captured graphs too
        else:
            self.text[:, self.length : self.length + tokens.shape[1]] = tokens

    def _reserve_text(self, end: int) -> None:
        if end <= self.text.shape[1]:
            return
        size = max(FIRST_CAPACITY, self.text.shape[1])
        while size < end:
            size += min(size, TEXT_GROWTH)
        with torch.inference_mode(False):
            text = torch.zeros((self.batch_size, size), dtype=torch.int32, device=self.device)
        text[:, : self.text.shape[1]] = self.text
        self.text, self.capacity = text, min(self.full_at, size)

    def rollback(self, tokens: int = 0) -> None:
        """Forget all but the text, and of that the last tokens: the next call runs the rest again before its own.

        For callers that look at certificates only after several steps.
        """
        there = self.length if self.deferred else self.remembered
        if not 0 <= tokens <= there:
            raise ValueError(f"rollback takes back at most the {there} tokens there are, got {tokens}")
        if self.failed():
            self._enlarge()
        self.remembered = there - tokens
        self.deferred = self.whole = False

    # One token after another, at a place that the device knows: see KeyValueCache. Nobody looks at certificates until
    # the caller reads `failure_flag`, and tells by `heed` what it says, or goes back with `rollback`.

    def begin_steps(self) -> None:
        self.deferred = True

    def end_steps(self) -> None:
        if self.deferred and self.failed():
            self.rollback()
        elif self.deferred:
            self.deferred, self.remembered = False, self.length

    def heed(self, excess: float) -> bool:
        """Whether certificates hold, by what was read of `failure_flag`. If barely, rings should soon be larger."""
        if excess > -CLOSE:
            self.capacity = min(self.capacity, self.adapted + ADAPT)
        return excess <= 0.0

    def reserve(self, tokens: int) -> None:
        """Make room for so many steps of one token, in which all stays where it is; or for the text of a piece."""
        end = self.length + tokens
        self._reserve_text(end)
        if not self.deferred and tokens != 1:
            return
        if end > self.adapted + ADAPT and (end > self.capacity or not self.deferred):
            self.adapted = end
            self._adapt()
        if end > self.full_at:
            for layer, rings in enumerate(self.rings):
                self._keep(layer, [rings.span(run, self.length) for run in rings.runs], tokens)
            self._laid_out()

    def pad_left(self, key_padding_mask: Tensor) -> None:
        super().pad_left(key_padding_mask)
        assert self.padding is not None
        self.most_padding = int(self.padding.max())

    def positions(self, tokens: int) -> Tensor:
        index = self.place + torch.arange(tokens, device=self.device)
        return index[None] if self.padding is None else (index - self.padding[:, None]).clamp_min(0)

    def advance(self, tokens: int) -> None:
        if self.stepping:
            self._finish_step()
        self.place += tokens
        self.length += tokens

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        raise TypeError("a bounded cache holds no keys in one piece: call attend")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, bias: Bias | None, scale: float) -> Tensor:
        if is_recording(q, k, v):
            raise RuntimeError("a bounded cache is forward only: call the model under torch.no_grad()")
        self._check_bias(bias)
        dtype = q.dtype
        if q.shape[2] == 0:
            return q
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            q, k, v = q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)
            if q.shape[2] == 1:
                return self._attend_one(layer, q[:, :, 0], k[:, :, 0], v[:, :, 0], scale)[:, :, None].to(dtype)
            assert isinstance(bias, LinearBias)
            return self._attend_piece(layer, q, k, v, bias, scale).to(dtype)

    def _check_bias(self, bias: Bias | None) -> None:
        """Slopes are read once: what was proved with others would be void."""
        if not isinstance(bias, LinearBias) or bias.slopes.dim() != 1 or not bias.is_causal_only:
            raise TypeError(f"a bounded cache needs a causal LinearBias with slopes [heads], got {bias!r}")
        slopes = bias.slopes.detach()
        if self.slopes is None:
            self.slopes = slopes.to(self.device, torch.float64, copy=True)
            self._prepare_tables(self.slopes)
        elif self.device.type == "cpu" and not torch.equal(self.slopes, slopes.double()):
            raise ValueError("slopes changed while a bounded cache lives: make a new cache for the new slopes")

    # One token.

    def _attend_one(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q: [B, H, D]; k, v: [B, Hkv, D]. The certificate follows in `_finish_step`, for all layers at once."""
        assert self.lines is not None
        assert self.slopes is not None
        self.stepping = True
        step = RingStep(
            rings=self.rings[layer],
            slopes=self.kernel_slopes,
            scale=scale,
            tolerance=self.tolerance / 2,
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
        if backend_for(q) == "triton" or (self.deferred and INTERPRETED):
            from trainshort.ops.triton import ring_step as kernels

            return kernels.attend(q, k, v, step)
        return ring_step.attend(q, k, v, step, self.length, self.lines)

    def _finish_step(self) -> None:
        """Tables and certificates of one token, in all layers."""
        assert self.evicted is not None
        self.stepping = False
        capacity = self.capacity_of[:, None]  # [L, 1, Hkv]
        left = self.place - capacity  # the key that lay in the new one's slot
        gone = left >= self.first_of[:, None]
        if self.padding is not None:
            gone = gone & (left >= self.padding[:, None])
        gone = gone.expand_as(self.step_evicted)
        gone, capacity = self._by_query(gone), self._by_query(capacity)
        self.evicted.step(self._by_query(self.step_evicted), gone, capacity)
        longest = self._by_query(self.longest)
        x, lse = self.step_norm.double(), self.step_lse.double()
        bound = self.evicted.at(x[..., None], longest)[..., 0]
        excess = bound - lse + self._slack(x, lse, longest, self._by_query(self.center_norm), capacity)
        self._record(slice(None), excess - math.log(self.tolerance / 2), bound, lse)
        torch.maximum(self.query_norm, x, out=self.query_norm)
        if self.targets[0] is not None:  # before, nothing was taken from keys: they are longer than they will be
            torch.maximum(self.demand, x * longest - lse, out=self.demand)

    # Pieces of a text.

    def _attend_piece(self, layer: int, q: Tensor, k: Tensor, v: Tensor, bias: LinearBias, scale: float) -> Tensor:
        """All keys that are there and those of the piece stay until all of its queries are done."""
        if self.padding is not None and self.length < self.most_padding:  # what padding holds is never multiplied
            index = torch.arange(self.length, self.length + k.shape[2], device=self.device)
            hidden = (index < self.padding[:, None])[:, None, :, None]
            k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
        norms = lengths_above(k - self.center[layer, :, :, None])
        spans = self._with_piece(layer, k, v, norms)
        group = q.shape[1] // k.shape[1]
        outs, sums = [], []
        for span in spans:
            heads = slice(span.heads.start * group, span.heads.stop * group)
            problem = make_problem(
                q[:, heads],
                span.keys,
                span.values,
                bias.part(slice(None), heads),
                scale=scale,
                tolerance=self.tolerance / 2,
                key_padding_mask=self._real(span.low, span.keys.shape[2]),
            )
            out, lse = attend_with_lse(problem)
            outs.append(out)
            sums.append(lse)
        torch.maximum(self.longest[layer], norms.amax(-1), out=self.longest[layer])
        self._certify_piece(layer, q, torch.cat(sums, 1).double(), scale)
        self._keep(layer, spans, 0, k.shape[2])
        if layer == self.config.num_layers - 1:
            self._laid_out()
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _real(self, low: int, count: int) -> Tensor | None:
        """Which of so many keys from `low` on are no padding: bool [B, count], or None for all."""
        if self.padding is None or low >= self.most_padding:
            return None
        return torch.arange(low, low + count, device=self.device) >= self.padding[:, None]

    def _with_piece(self, layer: int, k: Tensor, v: Tensor, norms: Tensor) -> list[Span]:
        """All keys that are there, and behind them those of the piece."""
        if self.length == 0:
            return [Span(slice(0, k.shape[1]), 0, k, v, norms)]
        spans = []
        for run in self.rings[layer].runs:
            span = self.rings[layer].span(run, self.length)
            span.keys = torch.cat((span.keys, k[:, run.heads]), 2)
            span.values = torch.cat((span.values, v[:, run.heads]), 2)
            span.norms = torch.cat((span.norms, norms[:, run.heads]), 2)
            spans.append(span)
        return spans

    def _certify_piece(self, layer: int, q: Tensor, lse: Tensor, scale: float) -> None:
        """Against what was evicted before the piece. lse: [B, H, T]."""
        assert self.evicted is not None
        assert self.slopes is not None
        tokens = q.shape[2]
        x = lengths_above(q).double() * abs(scale)
        lse = lse - products(q, self.center[layer]).double() * scale
        longest = self._by_query(self.longest[layer])
        further = self.slopes[:, None] * torch.arange(1, tokens + 1, dtype=torch.float64, device=self.device)
        bound = self.evicted.at(x, longest, layer)
        center_norm = self._by_query(self.center_norm[layer])[..., None]
        keys = torch.full((), self.length + tokens, device=self.device)
        excess = bound - further - lse + self._slack(x, lse, longest[..., None], center_norm, keys)
        real = self._real(self.length, tokens)
        demand = x * longest[..., None] - lse
        if real is not None:
            lse, x = (torch.where(real[:, None], each, 0.0) for each in (lse, x))
            excess, demand = (torch.where(real[:, None], each, -math.inf) for each in (excess, demand))
        self._record(slice(layer, layer + 1), excess[None] - math.log(self.tolerance / 2), bound[None], lse[None])
        self.query_norm[layer] = torch.maximum(self.query_norm[layer], x.amax(-1))
        if self.targets[layer] is not None:
            self.demand[layer] = torch.maximum(self.demand[layer], demand.amax(-1))

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

    # How many keys to keep: choices, not part of the proof.

    def _keep(self, layer: int, spans: Sequence[Span], ahead: int, tokens: int = 0) -> None:
        """Store what spans hold, evict what has no place, and make rings larger or settle on their sizes where due.

        tokens: how many of the last ones are new. ahead: tokens to make room for besides.
        """
        rings = self.rings[layer]
        end = spans[0].low + spans[0].keys.shape[2]
        if self.targets[layer] is None and end + ahead > SETTLE:
            self._settle(layer, spans)
        elif self.targets[layer] is not None and tokens:
            self._adapt_layer(layer)
        assert self.evicted is not None
        if tokens:
            self.evicted.fade(layer, tokens)
        lows = [span.low for span in spans for _ in range(span.heads.stop - span.heads.start)]
        capacities = [self._capacity(layer, head, end + ahead - low) for head, low in enumerate(lows)]
        kept = [max(low, end - capacity) for low, capacity in zip(lows, capacities, strict=True)]
        fresh = capacities != rings.capacities
        if fresh:
            self.rings[layer] = rings = Rings(spans[0].keys, capacities, kept)
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
        assert self.evicted is not None
        group = self.config.num_heads // self.config.kv_heads
        count = span.norms.shape[2]
        distance = (end - 1 - span.low) - torch.arange(count, dtype=torch.float64, device=self.device)
        heads = slice(span.heads.start * group, span.heads.stop * group)
        norms = span.norms.repeat_interleave(group, 1)
        self.evicted.add(layer, heads, norms, distance, self._real(span.low, count))

    def _capacity(self, layer: int, head: int, needed: int) -> int:
        """Slots of a ring that has to hold so many keys, if its head wants as many: they double up to that."""
        now, targets = self.rings[layer].capacities[head], self.targets[layer]
        most = SETTLE if targets is None else targets[head]
        if needed <= now <= most:
            return now
        return min(most, max(2 * now if needed > now else now, -(-needed // BLOCK) * BLOCK))

    def _settle(self, layer: int, spans: Sequence[Span]) -> None:
        """Choose a centre and the sizes of the rings, from all keys so far."""
        assert self.evicted is not None
        for span in spans:
            real = self._real(span.low, span.keys.shape[2])
            center = _center(span.keys, real)
            self.center[layer, :, span.heads] = center
            span.norms = lengths_above(span.keys - center[:, :, None])
            norms = span.norms if real is None else span.norms.masked_fill(~real[:, None], 0.0)
            self.longest[layer, :, span.heads] = norms.amax(-1)
        self.center_norm[layer] = lengths_above(self.center[layer]).double()
        # Before there was a centre, nothing was known but norms.
        longest = self._by_query(self.longest[layer])
        self.demand[layer] = torch.maximum(self.demand[layer], self.query_norm[layer] * longest)
        self.evicted.stretch(layer, (2.0 * self.query_norm[layer]).clamp_min(2.0**-20), longest)
        self.targets[layer] = [
            max(least, needed)
            for least, needed in zip(self.least[layer], self._needed(layer, self.margin), strict=True)
        ]

    def _adapt(self) -> None:
        """Between steps: make rings larger whose certificates come close to failing."""
        changed = [targets is not None and self._adapt_layer(layer) for layer, targets in enumerate(self.targets)]
        if any(changed):
            self._laid_out()
        self.capacity = min(self.full_at, self.text.shape[1])
        if not self.failed():
            self.excess.fill_(-math.inf)  # from here on it tells of what comes next

    def _adapt_layer(self, layer: int) -> bool:
        """Whether rings of a layer should be larger from now on."""
        targets = self.targets[layer]
        assert targets is not None
        assert self.evicted is not None
        near = (self.excess[layer] > -CLOSE).unflatten(1, (self.config.kv_heads, -1)).any(2).any(0).tolist()
        rings = self.rings[layer]
        close = [
            near[head] and capacity == targets[head] and self.length >= rings.first[head] + capacity
            for head, capacity in enumerate(rings.capacities)  # not those that have just become larger
        ]
        least, wanted = self._needed(layer, LEAST_MARGIN), self._needed(layer, self.margin)
        larger = [
            max(target, want if need > target else 0, -(-target * 5 // 4 // BLOCK) * BLOCK if grow else 0)
            for target, need, want, grow in zip(targets, least, wanted, close, strict=True)
        ]
        if larger == targets:
            return False
        self.targets[layer] = larger
        end = torch.maximum(self.evicted.end[layer], 2.0 * self.query_norm[layer])
        self.evicted.stretch(layer, end, self._by_query(self.longest[layer]))
        return True

    def _needed(self, layer: int, margin: float) -> list[int]:
        """Keys that each key head needs if queries come to be `margin` times as long as the longest so far.

        As in the proof of windows: W >= (x K - lse + ln(1/tolerance) - ln(1 - e^-m)) / m.
        """
        assert self.slopes is not None
        longest = self._by_query(self.longest[layer])
        nats = self.demand[layer] + (margin - 1.0) * self.query_norm[layer] * longest
        series = -torch.log(-torch.expm1(-self.slopes))
        nats = nats + series - math.log(self.tolerance / 2) + 0.01
        keys = (nats / self.slopes).clamp_min(1.0).unflatten(1, (self.config.kv_heads, -1)).amax((0, 2))
        counts: list[float] = keys.tolist()
        if not all(math.isfinite(count) for count in counts):
            raise BoundedCacheError(
                f"layer {layer} has queries or keys that are not finite (NaN or infinite), which no certificate "
                "covers: use a full cache to see where they come from"
            )
        return [-(-min(math.ceil(count) + 1, 2**40) // BLOCK) * BLOCK for count in counts]

    # Small things.

    def _by_query(self, by_key: Tensor) -> Tensor:
        """[..., Hkv] -> [..., H]."""
        group = self.config.num_heads // self.config.kv_heads
        return by_key if group == 1 else by_key[..., None].expand(*by_key.shape, group).flatten(-2)

    def tensors(self) -> list[Tensor]:
        """All that is kept from token to token, but for the text."""
        kept = [self.place, self.center, self.center_norm, self.longest, self.excess, self.query_norm, self.demand]
        kept += [self.step_norm, self.step_lse, self.step_evicted]
        kept += [buffer for rings in self.rings for buffer in (rings.keys, rings.values, rings.norms)]
        return kept if self.evicted is None else [*kept, self.evicted.table, self.evicted.end]

    def report(self) -> CacheReport:
        config, batch = self.config, self.batch_size
        real = batch * self.length - (0 if self.padding is None else int(self.padding.sum()))
        kept = evicted = 0
        for rings in self.rings:
            for run in rings.runs:
                heads, low = run.heads.stop - run.heads.start, run.low(self.length)
                lost = batch * low if self.padding is None else int((low - self.padding).clamp_min(0).sum())
                evicted += heads * lost
                kept += heads * (real - lost)
        keys = real * config.num_layers * config.kv_heads
        nbytes = sum(tensor.nbytes for tensor in self.tensors()) + (0 if self.lines is None else self.lines.nbytes)
        return CacheReport(
            tokens=self.length,
            nbytes=nbytes,
            text_bytes=self.text.nbytes,
            full_bytes=2
            * batch
            * self.length
            * config.num_layers
            * config.kv_heads
            * config.width
            * self.dtype.itemsize,
            keys_held=kept,
            share_of_keys=kept / keys if keys else 1.0,
            evictions=evicted,
            reruns=self.reruns,
            capacities=[
                rings.capacities if targets is None else targets
                for rings, targets in zip(self.rings, self.targets, strict=True)
            ],
        )


def _checked_tolerance(tolerance: float | None, dtype: torch.dtype) -> float:
    if tolerance is None:
        tolerance = DEFAULT_TOLERANCE[dtype]
        if tolerance == 0.0:
            raise ValueError(
                f"a bounded cache needs a tolerance above 0, and that of {dtype} is 0: pass one, such as "
                "tolerance=1e-12, or use a full cache"
            )
    if not 0.0 < tolerance < 1.0:
        raise ValueError(
            f"a bounded cache needs a tolerance between 0 and 1, the softmax mass that a query may lose, got "
            f"{tolerance}: with 0 nothing could ever be evicted, which is what a full cache does"
        )
    return tolerance


def _check_options(
    config: ModelConfig, batch_size: int, capacity: int | None, on_failure: str, bounded: bool
) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if not bounded:
        raise ValueError("a BoundedCache is bounded: use KeyValueCache for a full one")
    if capacity is not None:
        raise ValueError(
            f"a bounded cache takes no capacity, got {capacity}: it holds what its certificates need, at any length"
        )
    if on_failure not in ("rerun", "raise"):
        raise ValueError(f"on_failure must be 'rerun' or 'raise', got {on_failure!r}")
    if not config.causal:
        raise ValueError("a cache needs causal attention")
    with torch.device("meta"):
        bias = build_position(config.position, config.position_shape, config.position_options).bias()
    if not isinstance(bias, LinearBias):
        raise ValueError(
            f"a bounded cache needs positions under which distant keys provably fade, such as alibi; "
            f"{config.position} has no such certificate: use a full cache"
        )


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
    return 2.0**-6 if dtype == torch.float32 and not {"tf32", "bf16"}.isdisjoint(settings) else 0.0
