"""MosaicBERT, and what was made from its code: DNABERT-2 and lodestone. Post-norm encoders with a gated feed-forward.

Their configs say "absolute" positions and a limit of 512 tokens, and neither is so; what tells them is
alibi_starting_size. Some have no head for masked tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trainshort.models.checkpoints.fields import MOST_HEADS, Fields
from trainshort.models.checkpoints.layout import Layout, Source
from trainshort.models.config import ModelConfig

PREFIX = "bert."
# What BERT's code stores besides: numbers that are counted anew, and heads for other tasks than masked tokens.
UNUSED = r"embeddings\.(position_ids|token_type_ids)|(encoder\.)?alibi|pooler\..*|cls\.seq_relationship\..*"

EMBEDDINGS: dict[str, str | Source] = {
    "trunk.embedding": "embeddings.word_embeddings",
    "trunk.token_types": "embeddings.token_type_embeddings",
    "trunk.embedding_norm": "embeddings.LayerNorm",
}
LAYERS: dict[str, str | Source] = {
    "trunk.blocks.N.attention.qkv": "encoder.layer.N.attention.self.Wqkv",
    "trunk.blocks.N.attention.out": "encoder.layer.N.attention.output.dense",
    "trunk.blocks.N.attention_norm": "encoder.layer.N.attention.output.LayerNorm",
    "trunk.blocks.N.ffn.up": "encoder.layer.N.mlp.gated_layers",
    "trunk.blocks.N.ffn.down": "encoder.layer.N.mlp.wo",
    "trunk.blocks.N.ffn_norm": "encoder.layer.N.mlp.layernorm",
}
HEAD: dict[str, str | Source] = {
    "head_dense": "cls.predictions.transform.dense",
    "head_norm": "cls.predictions.transform.LayerNorm",
    "head": "cls.predictions.decoder",
}


def is_family(config: Mapping[str, Any]) -> bool:
    return "alibi_starting_size" in config


def layout(fields: Fields, names: Collection[str]) -> Layout:
    return encoder_layout(fields, names, LAYERS, activation="gelu")


def encoder_layout(
    fields: Fields, names: Collection[str], layers: Mapping[str, str | Source], activation: str, **options: Any
) -> Layout:
    """What all encoders of these families share. activation: of the gate; options: of ModelConfig."""
    has_head = "cls.predictions.transform.dense.weight" in names
    if has_head:
        fields.only("tie_word_embeddings", True)
    if has_head and fields.activation("hidden_act", "gelu") != activation:
        raise fields.error("hidden_act", f"must be {activation}, as the gate is, with a masked-token head")
    config = ModelConfig(
        vocab_size=fields.size("vocab_size"),
        d_model=fields.size("hidden_size"),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=fields.size("num_attention_heads", most=MOST_HEADS),
        d_ff=fields.size("intermediate_size"),
        causal=False,
        norm_place="post",
        norm_eps=fields.epsilon("layer_norm_eps", 1e-12),
        embedding_norm=True,
        activation=activation,
        gated=True,
        qkv_bias=True,
        attention_out_bias=True,
        ffn_out_bias=True,
        head_bias=has_head,
        masked_head=has_head,
        token_types=fields.size("type_vocab_size", default=2),
        **options,
    )
    head = dict(HEAD)
    if "cls.predictions.decoder.bias" not in names:  # two names of one tensor: files may have either, or both
        head["head.bias"] = "cls.predictions.bias"
    return Layout(
        config=config,
        modules={**EMBEDDINGS, **layers, **head},
        copies={
            "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
            "cls.predictions.bias": "cls.predictions.decoder.bias",
        },
        unused=UNUSED,
    )
