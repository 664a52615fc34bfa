"""BLOOM: pre-norm, a norm after the embedding, biases everywhere, queries, keys and values stored head by head."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trainshort.models.checkpoints.fields import MOST_HEADS, Fields
from trainshort.models.checkpoints.layout import Layout, Source, grouped_qkv
from trainshort.models.config import ModelConfig

PREFIX = "transformer."

MODULES = {
    "trunk.embedding": "word_embeddings",
    "trunk.embedding_norm": "word_embeddings_layernorm",
    "trunk.blocks.N.attention_norm": "h.N.input_layernorm",
    "trunk.blocks.N.attention.qkv": "h.N.self_attention.query_key_value",
    "trunk.blocks.N.attention.out": "h.N.self_attention.dense",
    "trunk.blocks.N.ffn_norm": "h.N.post_attention_layernorm",
    "trunk.blocks.N.ffn.up": "h.N.mlp.dense_h_to_4h",
    "trunk.blocks.N.ffn.down": "h.N.mlp.dense_4h_to_h",
    "trunk.final_norm": "ln_f",
    "head": "lm_head",
}

# What makes a model BLOOM-like, beside its sizes; all other fields of a ModelConfig are as by default.
SHAPE: dict[str, Any] = {
    "embedding_norm": True,
    "activation": "gelu_tanh",
    "qkv_bias": True,
    "attention_out_bias": True,
    "ffn_bias": True,
    "ffn_out_bias": True,
}


def is_family(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "bloom"


def layout(fields: Fields, names: Collection[str]) -> Layout:
    fields.only("apply_residual_connection_post_layernorm", False)
    fields.only("slow_but_exact", False)
    config = ModelConfig(
        vocab_size=fields.size("vocab_size"),
        d_model=fields.size("hidden_size", "n_embed"),
        num_layers=fields.size("n_layer", "num_hidden_layers"),
        num_heads=fields.size("n_head", "num_attention_heads", most=MOST_HEADS),
        norm_eps=fields.epsilon("layer_norm_epsilon", 1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        **SHAPE,
    )
    qkv = Source((MODULES["trunk.blocks.N.attention.qkv"],), grouped_qkv(config.num_heads, 1, config.width))
    return Layout(
        config=config,
        modules={**MODULES, "trunk.blocks.N.attention.qkv": qkv},
        copies={"lm_head.weight": "word_embeddings.weight"} if config.tie_embeddings else {},
    )
