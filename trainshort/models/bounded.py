"""A cache for texts without end, in memory that does not grow with them, and with a proof for what it forgets.

Each key head keeps its last keys in a ring (bounded_keys.py), as many as can still matter for queries somewhat longer
than any so far (ring_sizes.py). Of those evicted a bound remains of all that they could weigh (ops/evicted.py). So
every query of every layer has a certificate: if the evicted keys could have held more than half of the tolerance (the
other half is for keys that are there and skipped), the text is run again from its first token with larger rings. How
large rings are is a guess; that nothing was lost is not. The proof is in docs/proof-cache.md.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainshort.models.bounded_gates import GatedKeys
from trainshort.models.bounded_keys import CLOSE, BoundedKeys
from trainshort.models.bounded_slopes import SlopedKeys
from trainshort.models.cache import Bookmark, KeyValueCache, require_one_token
from trainshort.models.config import ModelConfig
from trainshort.models.ring_sizes import ADAPT, BoundedCacheError, RingSizes
from trainshort.ops.bias import Bias, LinearBias
from trainshort.ops.decay import DecayBias
from trainshort.ops.problem import DEFAULT_TOLERANCE
from trainshort.ops.tracing import is_recording
from trainshort.ops.triton.call import Rotation
from trainshort.ops.values import require_no_nan, require_positive

PIECE = {"cpu": 2048, "cuda": 16384}  # tokens of a text that are computed at once when it is run again
FIRST_TEXT, TEXT_GROWTH = 256, 2**18  # tokens: the text's buffer doubles from the one up to the other, then adds that

FLAT_HEADS = "a bounded cache evicts keys that fade, and to a head of slope 0 none does: use a full cache"

Compute = Callable[[Tensor], Tensor]  # tokens [B, T] -> hidden states, through `attend` of every layer


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
        longest = max((max(layer) for layer in self.capacities), default=0)
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
        self.padding: Tensor | None = None
        self.sequences = None
        self.last, self.next_last = {}, {}
        self.growing, self.has_gates = True, config.has_gates
        self.length = self.capacity = 0
        # For those who ask for dtype and device: the keys themselves lie in rings.
        self.keys = self.values = [torch.empty((batch_size, 0, config.width), dtype=dtype, device=self.device)]
        with torch.inference_mode(False):  # written to in other modes than the one they are made in
            self.sizes = RingSizes(config, batch_size, self.tolerance / 2, self.device)
        self.slopes: Tensor | None = None  # float64 [H], from the first call on
        self.held: BoundedKeys | None = None  # like these
        self.text = torch.zeros((batch_size, 0), dtype=torch.int32, device=self.device)
        self.remembered = 0  # tokens of it that were computed and certified
        self.whole = True  # no call was left halfway, and no certificate failed
        self.deferred = False  # certificates are looked at later, by the caller
        self.adapted = 0  # tokens there were when rings were last adapted
        self.reruns = 0

    def expect_norms(self, queries: Tensor, keys: Tensor) -> None:
        """Queries [layers, heads] and keys [layers, key heads] have no larger norms than these, whatever the text.

        Before the first token. Rings are then made for the worst that can come, and no text runs again. A model with
        `qk_norm` knows such bounds, and its `make_cache` gives them.
        """
        if self.length:
            raise ValueError("norms are expected before the first token of a cache")
        group = self.config.num_heads // self.config.kv_heads
        options: dict[str, Any] = {"dtype": torch.float64, "device": self.device}
        scale = abs(self.config.score_scale)
        self.sizes.expect_norms(queries.to(**options) * scale, keys.to(**options).repeat_interleave(group, 1))

    def feed(self, tokens: Tensor, compute: Compute) -> Tensor:
        """Compute tokens [B, T] that go on after those here. Where certificates fail, the whole text is run again."""
        if self.deferred:
            require_one_token(tokens.shape[1])
            self.reserve(tokens.shape[1])
            self.whole = False
            out = self._computed(tokens, compute)
            self.whole = True
            return out
        try:
            out = self._fed(tokens, compute)
        except BaseException:
            self._forget_keys()
            raise
        self.remembered = self.length
        return out

    def _fed(self, tokens: Tensor, compute: Compute) -> Tensor:
        out = None
        if self.whole:
            out = self._certified(tokens, compute)
            if out is None:
                self._enlarge()
            if out is None and self.on_failure == "raise":
                raise self._lost_too_much()
        while out is None:
            out = self._again(tokens, compute)
            if out is None:
                self._enlarge()
        return out

    def _lost_too_much(self) -> BoundedCacheError:
        return BoundedCacheError(
            f"after {self.remembered} tokens evicted keys could hold more than {self.tolerance:.1e} of a query's "
            "softmax mass: with on_failure='rerun' the text is run again with more memory, and so it is if tokens "
            "are fed to this cache again"
        )

    def _forget_keys(self) -> None:
        """Only the text stays, as far as it was certified: the next call runs it again before its own tokens."""
        self.held, self.whole, self.length = None, False, self.remembered
        self._set_capacity()

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
        if self.whole and tokens.shape[1] > 1 and self.held is not None:
            self.held.excess.fill_(-math.inf)  # from here on it tells of what comes next
        return out if self.whole else None

    def _again(self, tokens: Tensor, compute: Compute) -> Tensor | None:
        """The whole text, from its first token: a layer's keys depend on all tokens that the layers below saw."""
        self.reruns += 1
        self.held, self.length, self.adapted = None, 0, 0
        size = PIECE.get(self.device.type, 2048)
        for part in self.text[:, : self.remembered].to(tokens.dtype).split(size, dim=1):
            if part.shape[1] and self._certified(part, compute) is None:
                return None
        return self._certified(tokens, compute)

    def _enlarge(self) -> None:
        """After a failure: rings are to be larger in the next run."""
        held = self.held
        if held is None:
            return
        if bool(torch.isnan(held.excess).any()) or not bool(torch.isfinite(held.longest).all()):
            raise BoundedCacheError(
                "queries, keys or scores are not finite (NaN or infinite), which no certificate covers: "
                "use a full cache to see where they come from"
            )
        self.sizes.expect_more(held.excess > 0.0, held.targets)

    def failed(self) -> bool:
        """Whether a certificate failed that nobody has looked at yet. Waits for a GPU."""
        return not bool((self.failure_flag() <= 0.0).item())

    def failure_flag(self) -> Tensor:
        """The largest excess of the last certificates, in nats, on the device: above 0, or NaN, one failed."""
        if self.held is None:
            return torch.full((), -math.inf, dtype=torch.float64, device=self.device)
        return self.held.excess.amax()

    def _write(self, tokens: Tensor) -> None:
        """Keep the ids of the next tokens, for running the text again."""
        if self.deferred and self.held is not None:
            self.text.index_copy_(1, self.held.place, tokens.to(torch.int32))  # where the device is, in graphs too
        else:
            self.text[:, self.length : self.length + tokens.shape[1]] = tokens

    def _reserve_text(self, end: int) -> None:
        if end <= self.text.shape[1]:
            return
        size = max(FIRST_TEXT, self.text.shape[1])
        while size < end:
            size += min(size, TEXT_GROWTH)
        with torch.inference_mode(False):
            text = torch.zeros((self.batch_size, size), dtype=torch.int32, device=self.device)
        text[:, : self.text.shape[1]] = self.text
        self.text = text
        self._set_capacity()

    def _set_capacity(self) -> None:
        """Up to how many tokens every step is like the one before."""
        self.capacity = min(self.text.shape[1], 2**62 if self.held is None else self.held.full_at)

    def bookmark(self) -> Bookmark:
        raise TypeError("a bounded cache has forgotten what a bookmark would return to: use a full cache")

    def return_to(self, bookmark: Bookmark) -> None:
        self.bookmark()  # says why not

    def rollback(self, tokens: int = 0) -> None:
        """Forget all but the text, and of that the last tokens: the next call runs the rest again before its own.

        For callers that look at certificates only after several steps. Where one failed and on_failure is "raise",
        a BoundedCacheError comes then.
        """
        if self._forget(tokens) and self.on_failure == "raise":
            raise self._lost_too_much()

    def _forget(self, tokens: int) -> bool:
        """What `rollback` does. Returns whether a certificate failed."""
        there = self.length if self.deferred else self.remembered
        if not 0 <= tokens <= there:
            raise ValueError(f"rollback takes back at most the {there} tokens there are, got {tokens}")
        failed = self.failed()
        if failed:
            self._enlarge()
        self.remembered, self.deferred = there - tokens, False
        self._forget_keys()
        return failed

    # One token after another, at a place that the device knows: see KeyValueCache. Nobody looks at certificates until
    # the caller reads `failure_flag`, and tells by `heed` what it says, or goes back with `rollback`.

    @property
    def is_stepping(self) -> bool:
        return self.deferred

    def why_not_stepping(self) -> str | None:
        if self.has_gates:
            return "a bounded cache looks at gates on the host, every few tokens"
        return super().why_not_stepping()

    def begin_steps(self) -> None:
        if self.has_gates:
            raise RuntimeError(f"this cache cannot step: {self.why_not_stepping()}")
        if not self.whole:
            raise RuntimeError("the text must run again first: feed a token, then begin steps")
        self.deferred = True

    def end_steps(self) -> None:
        if self.deferred and self.failed():
            self._forget(0)
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
        if self.held is None or (tokens != 1 and not self.deferred):
            return
        if end > self.adapted + ADAPT and (end > self.capacity or not self.deferred):
            self.adapted = end
            self.held.adapt(self.length)
            if not self.failed():
                self.held.excess.fill_(-math.inf)  # from here on it tells of what comes next
            self._set_capacity()
        if end > self.held.full_at:
            self.held.make_room(self.length, tokens)
            self._set_capacity()

    def positions(self, tokens: int) -> Tensor:
        start = self.length if self.held is None else self.held.place
        index = start + torch.arange(tokens, device=self.device)
        return index[None] if self.padding is None else (index - self.padding[:, None]).clamp_min(0)

    def advance(self, tokens: int) -> None:
        self.keep_last()
        if self.held is not None:
            if self.held.stepping:
                self.held.finish_step()
            self.held.place += tokens
            if tokens > 1:
                self._set_capacity()
        self.length += tokens

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        raise TypeError("a bounded cache holds no keys in one piece: call attend")

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, bias: Bias | None, scale: float,
        rotation: Rotation | None = None,
    ) -> Tensor:  # fmt: skip
        assert rotation is None  # it gives none
        if is_recording(q, k, v):
            raise RuntimeError("a bounded cache is forward only: call the model under torch.no_grad()")
        held, bias = self._held_for(bias)
        dtype = q.dtype
        if q.shape[2] == 0:
            return q
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            q, k, v = q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)
            if q.shape[2] > 1:
                return held.attend_piece(layer, q, k, v, bias=bias, scale=scale, length=self.length).to(dtype)
            q, k, v = q[:, :, 0], k[:, :, 0], v[:, :, 0]
            out = held.attend_one(layer, q, k, v, bias=bias, scale=scale, length=self.length, replayed=self.deferred)
            return out[:, :, None].to(dtype)

    def decay(self, layer: int, log_gates: Tensor) -> DecayBias:
        with torch.no_grad():
            bias = self._gated().decay(layer, log_gates.detach(), self.length)
        for what, (marked, wrong) in bias.without_nan().items():
            require_no_nan(what, marked, wrong)
        return bias

    def _gated(self) -> GatedKeys:
        if not self.has_gates:
            raise TypeError(f"this cache was given gates, and its position {self.config.position!r} has none")
        if self.held is None:
            self.held = GatedKeys(self.config, self.sizes, self.padding, dtype=self.dtype)
            self._set_capacity()
        assert isinstance(self.held, GatedKeys)
        return self.held

    def _held_for(self, bias: Bias | None) -> tuple[BoundedKeys, Bias]:
        """Slopes are read once: what was proved with others would be void."""
        if self.has_gates:
            if not isinstance(bias, DecayBias):
                raise TypeError(f"a bounded cache with gates needs the bias that its `decay` makes, got {bias!r}")
            return self._gated(), bias
        if not isinstance(bias, LinearBias) or bias.slopes.dim() != 1 or not bias.is_causal_only:
            raise TypeError(f"a bounded cache needs a causal LinearBias with slopes [heads], got {bias!r}")
        slopes = bias.slopes.detach()
        if self.slopes is None:
            if bool((slopes == 0).any()):
                raise ValueError(FLAT_HEADS)
            require_positive("slopes", slopes)
            self.slopes = slopes.to(self.device, torch.float64, copy=True)
        elif self.device.type == "cpu" and not torch.equal(self.slopes, slopes.double()):
            raise ValueError("slopes changed while a bounded cache lives: make a new cache for the new slopes")
        if self.held is None:
            self.held = SlopedKeys(self.config, self.slopes, self.sizes, self.padding, dtype=self.dtype)
            self._set_capacity()
        return self.held, bias

    def report(self) -> CacheReport:
        config, batch, held = self.config, self.batch_size, self.held
        padding = torch.zeros(batch, dtype=torch.int64) if self.padding is None else self.padding.cpu()
        real = batch * self.length - int(padding.sum())
        keys, evicted = 0 if held is None else real * config.num_layers * config.kv_heads, 0
        for run in [] if held is None else [run for rings in held.rings for run in rings.runs]:
            lost = int((run.low(self.length) - padding).clamp_min(0).sum())
            evicted += (run.heads.stop - run.heads.start) * lost
        tensors = [] if held is None else held.tensors()
        width = 2 * config.num_layers * config.kv_heads * config.width * self.dtype.itemsize
        return CacheReport(
            tokens=self.length,
            nbytes=sum(tensor.nbytes for tensor in tensors),
            text_bytes=self.text.nbytes,
            full_bytes=batch * self.length * width,
            keys_held=keys - evicted,
            share_of_keys=1.0 - evicted / keys if keys else 1.0,
            evictions=evicted,
            reruns=self.reruns,
            capacities=[] if held is None else held.wanted(),
        )


def _checked_tolerance(tolerance: float | None, dtype: torch.dtype) -> float:
    if tolerance is None:
        tolerance = DEFAULT_TOLERANCE[dtype]
        if tolerance == 0.0:
            raise ValueError(
                f"a bounded cache needs a tolerance above 0, and that of {dtype} is 0: pass one, such as "
                "tolerance=1e-12, or use a full cache"
            )
    if not isinstance(tolerance, numbers.Real):
        raise TypeError(f"tolerance must be a number between 0 and 1, or None; got {tolerance!r}")
    if not 0.0 < tolerance < 1.0:
        why = ": with 0 nothing could ever be evicted, which is what a full cache does" if tolerance <= 0.0 else ""
        why = ": with 1 a query might lose all that it looks for" if tolerance >= 1.0 else why
        raise ValueError(
            "a bounded cache needs a tolerance between 0 and 1, the softmax mass that a query may lose, got "
            f"{tolerance}{why}"
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
    position = config.position_on_meta()
    with torch.device("meta"):
        bias = position.bias()
    if position.depends_on_length:
        raise ValueError(
            f"a bounded cache needs slopes that stay as they are; those of {config.position} depend on the length of "
            "the text here: give a factor instead of trained_length, or use a full cache"
        )
    if position.has_flat_heads:
        raise ValueError(FLAT_HEADS)
    if not isinstance(bias, LinearBias) and not config.has_gates:
        raise ValueError(
            f"a bounded cache needs positions under which distant keys provably fade, such as alibi or fox; "
            f"{config.position} has no certificate for evicted keys: use a full cache"
        )
