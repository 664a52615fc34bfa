"""Folders as they lie on the disk after a download, with random weights, for families that transformers has not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

Tensors = dict[str, Tensor]
VOCABULARY = 61
HEADS, WIDTH, HIDDEN, LAYERS = 6, 48, 40, 2

BAICHUAN: dict[str, Any] = {
    "model_type": "baichuan",
    "architectures": ["BaichuanForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"},
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "model_max_length": 64,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
}
BERT: dict[str, Any] = {
    "attention_probs_dropout_prob": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": VOCABULARY,
}
MOSAIC = BERT | {"alibi_starting_size": 512, "position_embedding_type": "absolute", "model_type": "bert"}
DNABERT = {name: value for name, value in MOSAIC.items() if name != "model_type"}
JINA = BERT | {"model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu"}


def write_folder(folder: Path, config: dict[str, Any], tensors: Tensors, files: int = 1) -> Path:
    """A folder with config.json and weights, in one file or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(tensors)
    places = {}
    for part in range(files):
        file = f"model-{part + 1:05}-of-{files:05}.safetensors"
        mine = names[part::files]
        safetensors.torch.save_file({name: tensors[name] for name in mine}, folder / file)
        places |= dict.fromkeys(mine, file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


class Random:
    """Random tensors by name: matrices that keep sizes, norms around 1."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}
        self.generator = torch.Generator().manual_seed(3)

    def linear(self, name: str, rows: int, columns: int, bias: bool = True) -> None:
        self.tensors[f"{name}.weight"] = self.noise(rows, columns) / columns**0.5
        if bias:
            self.tensors[f"{name}.bias"] = 0.3 * self.noise(rows)

    def norm(self, name: str, width: int = WIDTH, bias: bool = True) -> None:
        self.tensors[f"{name}.weight"] = 1.0 + 0.2 * self.noise(width)
        if bias:
            self.tensors[f"{name}.bias"] = 0.3 * self.noise(width)

    def table(self, name: str, rows: int) -> None:
        self.tensors[f"{name}.weight"] = self.noise(rows, WIDTH)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)


def baichuan_tensors() -> Tensors:
    random = Random()
    random.table("model.embed_tokens", VOCABULARY)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        random.norm(f"{at}.input_layernorm", bias=False)
        random.norm(f"{at}.post_attention_layernorm", bias=False)
        random.linear(f"{at}.self_attn.W_pack", 3 * WIDTH, WIDTH, bias=False)
        random.linear(f"{at}.self_attn.o_proj", WIDTH, WIDTH, bias=False)
        random.linear(f"{at}.mlp.gate_proj", HIDDEN, WIDTH, bias=False)
        random.linear(f"{at}.mlp.up_proj", HIDDEN, WIDTH, bias=False)
        random.linear(f"{at}.mlp.down_proj", WIDTH, HIDDEN, bias=False)
    random.norm("model.norm", bias=False)
    random.linear("lm_head", VOCABULARY, WIDTH, bias=False)
    return random.tensors


def _embeddings(random: Random, prefix: str) -> None:
    random.table(f"{prefix}embeddings.word_embeddings", VOCABULARY)
    random.table(f"{prefix}embeddings.token_type_embeddings", 2)
    random.norm(f"{prefix}embeddings.LayerNorm")


def _masked_head(random: Random) -> None:
    random.linear("cls.predictions.transform.dense", WIDTH, WIDTH)
    random.norm("cls.predictions.transform.LayerNorm")
    random.tensors["cls.predictions.decoder.bias"] = 0.3 * random.noise(VOCABULARY)


def mosaic_tensors(prefix: str = "bert.", head: bool = True) -> Tensors:
    random = Random()
    _embeddings(random, prefix)
    for layer in range(LAYERS):
        at = f"{prefix}encoder.layer.{layer}"
        random.linear(f"{at}.attention.self.Wqkv", 3 * WIDTH, WIDTH)
        random.linear(f"{at}.attention.output.dense", WIDTH, WIDTH)
        random.norm(f"{at}.attention.output.LayerNorm")
        random.linear(f"{at}.mlp.gated_layers", 2 * HIDDEN, WIDTH, bias=False)
        random.linear(f"{at}.mlp.wo", WIDTH, HIDDEN)
        random.norm(f"{at}.mlp.layernorm")
    if head:
        _masked_head(random)
    return random.tensors


def jina_tensors(prefix: str = "", code: bool = False, head: bool = False) -> Tensors:
    random = Random()
    _embeddings(random, prefix)
    for layer in range(LAYERS):
        at = f"{prefix}encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            random.linear(f"{at}.attention.self.{name}", WIDTH, WIDTH)
        random.linear(f"{at}.attention.output.dense", WIDTH, WIDTH)
        random.norm(f"{at}.attention.output.LayerNorm")
        if code:
            random.norm(f"{at}.attention.self.layer_norm_q")
            random.norm(f"{at}.attention.self.layer_norm_k")
            random.norm(f"{at}.layer_norm_1")
            random.norm(f"{at}.layer_norm_2")
        random.linear(f"{at}.mlp.{'up_gated_layer' if code else 'gated_layers'}", 2 * HIDDEN, WIDTH, bias=False)
        random.linear(f"{at}.mlp.{'down_layer' if code else 'wo'}", WIDTH, HIDDEN)
        if not code:
            random.norm(f"{at}.mlp.layernorm")
    if head:
        _masked_head(random)
    return random.tensors
