"""Falcon with ALiBi (the RW models): one, some or all key heads, one block after the other or side by side.

Falcon divides scores and bias by the square root of a head's width, so that its slopes are the paper's over that. Its
published code rounds the paper's slopes to bfloat16, and so they are rounded here. It rounds the whole bias as well,
which is wrong by more the longer the text is, and not repeated. The paper's own slopes:
load(..., position_options={"slopes": None}).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from trainshort.models.checkpoints.fields import MOST_HEADS, Fields
from trainshort.models.checkpoints.layout import Layout, Source, grouped_qkv
from trainshort.models.config import ModelConfig
from trainshort.ops.bias import alibi_slopes

PREFIX = "transformer."
OLD_NAMES = ("RefinedWeb", "RefinedWebModel")  # of the model type, in files from before transformers had it

MODULES = {
    "trunk.embedding": "word_embeddings",
    "trunk.blocks.N.attention_norm": "h.N.input_layernorm",
    "trunk.blocks.N.attention.qkv": "h.N.self_attention.query_key_value",
    "trunk.blocks.N.attention.out": "h.N.self_attention.dense",
    "trunk.blocks.N.ffn_norm": "h.N.post_attention_layernorm",
    "trunk.blocks.N.ffn.up": "h.N.mlp.dense_h_to_4h",
    "trunk.blocks.N.ffn.down": "h.N.mlp.dense_4h_to_h",
    "trunk.final_norm": "ln_f",
    "head": "lm_head",
}
TWO_NORMS = {"trunk.blocks.N.attention_norm": "h.N.ln_attn", "trunk.blocks.N.ffn_norm": "h.N.ln_mlp"}


def is_family(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in ("falcon", *OLD_NAMES)


def layout(fields: Fields, names: Collection[str]) -> Layout:
    if not fields.flag("alibi", False):
        raise fields.error("alibi", "must be true: without it a Falcon has rotary positions, and is no ALiBi model")
    since = fields.values.get("model_type") not in OLD_NAMES  # then these two are the default
    new = fields.flag("new_decoder_architecture", False)
    parallel = fields.flag("parallel_attn", since)
    if new and not parallel:
        raise fields.error("parallel_attn", "must be true with new_decoder_architecture")
    heads = fields.size("num_attention_heads", "n_head", most=MOST_HEADS)
    width = fields.size("hidden_size", "n_embed")
    if new:
        kv_heads = fields.size("num_kv_heads", "n_head_kv", default=heads, most=MOST_HEADS)
    else:
        kv_heads = 1 if fields.flag("multi_query", since) else heads
    two_norms = new and fields.size("num_ln_in_parallel_attn", default=2, most=2) == 2
    biases = fields.flag("bias", False)
    config = ModelConfig(
        vocab_size=fields.size("vocab_size"),
        d_model=width,
        num_layers=fields.size("num_hidden_layers", "n_layer"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        d_ff=fields.size("ffn_hidden_size", default=4 * width),
        position_options={
            "slopes": alibi_slopes(heads, "cpu").to(torch.bfloat16).tolist(),
            "scale": (width / heads) ** -0.5,
        },
        norm_eps=fields.epsilon("layer_norm_epsilon", 1e-5),
        parallel_residual=parallel,
        parallel_norms=two_norms,
        activation=fields.activation("activation", "gelu"),
        qkv_bias=biases,
        attention_out_bias=biases,
        ffn_bias=biases,
        ffn_out_bias=biases,
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )
    qkv = Source((MODULES["trunk.blocks.N.attention.qkv"],), grouped_qkv(kv_heads, heads // kv_heads, config.width))
    return Layout(
        config=config,
        modules={**MODULES, **(TWO_NORMS if two_norms else {}), "trunk.blocks.N.attention.qkv": qkv},
        copies={"lm_head.weight": "word_embeddings.weight"} if config.tie_embeddings else {},
    )
