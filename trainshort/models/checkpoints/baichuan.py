"""Baichuan-13B and Baichuan2-13B: RMSNorm, SwiGLU, no biases; the second with a head whose rows have length 1.

The 7B models have the same model type and rotary positions. No field says which it is: those have 32 layers and the
field max_position_embeddings, which the 13B models have not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from trainshort.models.checkpoints.fields import MOST_HEADS, Fields
from trainshort.models.checkpoints.layout import Layout, Source
from trainshort.models.config import ModelConfig

PREFIX = "model."
SECOND_VOCABULARY = 125696
ROWS = 1024  # of the head that are normalised at once

MODULES: dict[str, str | Source] = {
    "trunk.embedding": "embed_tokens",
    "trunk.blocks.N.attention_norm": "layers.N.input_layernorm",
    "trunk.blocks.N.attention.qkv": "layers.N.self_attn.W_pack",
    "trunk.blocks.N.attention.out": "layers.N.self_attn.o_proj",
    "trunk.blocks.N.ffn_norm": "layers.N.post_attention_layernorm",
    "trunk.blocks.N.ffn.up": Source(("layers.N.mlp.gate_proj", "layers.N.mlp.up_proj")),
    "trunk.blocks.N.ffn.down": "layers.N.mlp.down_proj",
    "trunk.final_norm": "norm",
    "head": "lm_head",
}


def is_family(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "baichuan"


def layout(fields: Fields, names: Collection[str]) -> Layout:
    layers = fields.size("num_hidden_layers")
    rotary = any(name.endswith("rotary_emb.inv_freq") for name in names)
    if rotary or layers == 32 or "max_position_embeddings" in fields:
        raise ValueError(
            f"{fields.path}: a Baichuan with {layers} layers and max_position_embeddings "
            f"{fields.values.get('max_position_embeddings')!r} has rotary positions, as the 7B models do; only "
            "the 13B models have ALiBi"
        )
    fields.only("tie_word_embeddings", False)
    config = ModelConfig(
        vocab_size=fields.size("vocab_size"),
        d_model=fields.size("hidden_size"),
        num_layers=layers,
        num_heads=fields.size("num_attention_heads", most=MOST_HEADS),
        d_ff=fields.size("intermediate_size"),
        norm="rmsnorm",
        norm_eps=fields.epsilon("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", "silu"),
        gated=True,
        tie_embeddings=False,
    )
    second = config.vocab_size == SECOND_VOCABULARY or "z_loss_weight" in fields
    head = Source(("lm_head",), _normalised) if second else "lm_head"
    return Layout(config=config, modules={**MODULES, "head": head})


def _normalised(weight: Tensor) -> Iterable[Tensor]:
    """Rows of length 1, some at a time: the whole head in float64 would be a second large tensor."""
    return (F.normalize(rows.double(), dim=-1) for rows in weight.split(ROWS))
