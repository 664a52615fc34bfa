"""The attention modules of BLOOM, MPT and Falcon with ALiBi, computed by `attention` of this package.

Each is a subclass of its module in transformers that takes the place of the module's class: parameters, names and
hooks are those of the module, and arguments those of the forward that it replaces. The bias that the model around
hands in is not read; `attention_mask` is the padding of transformers_padding.py.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.mpt.modeling_mpt import MptAttention

from trainshort.integrations.transformers_cache import FEW, store
from trainshort.integrations.transformers_padding import register
from trainshort.ops import LinearBias, alibi_slopes, attention
from trainshort.ops.problem import BLOCK
from trainshort.ops.tracing import is_eager

Output = tuple[Tensor, None]

register()  # here, so that a patched model that was pickled finds it in a new process too


class PatchedBloomAttention(BloomAttention):
    stock = BloomAttention

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **others: Any,
    ) -> Output:
        refuse_attentions(output_attentions)
        qkv = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, self.head_dim))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
        context = attend(
            (q, k, v),
            slopes_of(self.num_heads, q),
            self.inv_norm_factor,
            attention_mask,
            (layer_past, self.layer_idx),
            self.attention_dropout.p if self.training else 0.0,
        )
        out = dropout(self.dense(context), p=self.hidden_dropout, training=self.training)
        return residual + out, None


class PatchedMptAttention(MptAttention):
    stock = MptAttention

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **others: Any,
    ) -> Output:
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = (part.transpose(1, 2) for part in qkv.unflatten(-1, (3, self.n_heads, self.head_dim)).unbind(2))
        context = attend(
            (q, k, v),
            slopes_of(self.n_heads, q),
            self.softmax_scale,
            attention_mask,
            (past_key_values, self.layer_idx),
            float(self.attn_dropout_p) if self.training else 0.0,
        )
        return self.out_proj(context), None


class PatchedFalconAttention(FalconAttention):
    stock = FalconAttention

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: Any = None,
        **others: Any,
    ) -> Output:
        refuse_attentions(output_attentions)
        q, k, v = (part.transpose(1, 2) for part in self._split_heads(self.query_key_value(hidden_states)))
        context = attend(
            (q, k, v),
            falcon_slopes_of(self.num_heads, q),
            1.0 / math.sqrt(self.head_dim),
            attention_mask,
            (layer_past, self.layer_idx),
            self.attention_dropout.p if self.training else 0.0,
        )
        return self.dense(context), None


PATCHED = {patched.stock: patched for patched in (PatchedBloomAttention, PatchedMptAttention, PatchedFalconAttention)}


def refuse_attentions(output_attentions: bool | None) -> None:
    if output_attentions:
        raise ValueError(
            "output_attentions=True asks for weights of length x length, which a patched model never has: "
            "call trainshort.unpatch(model) first"
        )


def check_mask(mask: Tensor) -> None:
    if mask.dim() != 2:
        raise ValueError(
            f"a patched model takes an attention_mask [batch, length], got shape {list(mask.shape)}: for masks of "
            "length x length call trainshort.unpatch(model) first; where `generate` made it for a static cache, "
            "patch the whole model, not its base alone"
        )


def attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    slopes: Tensor,
    scale: float,
    mask: Tensor | None,
    past: tuple[Any, int],
    drop: float,
) -> Tensor:
    """Attention of new tokens to those of a cache and to one another: [B, T, H D].

    qkv: [B, heads, T, D] each. past: a cache of transformers or None, and the layer's place in it.
    """
    q, k, v = qkv
    queries = q.shape[2]
    start: int | Tensor = 0
    norms: Tensor | None = None
    if past[0] is not None:
        k, v, start, norms = store(*past, k, v)
    mask = _padding(mask, k)
    query_start: Tensor | None = None
    if isinstance(start, Tensor):
        query_start = start.to(q.device).expand(q.shape[0])
    else:
        k, v, mask, norms = _written(start + queries, k, v, mask, norms)
    out = attention(
        q,
        k,
        v,
        bias=LinearBias(slopes),
        scale=scale,
        key_padding_mask=mask,
        query_start=query_start,
        key_norms=norms if queries <= FEW else None,
        dropout=drop,
    )
    return out.transpose(1, 2).flatten(2)


def _padding(mask: Tensor | None, k: Tensor) -> Tensor | None:
    """The padding of these keys; None where there is none."""
    if mask is None:
        return None
    check_mask(mask)
    if mask.shape[1] == 0:
        return None
    if mask.shape[1] != k.shape[2]:
        raise ValueError(
            f"attention_mask must have a column for each token, cached ones included: {k.shape[2]}; "
            f"it has {mask.shape[1]}"
        )
    return mask.to(k.device)


def _written(
    end: int, k: Tensor, v: Tensor, mask: Tensor | None, norms: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The part of a cache that holds tokens."""
    room = k.shape[2]
    if end > room:
        raise ValueError(f"a cache that forgets cannot be used: {end} tokens were seen and {room} are left in it")
    if end == room:
        return k, v, mask, norms
    blocks = None if norms is None else norms[:, :, : -(-end // BLOCK)]
    return k[:, :, :end], v[:, :, :end], None if mask is None else mask[:, :end], blocks


def slopes_of(heads: int, q: Tensor) -> Tensor:
    """The paper's slopes, as BLOOM and MPT have them."""
    return _kept_slopes(heads, q.device) if is_eager(q) else alibi_slopes(heads, q.device)


def falcon_slopes_of(heads: int, q: Tensor) -> Tensor:
    """Falcon rounds the paper's slopes to bfloat16, and divides its bias like its scores by the root of the width."""
    if is_eager(q):
        return _kept_falcon_slopes(heads, q.shape[3], q.device)
    return alibi_slopes(heads, q.device).bfloat16().float() / math.sqrt(q.shape[3])


@cache
def _kept_slopes(heads: int, device: torch.device) -> Tensor:
    """Kept, so that kernels need not look at them at each call."""
    with torch.inference_mode(False):
        return alibi_slopes(heads, device)


@cache
def _kept_falcon_slopes(heads: int, width: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return alibi_slopes(heads, device).bfloat16().float() / math.sqrt(width)
