"""Small BLOOM, MPT and Falcon models of transformers, with weights large enough that every part matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

VOCABULARY = 61
FALCON: dict[str, dict[str, Any]] = {
    "multi_query": {"multi_query": True},
    "like_rw": {"multi_query": False, "parallel_attn": False, "bias": True},
    "all_heads_parallel": {"multi_query": False, "parallel_attn": True},
    "grouped": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "grouped_one_norm": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
}


def bloom(heads: int = 6, **changes: Any) -> Any:
    fields = {"vocab_size": VOCABULARY, "hidden_size": 8 * heads, "n_layer": 2, "n_head": heads}
    return lively(transformers.BloomForCausalLM(transformers.BloomConfig(**(fields | changes))))


def mpt(heads: int = 6, attention: dict[str, Any] | None = None, **changes: Any) -> Any:
    fields = {
        "vocab_size": VOCABULARY,
        "d_model": 8 * heads,
        "n_layers": 2,
        "n_heads": heads,
        "max_seq_len": 64,
        "attn_config": attention or {},
    }
    return lively(transformers.MptForCausalLM(transformers.MptConfig(**(fields | changes))))


def falcon(heads: int = 6, **changes: Any) -> Any:
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8 * heads,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "alibi": True,
    }
    return lively(transformers.FalconForCausalLM(transformers.FalconConfig(**(fields | changes))))


MODELS: dict[str, Callable[[], Any]] = {
    "bloom-6": lambda: bloom(6),
    "bloom-8": lambda: bloom(8),
    "bloom-11-untied": lambda: bloom(11, tie_word_embeddings=False),
    "mpt-6": lambda: mpt(6),
    "mpt-8-clipped": lambda: mpt(8, {"clip_qkv": 0.7}),
    "mpt-5-scaled": lambda: mpt(5, {"softmax_scale": 0.2}),
    **{f"falcon-6-{name}": lambda options=options: falcon(6, **options) for name, options in FALCON.items()},
    "falcon-8": lambda: falcon(8, num_kv_heads=8),
    "falcon-71": lambda: falcon(71, multi_query=False),
}


def lively(model: nn.Module) -> nn.Module:
    """Other weights than the small ones that transformers starts with."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                is_norm = name.endswith("weight")
                parameter.copy_(1.0 + 0.2 * noise if is_norm else 0.3 * noise)
            elif "emb" in name or "wte" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
    model.generation_config.eos_token_id = None  # so that generation goes on
    model.generation_config.pad_token_id = 0
    return model.eval()
