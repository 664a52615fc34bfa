"""Keys and values of the past, so that a token is computed once.

Beside them the cache keeps the largest norm of each block of keys. With that a decoding step under ALiBi finds
its certified window without a pass over the keys, and reads only the keys that can matter. Of forget gates it keeps
the running sums, to which a step adds its own; for a shift of keys and values, those of the last token before it.

While a cache is stepping (`begin_steps`), the device knows how many tokens there are: every step is then the same
sequence of kernels on the same memory, which a CUDA graph can replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from trainshort.models.config import ModelConfig
from trainshort.ops import attention
from trainshort.ops.bias import NO_BIAS, Bias, KernelBias
from trainshort.ops.decay import DecayBias
from trainshort.ops.dispatch import takes_kernels, why_not_triton
from trainshort.ops.gate_sums import running_sums, wide_dtype
from trainshort.ops.norms import row_norms
from trainshort.ops.problem import BLOCK
from trainshort.ops.triton import run as triton_backend
from trainshort.ops.triton.call import Rotation, Stored
from trainshort.ops.triton.shapes import MOST_ROWS
from trainshort.ops.values import trust_norms
from trainshort.positions import Position

FIRST_CAPACITY = 256  # of a growing cache


class Bookmark(NamedTuple):
    """A place in the text of a cache."""

    length: int
    last: dict[int, Tensor]  # as KeyValueCache.last was then


class KeyValueCache:
    """The cache of one batch: `length` tokens of `batch_size` rows, in every layer.

    Rows may be left-padded: `padding` then says how many leading tokens of each row are none.

    Args:
        config: Of the model.
        batch_size: Rows.
        capacity: The most tokens it will hold, allocated at once; None: it grows, at least by doubling.
        bounded: Hold only the keys that can still matter, in memory that does not grow with the text.
        tolerance: Of a bounded cache: the softmax mass that a query may lose; None: that of attention.
        on_failure: Of a bounded cache, where it may have lost more: "rerun" the text, or "raise" a BoundedCacheError.
        dtype: Of keys and values.
        device: Where they are.

    Example:
        >>> cache = ts.KeyValueCache(model.config, batch_size=1, bounded=True)
        >>> with torch.no_grad():
        ...     logits = model.eval()(tokens, cache=cache)
        >>> cache.length
        20
    """

    last: dict[int, Tensor]  # by layer: keys and values of the last token before any shift, [B, 2 Hkv, 1, width]
    next_last: dict[int, Tensor]  # the same of tokens that are being computed

    def __new__(cls, *arguments: Any, bounded: bool = False, **options: Any) -> Self:
        if bounded and cls is KeyValueCache:
            from trainshort.models.bounded import BoundedCache

            cls = BoundedCache  # type: ignore[assignment]
        return super().__new__(cls)

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        capacity: int | None = None,
        *,
        bounded: bool = False,
        tolerance: float | None = None,
        on_failure: str = "rerun",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        if bounded:
            raise TypeError(f"{type(self).__name__} is a full cache: bounded=True is for KeyValueCache itself")
        refuse_bounded_options(tolerance, on_failure)
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1 or None, got {capacity}")
        self.growing = capacity is None
        self.capacity = FIRST_CAPACITY if capacity is None else capacity
        self.length = 0
        self.padding: Tensor | None = None  # int64 [B]
        self.sequences: Tensor | None = None  # int32 [B, 5] while stepping: where each row is, as the kernels read it
        self.config, self.batch_size = config, batch_size
        self.last, self.next_last = {}, {}
        shape = (batch_size, config.kv_heads, self.capacity, config.width)
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        norms = (batch_size, config.kv_heads, -(-self.capacity // BLOCK))
        with torch.inference_mode(False):  # these may be written to in other modes than the one they are made in
            self.keys = [torch.empty(shape, **options) for _ in range(config.num_layers)]
            self.values = [torch.empty(shape, **options) for _ in range(config.num_layers)]
            # Whatever the keys and the default are in: certificates rest on these.
            self.norms = [torch.zeros(norms, dtype=torch.float32, device=device) for _ in range(config.num_layers)]
            self.sums: list[Tensor] = []  # of log gates, by layer: float64 [B, H, capacity]
            self.firsts: list[Tensor] = []  # the first token that each may see, int32 like these
            for _ in range(config.num_layers if config.has_gates else 0):
                gates = (batch_size, config.num_heads, self.capacity)
                self.sums.append(torch.empty(gates, dtype=wide_dtype(self.keys[0].device), device=device))
                self.firsts.append(torch.empty(gates, dtype=torch.int32, device=device))
        for kept in self.norms:
            trust_norms(kept)

    def feed(self, tokens: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """What `compute` makes of tokens [B, T] that go on after those here, by calling `attend` in every layer."""
        self.reserve(tokens.shape[1])
        out = compute(tokens)
        self.advance(tokens.shape[1])
        return out

    def reserve(self, tokens: int) -> None:
        """Make room for this many more tokens."""
        needed = self.length + tokens
        if needed <= self.capacity:
            return
        if not self.growing:
            raise ValueError(
                f"the cache holds {self.capacity} tokens: {self.length} are there and {tokens} more do not fit; "
                "make it larger, or leave capacity out and it grows"
            )
        self.capacity = max(2 * self.capacity, -(-needed // BLOCK) * BLOCK)
        blocks = -(-self.capacity // BLOCK)
        for layer in range(len(self.keys)):
            self.keys[layer] = _longer(self.keys[layer], self.capacity, torch.empty)
            self.values[layer] = _longer(self.values[layer], self.capacity, torch.empty)
            self.norms[layer] = _longer(self.norms[layer], blocks, torch.zeros)
        for layer in range(len(self.sums)):
            self.sums[layer] = _longer(self.sums[layer], self.capacity, torch.empty)
            self.firsts[layer] = _longer(self.firsts[layer], self.capacity, torch.empty)
        for kept in self.norms:
            trust_norms(kept)

    def pad_left(self, key_padding_mask: Tensor) -> None:
        """Say which leading tokens of the rows are padding. Before the first token only."""
        if self.length:
            raise ValueError("key_padding_mask belongs to the first tokens of a cache; later tokens are all real")
        if not torch.compiler.is_compiling() and key_padding_mask.device.type == "cpu":
            real = key_padding_mask
            if real.shape[1] and not (bool(real[:, -1].all()) and bool((real[:, 1:] >= real[:, :-1]).all())):
                raise ValueError("with a cache, rows are padded on the left: key_padding_mask must end in True")
        self.padding = (~key_padding_mask).sum(-1)

    def positions(self, tokens: int) -> Tensor:
        """The positions of the next tokens, each in its own text: int64 [B or 1, tokens]. Padding does not count."""
        if self.sequences is not None:
            return self.sequences[: 1 if self.padding is None else self.batch_size, 4:].long()
        index = torch.arange(self.length, self.length + tokens, device=self.keys[0].device)[None]
        return index if self.padding is None else (index - self.padding[:, None]).clamp_min(0)

    def previous(self, layer: int, kv: Tensor) -> Tensor:
        """Keys and values of the token before these, as they were before any shift; those of the last are kept.

        kv: keys, then values, [B, 2 Hkv, T, width].
        """
        if layer not in self.last:
            with torch.inference_mode(False):
                self.last[layer] = kv.new_zeros((*kv.shape[:2], 1, kv.shape[3]))
        self.next_last[layer] = kv[:, :, -1:] if kv.shape[2] else self.last[layer]
        return self.last[layer].clone()

    def keep_last(self) -> None:
        """Every layer is done: its last token is the one before those to come. In place, for CUDA graphs."""
        for layer, kv in self.next_last.items():
            self.last[layer].copy_(kv)
        self.next_last.clear()

    def decay(self, layer: int, log_gates: Tensor) -> DecayBias:
        """The bias of all tokens so far, from the log gates [B, H, T] of the next ones, whose sums are stored."""
        if self.sequences is not None:
            return self._decay_stepping(layer, log_gates)
        start, end = self.length, self.length + log_gates.shape[2]
        if self.padding is not None:
            real = torch.arange(start, end, device=log_gates.device) >= self.padding[:, None]
            log_gates = log_gates.masked_fill(~real[:, None], 0.0)
        sums, firsts = self.sums[layer], self.firsts[layer]
        before = (sums[:, :, start - 1 : start], firsts[:, :, start - 1 : start]) if start else None
        sums[:, :, start:end], firsts[:, :, start:end] = running_sums(log_gates, before, start)
        return DecayBias.from_sums(sums[:, :, :end], firsts[:, :, :end])

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, bias: Bias | None, scale: float,
        rotation: Rotation | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of the next tokens to all before them and to one another; their keys and values are stored.

        rotation: what `rotation` gave, if that is still to be done.
        """
        if self.sequences is not None:
            return self._attend_stepping(layer, q, k, v, bias, scale, rotation)
        k, v, attention_kwargs = self.append(layer, k, v)
        return attention(q, k, v, bias=bias, causal=True, scale=scale, **attention_kwargs)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Write a layer's new keys and values; returns all of them, and arguments of attention that go with them."""
        end = self.length + k.shape[2]
        self._store(layer, k, v)
        attention_kwargs: dict[str, Any] = {"key_norms": self.norms[layer][:, :, : -(-end // BLOCK)]}
        if self.padding is not None:
            attention_kwargs["key_padding_mask"] = torch.arange(end, device=k.device) >= self.padding[:, None]
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end], attention_kwargs

    def _store(self, layer: int, k: Tensor, v: Tensor) -> None:
        start, end = self.length, self.length + k.shape[2]
        keys, values, norms = self.keys[layer], self.values[layer], self.norms[layer]
        if k.is_cuda and takes_kernels(keys, k, v):
            triton_backend.append(k, v, Stored(keys, values, norms), start)
            return
        keys[:, :, start:end] = k
        values[:, :, start:end] = v
        lengths = norms_above(keys[:, :, start:end].detach())  # as stored: rounding makes half of them longer
        if end == start + 1 and not torch.compiler.is_compiling():
            block_norm = norms[:, :, start // BLOCK, None]
            torch.maximum(block_norm, lengths, out=block_norm)
        else:
            block = torch.arange(start, end, device=k.device) // BLOCK
            norms.scatter_reduce_(2, block.expand_as(lengths), lengths, "amax")

    def advance(self, tokens: int) -> None:
        """Count tokens that every layer has appended."""
        self.keep_last()
        self.length += tokens
        if self.sequences is not None:
            self.sequences += self._one_more

    def bookmark(self) -> Bookmark:
        """Where the text ends now, for `return_to`.

        Returns:
            A Bookmark.
        """
        return Bookmark(self.length, {layer: kv.clone() for layer, kv in self.last.items()})

    def return_to(self, bookmark: Bookmark) -> None:
        """Forget what came after a bookmark. The norms of blocks stay: they still bound the keys that are left.

        Args:
            bookmark: What `bookmark` returned before.
        """
        if self.is_stepping:
            raise ValueError("a stepping cache does not go back: call end_steps first")
        if bookmark.length > self.length:
            raise ValueError(f"the bookmark is at {bookmark.length} tokens, the cache has only {self.length}")
        self.length = bookmark.length
        for layer, kv in bookmark.last.items():
            self.last[layer].copy_(kv)

    # Stepping: one token at a time, at a place that the device knows.

    def why_not_stepping(self) -> str | None:
        """Why this cache cannot step, in words; None where it can."""
        bias = self.config.position_on_meta().bias()
        if bias is not None and not bias.has_kernels:
            return f"there are no kernels for a GPU that take a {type(bias).__name__} yet"
        reason = why_not_triton(self.keys[0])
        if reason is not None:
            return f"attention over its cache runs without the kernels for a GPU: {reason}"
        device = self.keys[0].device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != self.keys[0].dtype:
            return f"autocast to {torch.get_autocast_dtype(device)} with a cache of {self.keys[0].dtype}"
        return None

    @property
    def is_stepping(self) -> bool:
        return self.sequences is not None

    @property
    def has_few_rows(self) -> bool:
        """Whether a step has so few rows that linear layers have a kernel for them."""
        return self.is_stepping and self.batch_size <= MOST_ROWS and self.keys[0].is_cuda

    def begin_steps(self) -> None:
        """Tokens come one at a time from now on, and the device counts them too."""
        first = torch.zeros(self.batch_size, dtype=torch.int64) if self.padding is None else self.padding
        first = first.to(self.keys[0].device)
        zero = torch.zeros_like(first)
        columns = (zero, zero + 1, first, self.length + 1 - first, self.length - first)
        self.sequences = torch.stack(columns, dim=1).to(torch.int32)
        self._one_more = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32, device=first.device)
        self._bias: tuple[Bias | None, KernelBias] | None = None

    def end_steps(self) -> None:
        """Back to tokens in any number, counted by the host alone."""
        self.sequences = self._bias = None

    def failure_flag(self) -> Tensor | None:
        """On the device: above 0, or NaN, where tokens so far may be wrong. None for caches that forget nothing."""
        return None

    def heed(self, excess: float) -> bool:
        """Whether all is well, by what was read of `failure_flag`."""
        return True

    def rollback(self, tokens: int = 0) -> None:
        """Take back the last tokens, after a failure."""
        raise TypeError("only a bounded cache can fail, and go back")

    def _decay_stepping(self, layer: int, log_gates: Tensor) -> DecayBias:
        """The same for one token, at a place that the device knows; behind it the sums mean nothing."""
        assert self.sequences is not None
        place = (self.sequences[:1, 2] + self.sequences[:1, 4]).long()  # [1]: the same in every row
        kept = self.sums[layer], self.firsts[layer]
        # A first token has none before it: any number will do for its sum.
        before = [each.index_select(2, (place - 1).clamp_min(0)).where(place > 0, 0) for each in kept]
        for each, new in zip(kept, running_sums(log_gates, (before[0], before[1]), place), strict=True):
            each.index_copy_(2, place, new)
        return DecayBias.from_sums(*kept)

    def rotation(self, position: Position) -> Rotation | None:
        """How `attend` is to turn queries and keys; None where they come as `rotate` of the position made them."""
        return None if self.sequences is None else position.rotation(self.keys[0].device)

    def _attend_stepping(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, scale: float, rotation: Rotation | None
    ) -> Tensor:
        assert self.sequences is not None
        require_one_token(q.shape[2])
        if self._bias is None or self._bias[0] is not bias:  # one for all layers of a step
            self._bias = bias, KernelBias(NO_BIAS) if bias is None else bias.for_kernels(self.batch_size)
        stored = Stored(self.keys[layer], self.values[layer], self.norms[layer])
        if rotation is None:
            triton_backend.append(k, v, stored, sequences=self.sequences)
        else:
            q = triton_backend.append_turned(q, k, v, stored, self.sequences, rotation)
        return triton_backend.step(q, stored, self.sequences, self._bias[1], scale)


def refuse_bounded_options(tolerance: float | None, on_failure: str) -> None:
    """Of a full cache, which loses nothing."""
    for name, is_given in (("tolerance", tolerance is not None), ("on_failure", on_failure != "rerun")):
        if is_given:
            raise ValueError(f"{name} is an option of bounded caches: pass bounded=True with it, or leave it out")


def require_one_token(tokens: int) -> None:
    if tokens != 1:
        raise ValueError(f"a stepping cache takes one token at a time, got {tokens}: call end_steps first")


def _longer(old: Tensor, size: int, make: Callable[..., Tensor]) -> Tensor:
    """The same with so many entries; `make` says what is in the new ones."""
    with torch.inference_mode(False):
        larger = make((*old.shape[:2], size, *old.shape[3:]), dtype=old.dtype, device=old.device)
    larger[:, :, : old.shape[2]] = old
    return larger


def norms_above(keys: Tensor) -> Tensor:
    """Float32 numbers no less than the norms of these rows: larger by what a float32 sum and its root can lose."""
    return row_norms(keys).float() * (1.0 + (keys.shape[-1] / 2 + 4) * 2.0**-24)
