"""The parts of a transformer: attention, feed-forward, and the block that holds one of each."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainshort.models.cache import KeyValueCache
from trainshort.models.config import ModelConfig
from trainshort.models.dense import dense_attention, score_table
from trainshort.models.head_parts import HeadNorm, KeyValueShift, WideNorm
from trainshort.models.linear import ACTIVATIONS, project
from trainshort.models.spans import Span, last_of_rank_before, own_span
from trainshort.ops import attention
from trainshort.ops.bias import Bias
from trainshort.ops.decay import DecayBias
from trainshort.ops.tracing import is_eager
from trainshort.ops.triton.call import Rotation
from trainshort.positions import Position


@dataclass
class Context:
    """What all layers of one forward pass share."""

    position: Position
    positions: Tensor  # int64 [B or 1, T]
    bias: Bias | None
    cache: KeyValueCache | None = None
    key_padding_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    rotation: Rotation | None = None  # of a step whose keys the cache turns, and its queries
    few_rows: bool = False  # so few that linear layers have a kernel for them
    dense: bool = False  # all scores as a table: see dense.py
    score_table: Tensor | None = None  # of a dense pass, where it is the same for all layers


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.norm == "layernorm")


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, gates: nn.Module | None = None) -> None:
        """gates: of a position method that has such, for this layer alone."""
        super().__init__()
        self.config, self.layer = config, layer
        heads, kv_heads, width = config.num_heads, config.kv_heads, config.width
        self.qkv = nn.Linear(config.d_model, (heads + 2 * kv_heads) * width, bias=config.qkv_bias)
        self.out = nn.Linear(heads * width, config.d_model, bias=config.attention_out_bias)
        self.gates = gates
        self.shift = KeyValueShift(config.d_model, kv_heads) if config.kv_shift else None
        norm = WideNorm if config.wide_qk_norm else HeadNorm
        has_norm = config.qk_norm or config.wide_qk_norm
        self.query_norm = norm(heads, width, config.norm_eps) if has_norm else None
        self.key_norm = norm(kv_heads, width, config.norm_eps) if has_norm else None
        self.output_norm = HeadNorm(heads, width, config.norm_eps) if config.output_norm else None
        self.output_gate = nn.Linear(config.d_model, heads * width, bias=False) if config.output_gate else None

    def forward(
        self, x: Tensor, context: Context, norm: nn.Module | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Attention of norm(x), where there is a norm, added to a residual sum, where that is given."""
        few_rows = context.few_rows
        if norm is not None and not (self.gates is None and self.shift is None and self.output_gate is None):
            x, norm = norm(x), None  # not for q, k and v alone
        q, k, v = self._queries_keys_values(x, context, norm)
        out = self.attend(
            q, k, v, context.bias if self.gates is None else self._decay(self.gates(x), context), context
        )
        if self.output_norm is not None:
            out = self.output_norm(out)
        out = out.transpose(1, 2).flatten(2)
        if self.output_gate is not None:
            out = out * project(self.output_gate, x, few_rows=few_rows).sigmoid()
        return project(self.out, out, residual=residual, few_rows=few_rows)

    def _queries_keys_values(
        self, x: Tensor, context: Context, norm: nn.Module | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of norm(x), as attention compares them but for the rotation of the context: [B, heads, T, width]."""
        config = self.config
        qkv = project(self.qkv, x, norm=norm, few_rows=context.few_rows)
        if config.clip_qkv is not None:
            qkv = qkv.clamp(-config.clip_qkv, config.clip_qkv)
        qkv = qkv.unflatten(-1, (-1, config.width)).transpose(1, 2)  # [B, H + 2 Hkv, T, width]
        q, kv = qkv.split((config.num_heads, 2 * config.kv_heads), dim=1)
        if self.shift is not None:
            before = last_of_rank_before(kv) if context.cache is None else context.cache.previous(self.layer, kv)
            before = torch.zeros_like(kv[:, :, :1]) if before is None else before
            kv = self.shift(x, kv, before, context.positions)
        k, v = kv.chunk(2, dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if context.rotation is not None:
            return q, k, v
        return *context.position.rotate(q, k, context.positions), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, context: Context) -> Tensor:
        """Attention of queries to keys as they are, but for the rotation of the context: [B, heads, T, width]."""
        config = self.config
        if context.cache is not None:
            return context.cache.attend(
                self.layer, q, k, v, bias=bias, scale=config.score_scale, rotation=context.rotation
            )
        if context.dense:
            return self._attend_densely(q, k, v, bias, context)
        return attention(
            q,
            k,
            v,
            bias=bias,
            causal=config.causal,
            scale=config.score_scale,
            key_padding_mask=context.key_padding_mask,
            cu_seqlens=context.cu_seqlens,
            dropout=config.attention_dropout if self.training else 0.0,
        )

    def _attend_densely(self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, context: Context) -> Tensor:
        config, table = self.config, context.score_table
        if table is None:  # the bias is this layer's own
            table = score_table(bias, q.shape[2], causal=config.causal, like=q)
        dropout = config.attention_dropout if self.training else 0.0
        return dense_attention(q, k, v, table, scale=config.score_scale, dropout=dropout)

    def _decay(self, log_gates: Tensor | tuple[Tensor, Tensor], context: Context) -> DecayBias:
        """The bias that this layer's gates make. Those of padding are open: nothing is to be forgotten there."""
        if context.bias is not None:
            raise ValueError(f"position {self.config.position!r} has gates and a bias: attention takes one of them")
        past, future = log_gates if isinstance(log_gates, tuple) else (log_gates, None)
        if context.cache is not None:
            return context.cache.decay(self.layer, past)
        if context.key_padding_mask is not None:
            padding = ~context.key_padding_mask[:, None]
            past = past.masked_fill(padding, 0.0)
            future = None if future is None else future.masked_fill(padding, 0.0)
        return DecayBias(past, future)


class CrossAttention(nn.Module):
    """Attention from one sequence to another, for encoder-decoder models.

    Distances: both sequences count from 0, so query i stands at key position i and key j is `|i - j|` away, however
    much of either is there yet. `query_start` moves the queries: in decoding, the number of tokens before x.

    Args:
        config: Of which it takes widths, heads, biases and attention dropout.

    Example:
        >>> cross = ts.CrossAttention(ts.ModelConfig(d_model=64, num_heads=4))
        >>> cross(torch.randn(1, 10, 64), torch.randn(1, 30, 64), ts.LinearBias(ts.alibi_slopes(4))).shape
        torch.Size([1, 10, 64])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.query = nn.Linear(config.d_model, config.num_heads * config.width, bias=config.qkv_bias)
        self.key_value = nn.Linear(config.d_model, 2 * config.kv_heads * config.width, bias=config.qkv_bias)
        self.out = nn.Linear(config.num_heads * config.width, config.d_model, bias=config.attention_out_bias)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        bias: Bias | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        query_start: int | Tensor = 0,
    ) -> Tensor:
        """Attend from x to memory.

        Args:
            x: [B, Tq, d_model].
            memory: [B, Tk, d_model].
            bias: What attention takes; None: no bias.
            key_padding_mask: bool [B, Tk], True where memory is real.
            query_start: The position of the first query among the keys.

        Returns:
            [B, Tq, d_model].
        """
        config = self.config
        q = self.query(x).unflatten(-1, (-1, config.width)).transpose(1, 2)
        k, v = self.key_value(memory).unflatten(-1, (-1, config.width)).transpose(1, 2).chunk(2, dim=1)
        out = attention(
            q,
            k,
            v,
            bias=None if bias is None else bias.both_ways(),
            causal=False,
            scale=config.score_scale,
            key_padding_mask=key_padding_mask,
            query_start=query_start,
            dropout=config.attention_dropout if self.training else 0.0,
        )
        return self.out(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated, self.activation = config.gated, config.activation
        self.up = nn.Linear(config.d_model, config.hidden * (2 if config.gated else 1), bias=config.ffn_bias)
        self.down = nn.Linear(config.hidden, config.d_model, bias=config.ffn_out_bias)

    def forward(
        self,
        x: Tensor,
        norm: nn.Module | None = None,
        residual: Tensor | None = None,
        few_rows: bool = False,
    ) -> Tensor:
        if self.gated:
            gate, x = project(self.up, x, norm=norm, few_rows=few_rows).chunk(2, dim=-1)
            x = ACTIVATIONS[self.activation](gate) * x
        else:
            x = project(self.up, x, norm=norm, activation=self.activation, few_rows=few_rows)
        return project(self.down, x, residual=residual, few_rows=few_rows)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, gates: nn.Module | None = None) -> None:
        super().__init__()
        self.post, self.parallel = config.norm_place == "post", config.parallel_residual
        self.attention_norm = make_norm(config)
        self.attention = SelfAttention(config, layer, gates)
        self.second_norm = make_norm(config) if config.second_residual else None
        self.ffn_norm = make_norm(config) if not config.parallel_residual or config.parallel_norms else None
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def _dropped(self, x: Tensor) -> Tensor:
        return self.dropout(x) if self.training else x

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.post:
            assert self.ffn_norm is not None
            attended = self.attention_norm(x + self._dropped(self.attention(x, context)))
            x = attended if self.second_norm is None else self.second_norm(attended + x)
            return self.ffn_norm(x + self._dropped(self.ffn(x)))
        if self.parallel:
            normed = self.attention_norm(x)
            attended = self._dropped(self.attention(normed, context))
            other = normed if self.ffn_norm is None else self.ffn_norm(x)
            return x + attended + self._dropped(self.ffn(other))
        assert self.ffn_norm is not None
        if context.few_rows:  # no dropout: norms, layers and sums are one kernel each time
            x = self.attention(x, context, norm=self.attention_norm, residual=x)
            return self.ffn(x, norm=self.ffn_norm, residual=x, few_rows=True)
        x = x + self._dropped(self.attention(self.attention_norm(x), context))
        return x + self._dropped(self.ffn(self.ffn_norm(x)))


def call_block(block: nn.Module, x: Tensor, context: Context) -> Tensor:
    out: Tensor = block(x, context)
    return out


BlockCall = Callable[[nn.Module, Tensor, Context], Tensor]
_compiled_calls: weakref.WeakKeyDictionary[Trunk, BlockCall] = weakref.WeakKeyDictionary()


def compiled_call(trunk: Trunk, options: dict[str, Any]) -> BlockCall:
    """`call_block`, compiled for all blocks of a trunk: one graph serves them, as weights are inputs of it.

    Not kept in the trunk, which can so be copied and pickled. Its code is a copy: torch counts what it compiled by
    code object, and after eight compiles no more, however many models they belonged to.
    """
    if trunk not in _compiled_calls:
        own = types.FunctionType(call_block.__code__.replace(), call_block.__globals__)
        _compiled_calls[trunk] = torch.compile(own, **options)
    return _compiled_calls[trunk]


def recomputing(call: BlockCall) -> BlockCall:
    """The same call, which keeps nothing but its input for the backward pass, and computes the rest again there."""

    def recomputed(block: nn.Module, x: Tensor, context: Context) -> Tensor:
        out: Tensor = checkpoint(call, block, x, context, use_reentrant=False)
        return out

    return recomputed


def require_tokens(name: str, tokens: object) -> None:
    """Refuse what is no tensor, such as a text or a list of ints."""
    if not isinstance(tokens, Tensor):
        raise TypeError(
            f"{name} must be an int tensor [batch, length], got {type(tokens).__name__}: for a text, pass "
            "torch.tensor([model.tokenizer.encode(text).ids])"
        )


def check_mask(mask: Tensor, tokens: Tensor) -> None:
    """Refuse a key_padding_mask that does not go with these tokens."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        came = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"key_padding_mask must be a bool tensor, True for real tokens (mask.bool()); got {came}")
    if mask.shape != tokens.shape:
        raise ValueError(f"key_padding_mask must be {list(tokens.shape)} like tokens, got {list(mask.shape)}")


class Trunk(nn.Module):
    """From tokens to hidden states: embeddings, positions and blocks. What both kinds of models share."""

    compile_options: dict[str, Any] | None = None  # of torch.compile for the blocks; None: they are not compiled
    checkpoint_activations = False  # of blocks in training: all but their inputs are computed again
    dense = False  # attention by a table of all scores: see dense.py

    def __init__(self, config: ModelConfig, position: Position) -> None:
        super().__init__()
        self.config, self.position = config, position
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.token_types = nn.Embedding(config.token_types, config.d_model) if config.token_types else None
        self.embedding_norm = make_norm(config) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer, position.gates()) for layer in range(config.num_layers))
        self.final_norm = make_norm(config) if config.final_norm and config.norm_place == "pre" else None

    def forward(
        self,
        tokens: Tensor,
        *,
        cache: KeyValueCache | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        token_types: Tensor | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Hidden states [B, T, d_model] of tokens [B, T]; those that each block gets are added to `states`."""
        self._check_tokens(tokens)
        if key_padding_mask is not None:
            check_mask(key_padding_mask, tokens)
        span = own_span(tokens, key_padding_mask)
        if span is not None and cache is not None:
            raise ValueError("a cache and context_parallel do not combine: a cache holds whole texts")
        start = 0 if cache is None else cache.length
        length = tokens.shape[1] if span is None else span.total
        limit = self.position.max_length
        longest = start + length if cu_seqlens is None else _longest(cu_seqlens, limit)
        if limit is not None and longest > limit:
            raise ValueError(
                f"{self.config.position} positions end at {limit} tokens, got {longest}: "
                "use a shorter text, or a position method without a limit such as alibi"
            )
        if cache is None:
            positions = self._positions(tokens, key_padding_mask, cu_seqlens, span)
            position = self._position_for(length, cu_seqlens)
            context = Context(position, positions, position.bias(), None, key_padding_mask, cu_seqlens)
            if self.dense:
                self._make_dense(context, length, span)
            return self._hidden(tokens, token_types, context, states)
        if self.dense:
            raise ValueError("dense attention computes whole texts at once: use it without a cache")
        self._enter_cache(cache, tokens, key_padding_mask, cu_seqlens)

        def compute(part: Tensor) -> Tensor:
            whole = cache.length + part.shape[1] if cache.growing else cache.capacity
            position = self.position.at_length(whole, growing=cache.growing)
            context = Context(
                position,
                cache.positions(part.shape[1]),
                position.bias(),
                cache,
                rotation=cache.rotation(position),
                few_rows=cache.has_few_rows and not (self.training or torch.is_grad_enabled()),
            )
            return self._hidden(part, token_types, context)

        return cache.feed(tokens, compute)

    def _make_dense(self, context: Context, length: int, span: Span | None) -> None:
        """Say so in the context, with what is added to the scores where all layers share it."""
        if context.key_padding_mask is not None or context.cu_seqlens is not None or span is not None:
            raise ValueError("dense attention is for whole rows: no padding, no packed documents and no context")
        context.dense = True
        if not self.config.has_gates:
            weight = self.embedding.weight
            context.score_table = score_table(context.bias, length, causal=self.config.causal, like=weight)

    def norm_bounds(self) -> tuple[Tensor, Tensor]:
        """With qk_norm: what no norm of a query [layers, heads] or of a key [layers, key heads] exceeds."""
        modules = [module for module in self.modules() if isinstance(module, SelfAttention)]
        queries = [module.query_norm.largest() for module in modules if isinstance(module.query_norm, HeadNorm)]
        keys = [module.key_norm.largest() for module in modules if isinstance(module.key_norm, HeadNorm)]
        return torch.stack(queries), torch.stack(keys)

    def _hidden(
        self, tokens: Tensor, token_types: Tensor | None, context: Context, states: list[Tensor] | None = None
    ) -> Tensor:
        x = self.embedding(tokens)
        if self.token_types is not None:
            if token_types is None:
                token_types = torch.zeros_like(tokens)
            else:
                self._check_token_types(token_types, tokens)
            x = x + self.token_types(token_types)
        elif token_types is not None:
            raise ValueError("token_types were given, but the model has none (token_types=0)")
        x = context.position.embed(x, context.positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = self.dropout(x)
        call = self._call_of_block(context.cache)
        for block in self.blocks:
            if states is not None:
                states.append(x)
            x = call(block, x, context)
        return x if self.final_norm is None else self.final_norm(x)

    def _position_for(self, length: int, cu_seqlens: Tensor | None) -> Position:
        """The position method for rows of this length, or documents in one: the longest counts, which is read."""
        if cu_seqlens is not None and self.position.depends_on_length:
            length = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
        return self.position.at_length(length)

    def compile_blocks(self, options: dict[str, Any] | None) -> None:
        self.compile_options = options
        _compiled_calls.pop(self, None)

    def _call_of_block(self, cache: KeyValueCache | None) -> BlockCall:
        """How blocks are called: in training compiled, and computed again backward, if that was asked for."""
        if cache is not None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return call_block
        call = call_block if self.compile_options is None else compiled_call(self, self.compile_options)
        return recomputing(call) if self.checkpoint_activations else call

    def _check_tokens(self, tokens: Tensor) -> None:
        require_tokens("tokens", tokens)
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be [batch, length], got shape {list(tokens.shape)}")
        if tokens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"tokens must be int32 or int64, got {tokens.dtype}")
        if not is_eager(tokens) or tokens.device.type != "cpu" or tokens.numel() == 0:
            return
        low, high = tokens.aminmax()
        if int(low) < 0 or int(high) >= self.config.vocab_size:
            worst = int(low) if int(low) < 0 else int(high)
            raise ValueError(f"tokens must lie in [0, {self.config.vocab_size}), the vocabulary; got {worst}")

    def _check_token_types(self, token_types: Tensor, tokens: Tensor) -> None:
        if token_types.shape != tokens.shape:
            raise ValueError(f"token_types must be {list(tokens.shape)} like tokens, got {list(token_types.shape)}")
        if token_types.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"token_types must be int32 or int64, got {token_types.dtype}")
        if not is_eager(token_types) or token_types.device.type != "cpu" or token_types.numel() == 0:
            return  # reading them would break the graph, or wait for the GPU
        count = self.config.token_types
        low, high = (int(value) for value in token_types.aminmax())
        if low < 0 or high >= count:
            raise ValueError(
                f"token_types must lie in [0, {count}), as the model has token_types={count}; "
                f"got {low if low < 0 else high}"
            )

    def _enter_cache(
        self, cache: KeyValueCache, tokens: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> None:
        if not self.config.causal:
            raise ValueError("a cache needs causal attention")
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens and a cache do not combine: a cache holds one sequence a row")
        if tokens.shape[0] != cache.batch_size:
            raise ValueError(f"the cache holds {cache.batch_size} rows, got tokens with {tokens.shape[0]}")
        if mask is not None:
            cache.pad_left(mask)

    def _positions(
        self, tokens: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, span: Span | None = None
    ) -> Tensor:
        """The position of each token in its own text, int64 [B or 1, T]: padding and other documents don't count."""
        index = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if span is not None:
            index = index + span.start
        if cu_seqlens is not None:
            borders = cu_seqlens.to(torch.int64)
            place = index - borders[torch.searchsorted(borders, index, right=True) - 1]
            return place.clamp(
                0, self.position.max_length and self.position.max_length - 1
            )  # attention checks borders
        if span is not None and span.first is not None:
            return (index - span.first[:, None]).clamp_min(0)
        if mask is not None and mask.shape[1]:
            return (index - mask.to(torch.int8).argmax(-1)[:, None]).clamp_min(0)
        return index


def _longest(cu_seqlens: Tensor, limit: int | None) -> int:
    """The longest document, where there is a limit to it and it can be read without waiting for a GPU."""
    if limit is None or cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling() or len(cu_seqlens) < 2:
        return 0
    return int(cu_seqlens.diff().max())
