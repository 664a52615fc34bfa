"""The published models by their configs: as many parameters as are known of each, counted without memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainshort as ts
from trainshort.models.checkpoints.fields import Fields
from trainshort.models.checkpoints.public import FAMILIES

HEAD = {"cls.predictions.transform.dense.weight", "cls.predictions.decoder.bias"}
BERT = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "intermediate_size": 3072}
JINA = BERT | {"model_type": "bert", "position_embedding_type": "alibi", "vocab_size": 30528}

PUBLISHED: dict[str, tuple[int, dict[str, Any], set[str]]] = {
    "bloom-560m": (
        559_214_592,
        {"model_type": "bloom", "n_embed": 1024, "n_head": 16, "n_layer": 24, "vocab_size": 250880},
        set(),
    ),
    "mpt-7b": (
        6_649_286_656,
        {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432},
        set(),
    ),
    "falcon-rw-1b": (
        1_311_625_216,
        {
            "model_type": "falcon", "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 24,
            "vocab_size": 50304, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False,
        },
        set(),
    ),
    "baichuan-13b": (
        13_264_901_120,
        {
            "model_type": "baichuan", "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 40,
            "intermediate_size": 13696, "vocab_size": 64000,
        },
        set(),
    ),
    "mosaic-bert-base": (137_400_384, BERT | {"alibi_starting_size": 512, "vocab_size": 30528}, HEAD),
    "dnabert-2-117m": (117_074_176, BERT | {"alibi_starting_size": 512, "vocab_size": 4096}, HEAD),
    "jina-v2-base-en": (136_777_728, JINA, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_many_parameters_as_published(name: str) -> None:
    count, config, tensors = PUBLISHED[name]
    (family,) = [each for each in FAMILIES.values() if each.is_family(config)]
    shape = family.layout(Fields(config, Path("config.json")), tensors).config
    with torch.device("meta"):
        model = ts.LanguageModel(shape) if shape.causal else ts.Encoder(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
