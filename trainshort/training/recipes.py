"""Named model sizes: functions that return the fields of a ModelConfig, all but the vocabulary and the positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def tiny() -> dict[str, Any]:
    """0.8 million parameters: minutes on a laptop."""
    return {"num_layers": 4, "d_model": 128, "num_heads": 8}


def small() -> dict[str, Any]:
    """10 million parameters: an evening on a laptop, minutes on a GPU."""
    return {"num_layers": 6, "d_model": 384, "num_heads": 6}


def small_124m() -> dict[str, Any]:
    """The smallest GPT-2: 124 million parameters with its vocabulary."""
    return {"num_layers": 12, "d_model": 768, "num_heads": 12, "activation": "gelu_tanh"}


def medium_350m() -> dict[str, Any]:
    """GPT-2 medium."""
    return {"num_layers": 24, "d_model": 1024, "num_heads": 16, "activation": "gelu_tanh"}


def bloom_560m() -> dict[str, Any]:
    """BLOOM's smallest: a model of this shape, with any sizes, can be written as a BLOOM folder for transformers."""
    return {
        "num_layers": 24,
        "d_model": 1024,
        "num_heads": 16,
        "embedding_norm": True,
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "attention_out_bias": True,
        "ffn_bias": True,
        "ffn_out_bias": True,
    }


def paper_wikitext103() -> dict[str, Any]:
    """The paper's model for WikiText-103, but for its adaptive input and softmax."""
    return {
        "num_layers": 16,
        "d_model": 1024,
        "num_heads": 8,
        "d_ff": 4096,
        "activation": "relu",
        "dropout": 0.3,
        "qkv_bias": True,
        "attention_out_bias": True,
        "ffn_bias": True,
        "ffn_out_bias": True,
    }


def paper_1_3b() -> dict[str, Any]:
    """The paper's model of 1.3 billion parameters."""
    return {**paper_wikitext103(), "num_layers": 25, "d_model": 2048, "num_heads": 16, "d_ff": 8192, "dropout": 0.0}


RECIPES: dict[str, Callable[[], dict[str, Any]]] = {
    "tiny": tiny,
    "small": small,
    "small-124m": small_124m,
    "medium-350m": medium_350m,
    "bloom-560m": bloom_560m,
    "paper-wikitext103": paper_wikitext103,
    "paper-1.3b": paper_1_3b,
}
