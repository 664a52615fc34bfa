"""A model of ours as a BLOOM folder, which transformers loads: the way back through the table of names in bloom.py.

BLOOM has one shape. A model that differs from it anywhere would say something else there, and is refused with a list
of all that differs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainshort.common.files import new_folder
from trainshort.common.messages import shown
from trainshort.common.tokenizer_json import END_NAMES
from trainshort.models.checkpoints.bloom import MODULES, PREFIX, SHAPE
from trainshort.models.checkpoints.layout import source_of
from trainshort.models.checkpoints.shards import SINGLE
from trainshort.models.checkpoints.weights import save_weights, weights_of
from trainshort.models.config import ModelConfig
from trainshort.models.encoder import Encoder
from trainshort.models.language_model import LanguageModel
from trainshort.ops.bias import LinearBias, alibi_slopes

SIZES = ("vocab_size", "d_model", "num_layers", "num_heads")
# Any will do: BLOOM has it too, or it says nothing about a causal model with ALiBi.
FREE = (*SIZES, "norm_eps", "tie_embeddings", "dropout", "attention_dropout", "masked_head", "max_length")
DERIVED = ("num_kv_heads", "head_dim", "d_ff", "attention_scale", "position_options")  # compared as what they come to
SPECIAL = {"bos": ("<s>",), "eos": END_NAMES, "pad": ("<pad>",), "unk": ("<unk>",)}


def save_bloom(model: LanguageModel | Encoder, folder: str | Path) -> None:
    """Write a model to a folder that is not there yet, or empty."""
    if wrong := list(_differences(model)):
        raise ValueError(
            f"the model does not fit BLOOM's shape: {'; '.join(wrong)}. `trainshort train --model bloom-560m`, with "
            "sizes of your own, trains one that does"
        )
    tensors = _named(model)
    special = _special_tokens(model.tokenizer)
    with new_folder(Path(folder)) as partial:
        save_weights(tensors, partial / SINGLE)
        _write_json(partial / "config.json", _config(model.config, next(iter(tensors.values())).dtype, special))
        if model.tokenizer is not None:
            (partial / "tokenizer.json").write_text(model.tokenizer.to_str(), encoding="utf-8")
            names = {f"{kind}_token": token for kind, (token, _) in special.items()}
            _write_json(partial / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})


def _differences(model: LanguageModel | Encoder) -> Iterator[str]:
    """`activation is 'gelu', BLOOM has 'gelu_tanh'` for all that differs."""
    config = model.config
    for field in fields(ModelConfig):
        if field.name in (*FREE, *DERIVED):
            continue
        came, wanted = getattr(config, field.name), SHAPE.get(field.name, field.default)
        if came != wanted:
            yield f"{field.name} is {shown(came)}, BLOOM has {wanted!r}"
    for name, came, wanted in (
        ("num_kv_heads", config.kv_heads, config.num_heads),
        ("head_dim", config.width, config.d_model / config.num_heads),
        ("d_ff", config.hidden, 4 * config.d_model),
        ("attention_scale", config.score_scale, config.width**-0.5),
    ):
        if not math.isclose(came, wanted):
            yield f"{name} is {came:g}, BLOOM has {wanted:g}"
    if config.position == "alibi":
        yield from _position_differences(model)
    dtypes = {tensor.dtype for tensor in model.parameters() if tensor.dim() > 1}
    if len(dtypes) > 1:
        yield f"weights are {' and '.join(sorted(map(str, dtypes)))}, BLOOM has one dtype"


def _position_differences(model: LanguageModel | Encoder) -> Iterator[str]:
    options = model.config.position_options
    for name, wanted in (("rotary", False), ("scaling", "none")):
        if options.get(name, wanted) != wanted:
            yield f"position_options[{name!r}] is {shown(options[name])}, BLOOM has {wanted!r}"
    bias = model.position.bias()
    assert isinstance(bias, LinearBias)
    slopes, paper = bias.slopes.detach().double().cpu(), alibi_slopes(model.config.num_heads, "cpu").double()
    if slopes.shape != paper.shape or not torch.allclose(slopes, paper, rtol=1e-6, atol=0.0):
        came = ", ".join(f"{slope:.4g}" for slope in slopes.flatten()[:4].tolist())
        yield f"slopes are {came}, ..., BLOOM has the paper's for {len(paper)} heads"


def _named(model: LanguageModel | Encoder) -> dict[str, Tensor]:
    """The tensors by BLOOM's names, queries, keys and values head by head."""
    named = {}
    for name, tensor in weights_of(model).items():
        if name == "position.log_slopes":  # those of the paper, or the model would not fit
            continue
        (target,) = source_of(MODULES, name).names
        if ".attention.qkv." in name:
            heads = tensor.unflatten(0, (3, model.config.num_heads, model.config.width))
            tensor = heads.transpose(0, 1).reshape(tensor.shape).contiguous()
        named[target if target.startswith("lm_head.") else PREFIX + target] = tensor
    return named


def _config(config: ModelConfig, dtype: torch.dtype, special: dict[str, tuple[str, int]]) -> dict[str, Any]:
    return {
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "layer_norm_epsilon": config.norm_eps,
        "hidden_dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": str(dtype).removeprefix("torch."),
        # Named even where there is none: transformers would take 1 and 2, which may be any tokens.
        **{f"{kind}_token_id": special[kind][1] if kind in special else None for kind in ("bos", "eos", "pad")},
    }


def _special_tokens(tokenizer: Any) -> dict[str, tuple[str, int]]:
    """The tokens with a meaning, and their ids, by the names that they usually have."""
    found = {}
    for kind, names in SPECIAL.items() if tokenizer is not None else ():
        ids = ((name, tokenizer.token_to_id(name)) for name in names)
        if (token := next((each for each in ids if each[1] is not None), None)) is not None:
            found[kind] = token
    return found


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
