"""The shape of a model, complete enough that every public ALiBi model is one of these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from trainshort.common.checks import LARGEST_SIZE, is_finite, is_size
from trainshort.common.settings import Settings, check_type
from trainshort.positions import Position, Shape, build_position, plain_options

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
NORMS = ("layernorm", "layernorm_without_bias", "rmsnorm")
NORM_PLACES = ("pre", "post")
OPTIONAL_SIZES = ("num_kv_heads", "head_dim", "d_ff", "max_length")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """A transformer. Fields that are None follow from the others.

    Args:
        vocab_size: Tokens in the vocabulary.
        d_model: Channels of the hidden states.
        num_layers: Blocks.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, which divide them; None: as many.
        head_dim: Channels of a head; None: d_model / num_heads.
        d_ff: Channels inside the feed-forward layer; None: 4 d_model.
        position: A name from trainshort.positions.
        position_options: Its options, such as `{"trainable": True}`.
        max_length: Needed by learned positions only; other methods have no limit.
        causal: A token sees its past and itself; False for encoders.
        norm: "layernorm", "layernorm_without_bias" or "rmsnorm".
        norm_eps: What norms add under their root.
        norm_place: "pre" (before attention and feed-forward) or "post" (after their residual sums).
        second_residual: With "post", a block's input is added once more after attention, and normed again.
        parallel_residual: Attention and feed-forward side by side.
        parallel_norms: Each of these with a norm of its own.
        embedding_norm: A norm after the embedding.
        final_norm: A norm after the last block.
        activation: "relu", "gelu", "gelu_tanh" or "silu".
        gated: The feed-forward layer is activation(a) * b, with a and b of width d_ff.
        qkv_bias: Of the projections to queries, keys and values.
        attention_out_bias: Of the projection after attention.
        ffn_bias: Of the first linear layer of the feed-forward layer.
        ffn_out_bias: Of its last.
        head_bias: Of the head.
        clip_qkv: Clamp queries, keys and values to this size.
        attention_scale: Of the scores; None: 1/sqrt(head_dim).
        qk_norm: An RMSNorm of each head's queries and keys, before positions act on them.
        wide_qk_norm: A LayerNorm over all heads together instead.
        kv_shift: Keys and values are mixed with those of the token before, by a learned share.
        output_norm: An RMSNorm of each head's output, before the last linear layer of attention.
        output_gate: A gate sigmoid(W x) there, from the layer's normed input x.
        tie_embeddings: The head has the weights of the embedding.
        token_types: BERT-like segment embeddings, if above 0.
        masked_head: Encoders have a head that predicts masked tokens.
        dropout: Of the embeddings and of what attention and feed-forward add, in training.
        attention_dropout: Of attention's weights, in training.

    Example:
        >>> config = ts.ModelConfig(d_model=64, num_layers=2, num_heads=4, position="rotary")
        >>> ts.ModelConfig.from_json(config.to_json()) == config
        True
    """

    vocab_size: int = 256
    d_model: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int | None = None
    head_dim: int | None = None
    d_ff: int | None = None
    position: str = "alibi"
    position_options: Mapping[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    causal: bool = True
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    norm_place: str = "pre"
    second_residual: bool = False
    parallel_residual: bool = False
    parallel_norms: bool = False
    embedding_norm: bool = False
    final_norm: bool = True
    activation: str = "gelu"
    gated: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    ffn_bias: bool = False
    ffn_out_bias: bool = False
    head_bias: bool = False
    clip_qkv: float | None = None
    attention_scale: float | None = None
    qk_norm: bool = False
    wide_qk_norm: bool = False
    kv_shift: bool = False
    output_norm: bool = False
    output_gate: bool = False
    tie_embeddings: bool = True
    token_types: int = 0
    masked_head: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        self._check_sizes()
        for each in fields(self):
            check_type(each.name, str(each.type), getattr(self, each.name))
        self._check_numbers()
        self._check_heads()
        self._check_layout()
        options = plain_options(self.position, self.position_options)
        object.__setattr__(self, "position_options", options)  # what JSON gives back
        self.position_on_meta()  # refuses what it cannot build

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "d_model", "num_layers", "num_heads", *OPTIONAL_SIZES):
            value = getattr(self, name)
            if not is_size(value) and not (value is None and name in OPTIONAL_SIZES):
                limit = f" of at most {LARGEST_SIZE}" if isinstance(value, int) and value > LARGEST_SIZE else ""
                raise ValueError(f"{name} must be a positive int{limit}, got {value!r}")

    def _check_numbers(self) -> None:
        if not 0 <= self.token_types <= LARGEST_SIZE:
            raise ValueError(f"token_types must lie in [0, {LARGEST_SIZE}], got {self.token_types}")
        if not self.norm_eps >= 0:
            raise ValueError(f"norm_eps must be at least 0, got {self.norm_eps}")
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        if self.clip_qkv is not None and not self.clip_qkv > 0:
            raise ValueError(f"clip_qkv must be positive or None, got {self.clip_qkv}")
        for name in ("norm_eps", "attention_scale", "clip_qkv"):
            value = getattr(self, name)
            if value is not None and not is_finite(value):
                raise ValueError(f"{name} must be finite, got {value}")

    def _check_heads(self) -> None:
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(
                f"d_model must be a multiple of num_heads unless head_dim is given, "
                f"got d_model {self.d_model} and num_heads {self.num_heads}"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.kv_heads}"
            )

    def _check_layout(self) -> None:
        """Which kinds of layers there are, and how they are put together."""
        for name, allowed in (("activation", ACTIVATIONS), ("norm", NORMS), ("norm_place", NORM_PLACES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        if self.norm_place == "post" and self.parallel_residual:
            raise ValueError("parallel_residual needs norm_place 'pre'")
        if self.second_residual and self.norm_place == "pre":
            raise ValueError("second_residual needs norm_place 'post'")
        if self.qk_norm and self.wide_qk_norm:
            raise ValueError("qk_norm and wide_qk_norm are two norms of the same queries and keys: choose one")
        if self.parallel_norms and not self.parallel_residual:
            raise ValueError("parallel_norms needs parallel_residual")

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def width(self) -> int:
        """Channels of one head."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def hidden(self) -> int:
        """Channels inside the feed-forward layer."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def score_scale(self) -> float:
        return 1.0 / math.sqrt(self.width) if self.attention_scale is None else self.attention_scale

    @property
    def has_gates(self) -> bool:
        """Whether layers have forget gates, of which a cache keeps the running sums."""
        with torch.device("meta"):
            return self.position_on_meta().gates() is not None

    def position_on_meta(self) -> Position:
        """The position method without values, which needs no memory and no random numbers."""
        with torch.device("meta"):
            return build_position(self.position, self.position_shape, self.position_options)

    @property
    def position_shape(self) -> Shape:
        return Shape(
            d_model=self.d_model,
            num_heads=self.num_heads,
            head_dim=self.width,
            causal=self.causal,
            max_length=self.max_length,
        )


def require_config(config: object) -> None:
    """Refuse what is no ModelConfig, such as a dict of its fields."""
    if not isinstance(config, ModelConfig):
        hint = "ModelConfig(**fields)" if isinstance(config, dict) else "ModelConfig(...)"
        raise TypeError(f"config must be a ModelConfig, got {type(config).__name__}: pass {hint}")
