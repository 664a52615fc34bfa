"""Keys and values of the past, so that a token is computed once.

Beside them the cache keeps the largest norm of each block of keys. With that a decoding step under ALiBi finds
its certified window without a pass over the keys, and reads only the keys that can matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from trainshort.models.config import ModelConfig
from trainshort.ops import attention
from trainshort.ops.bias import Bias
from trainshort.ops.norms import row_norms
from trainshort.ops.problem import BLOCK
from trainshort.ops.values import trust_norms

FIRST_CAPACITY = 256  # of a growing cache


class KeyValueCache:
    """The cache of one batch: `length` tokens of `batch_size` rows, in every layer.

    capacity: the most tokens it will hold, allocated at once; None: it grows by doubling.
    bounded: hold only the keys that can still matter, in memory that does not grow with the text (bounded.py, which
    has further options: tolerance and on_failure).
    Rows may be left-padded: `padding` then says how many leading tokens of each row are none.
    """

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
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1 or None, got {capacity}")
        self.growing = capacity is None
        self.capacity = FIRST_CAPACITY if capacity is None else capacity
        self.length = 0
        self.padding: Tensor | None = None  # int64 [B]
        self.batch_size = batch_size
        shape = (batch_size, config.kv_heads, self.capacity, config.width)
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.keys = [torch.empty(shape, **options) for _ in range(config.num_layers)]
        self.values = [torch.empty(shape, **options) for _ in range(config.num_layers)]
        norms = (batch_size, config.kv_heads, -(-self.capacity // BLOCK))
        # Whatever the keys and the default are in: certificates rest on these.
        self.norms = [torch.zeros(norms, dtype=torch.float32, device=device) for _ in range(config.num_layers)]
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
        while self.capacity < needed:
            self.capacity *= 2
        for buffers, size in ((self.keys, self.capacity), (self.values, self.capacity), (self.norms, None)):
            blocks = -(-self.capacity // BLOCK)
            for layer, old in enumerate(buffers):
                shape = list(old.shape)
                shape[2] = blocks if size is None else size
                larger = old.new_zeros(shape) if size is None else old.new_empty(shape)
                larger[:, :, : old.shape[2]] = old
                buffers[layer] = larger
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
        index = torch.arange(self.length, self.length + tokens, device=self.keys[0].device)[None]
        return index if self.padding is None else (index - self.padding[:, None]).clamp_min(0)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, bias: Bias | None, scale: float) -> Tensor:
        """Attention of the next tokens to all before them and to one another; their keys and values are stored."""
        k, v, attention_kwargs = self.append(layer, k, v)
        return attention(q, k, v, bias=bias, causal=True, scale=scale, **attention_kwargs)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Write a layer's new keys and values; returns all of them, and arguments of attention that go with them."""
        start, end = self.length, self.length + k.shape[2]
        keys, values, norms = self.keys[layer], self.values[layer], self.norms[layer]
        keys[:, :, start:end] = k
        values[:, :, start:end] = v
        lengths = norms_above(keys[:, :, start:end].detach())  # as stored: rounding makes half of them longer
        if end == start + 1 and not torch.compiler.is_compiling():
            block_norm = norms[:, :, start // BLOCK, None]
            torch.maximum(block_norm, lengths, out=block_norm)
        else:
            block = torch.arange(start, end, device=k.device) // BLOCK
            norms.scatter_reduce_(2, block.expand_as(lengths), lengths, "amax")
        attention_kwargs: dict[str, Any] = {"key_norms": norms[:, :, : -(-end // BLOCK)]}
        if self.padding is not None:
            attention_kwargs["key_padding_mask"] = torch.arange(end, device=k.device) >= self.padding[:, None]
        return keys[:, :, :end], values[:, :, :end], attention_kwargs

    def advance(self, tokens: int) -> None:
        """Count tokens that every layer has appended."""
        self.length += tokens


def norms_above(keys: Tensor) -> Tensor:
    """Float32 numbers no less than the norms of these rows: larger by what a float32 sum and its root can lose."""
    return row_norms(keys).float() * (1.0 + (keys.shape[-1] / 2 + 4) * 2.0**-24)
