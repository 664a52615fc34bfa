"""Jina embeddings v2: post-norm encoders for sentence embeddings. The variant for code has other layers.

In that one queries and keys have a norm over all heads together, the layer's input is added a second time after
attention, with a norm again, and the gate is the second half of the feed-forward layer. The configs are alike: only
the tensors tell which it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from trainshort.models.checkpoints.fields import Fields
from trainshort.models.checkpoints.layout import Layout, Source
from trainshort.models.checkpoints.mosaic_bert import LAYERS as MOSAIC_LAYERS
from trainshort.models.checkpoints.mosaic_bert import encoder_layout

PREFIX = "bert."
GATES = {"geglu": "gelu", "reglu": "relu"}


def _gate_first(rows: Tensor) -> Iterable[Tensor]:
    return reversed(rows.chunk(2))


LAYERS: dict[str, str | Source] = {
    **MOSAIC_LAYERS,
    "trunk.blocks.N.attention.qkv": Source(
        tuple(f"encoder.layer.N.attention.self.{name}" for name in ("query", "key", "value"))
    ),
}
CODE_LAYERS: dict[str, str | Source] = {
    **LAYERS,
    "trunk.blocks.N.attention.query_norm": "encoder.layer.N.attention.self.layer_norm_q",
    "trunk.blocks.N.attention.key_norm": "encoder.layer.N.attention.self.layer_norm_k",
    "trunk.blocks.N.second_norm": "encoder.layer.N.layer_norm_1",
    "trunk.blocks.N.ffn.up": Source(("encoder.layer.N.mlp.up_gated_layer",), _gate_first),
    "trunk.blocks.N.ffn.down": "encoder.layer.N.mlp.down_layer",
    "trunk.blocks.N.ffn_norm": "encoder.layer.N.layer_norm_2",
}


def is_family(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "bert" and config.get("position_embedding_type") == "alibi"


def layout(fields: Fields, names: Collection[str]) -> Layout:
    fields.only("feed_forward_type", *GATES)
    activation = GATES[fields.values.get("feed_forward_type") or "geglu"]
    if "encoder.layer.0.attention.self.layer_norm_q.weight" not in names:
        return encoder_layout(fields, names, LAYERS, activation)
    return encoder_layout(fields, names, CODE_LAYERS, activation, wide_qk_norm=True, second_residual=True)
