"""MPT: pre-norm, no biases, and three options of attention: clipped q, k and v, a scale, and steeper slopes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trainshort.models.checkpoints.fields import MOST_HEADS, Fields
from trainshort.models.checkpoints.layout import Layout
from trainshort.models.config import ModelConfig
from trainshort.ops.bias import alibi_slopes

PREFIX = "transformer."
MOST_RATIO = 2**10
PAPER_MAX = 8  # of alibi_bias_max: the last slope of a power of two heads is 2^-8

MODULES = {
    "trunk.embedding": "wte",
    "trunk.blocks.N.attention_norm": "blocks.N.norm_1",
    "trunk.blocks.N.attention.qkv": "blocks.N.attn.Wqkv",
    "trunk.blocks.N.attention.out": "blocks.N.attn.out_proj",
    "trunk.blocks.N.ffn_norm": "blocks.N.norm_2",
    "trunk.blocks.N.ffn.up": "blocks.N.ffn.up_proj",
    "trunk.blocks.N.ffn.down": "blocks.N.ffn.down_proj",
    "trunk.final_norm": "norm_f",
    "head": "lm_head",
}


def is_family(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "mpt"


def layout(fields: Fields, names: Collection[str]) -> Layout:
    attention = fields.inner("attn_config")
    _refuse_others(fields, attention)
    width = fields.size("d_model")
    heads = fields.size("n_heads", most=MOST_HEADS)
    config = ModelConfig(
        vocab_size=fields.size("vocab_size"),
        d_model=width,
        num_layers=fields.size("n_layers"),
        num_heads=heads,
        d_ff=int(width * _ratio(fields)),
        position_options=_slopes(attention, heads),
        norm="layernorm_without_bias",
        norm_eps=fields.epsilon("layer_norm_epsilon" if "layer_norm_epsilon" in fields else "norm_eps", 1e-5),
        clip_qkv=attention.number("clip_qkv") or None,  # 0 is none, too
        attention_scale=attention.number("softmax_scale"),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )
    return Layout(
        config=config,
        modules=MODULES,
        copies={"lm_head.weight": "wte.weight"} if config.tie_embeddings else {},
    )


def _refuse_others(fields: Fields, attention: Fields) -> None:
    """Options of the original code that this model has not. Some readers ignore them, and compute something else."""
    if not attention.flag("alibi", True):
        raise attention.error("alibi", "must be true: with learned or rotary positions this is no ALiBi model")
    attention.only("attn_type", "multihead_attention")
    for name in ("qk_ln", "qk_gn", "prefix_lm", "attn_uses_sequence_id", "rope"):
        attention.only(name, False)
    attention.only("sliding_window_size", -1)
    fields.only("norm_type", "low_precision_layernorm", "layernorm")
    inner = fields.inner("ffn_config")
    inner.only("ffn_type", "mptmlp")
    inner.only("ffn_act_fn", {"name": "gelu"}, {"name": "gelu", "approximate": "none"})
    for where, name in (
        (fields, "logit_scale"),
        (fields, "final_logit_softcapping"),
        (fields, "block_overrides"),
        (attention, "attn_logit_softcapping"),
    ):
        if name in where:
            raise where.error(name, "is not implemented: it must be null")


def _ratio(fields: Fields) -> float:
    """The original code takes fractions too, and cuts the product with the width."""
    ratio = fields.number("expansion_ratio", 4)
    if ratio is None or not 0 < ratio <= MOST_RATIO:
        raise fields.error("expansion_ratio", f"must lie in (0, {MOST_RATIO:,}]")
    return ratio


def _slopes(attention: Fields, heads: int) -> dict[str, Any]:
    """alibi_bias_max b raises the paper's slopes, which go to 2^-8, to the power of b / 8."""
    most = attention.number("alibi_bias_max", PAPER_MAX)
    if most is None or not 0 < most <= 64:
        raise attention.error("alibi_bias_max", "must lie in (0, 64]")
    if most == PAPER_MAX:
        return {}
    return {"slopes": (alibi_slopes(heads, "cpu").double() ** (most / PAPER_MAX)).tolist()}
