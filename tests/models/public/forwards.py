"""What the families without a place in transformers compute, written down plainly from their tensors, in float64.

One text at a time and nothing shared with the package: a whole matrix of scores, and a bias that is counted out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.models.public.folders import HEADS, LAYERS, Tensors

SLOPES = [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]  # of six heads: those of four, then two of the eight


def doubles(tensors: Tensors) -> Tensors:
    return {name: tensor.double() for name, tensor in tensors.items()}


def linear(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    y = x @ tensors[f"{name}.weight"].T
    return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y


def layer_norm(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + 1e-12).sqrt()
    return x * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]


def rms_norm(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * tensors[f"{name}.weight"]


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """q, k, v: [T, width of all heads]."""
    length, width = q.shape[0], q.shape[1] // HEADS
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    outputs = []
    for head in range(HEADS):
        mine = slice(head * width, (head + 1) * width)
        scores = q[:, mine] @ k[:, mine].T / width**0.5 - SLOPES[head] * distance.abs()
        if causal:
            scores = scores.masked_fill(distance < 0, -torch.inf)
        outputs.append(scores.softmax(-1) @ v[:, mine])
    return torch.cat(outputs, dim=-1)


def baichuan(tensors: Tensors, tokens: Tensor, normalised_head: bool) -> Tensor:
    """Logits [T, V] of tokens [T]."""
    tensors = doubles(tensors)
    x = tensors["model.embed_tokens.weight"][tokens]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        q, k, v = linear(tensors, f"{at}.self_attn.W_pack", rms_norm(tensors, f"{at}.input_layernorm", x)).chunk(
            3, -1
        )
        x = x + linear(tensors, f"{at}.self_attn.o_proj", attention(q, k, v, causal=True))
        inner = rms_norm(tensors, f"{at}.post_attention_layernorm", x)
        gate, up = (linear(tensors, f"{at}.mlp.{name}_proj", inner) for name in ("gate", "up"))
        x = x + linear(tensors, f"{at}.mlp.down_proj", gate * torch.sigmoid(gate) * up)
    head = tensors["lm_head.weight"]
    if normalised_head:
        head = head / head.square().sum(-1, keepdim=True).sqrt()
    return rms_norm(tensors, "model.norm", x) @ head.T


def embedded(tensors: Tensors, tokens: Tensor, kinds: Tensor, prefix: str) -> Tensor:
    words = tensors[f"{prefix}embeddings.word_embeddings.weight"][tokens]
    types = tensors[f"{prefix}embeddings.token_type_embeddings.weight"][kinds]
    return layer_norm(tensors, f"{prefix}embeddings.LayerNorm", words + types)


def mosaic(tensors: Tensors, tokens: Tensor, kinds: Tensor, prefix: str = "bert.") -> Tensor:
    """Hidden states [T, width]."""
    tensors = doubles(tensors)
    x = embedded(tensors, tokens, kinds, prefix)
    for layer in range(LAYERS):
        at = f"{prefix}encoder.layer.{layer}"
        q, k, v = linear(tensors, f"{at}.attention.self.Wqkv", x).chunk(3, -1)
        attended = linear(tensors, f"{at}.attention.output.dense", attention(q, k, v, causal=False))
        x = layer_norm(tensors, f"{at}.attention.output.LayerNorm", attended + x)
        gate, up = linear(tensors, f"{at}.mlp.gated_layers", x).chunk(2, -1)
        x = layer_norm(tensors, f"{at}.mlp.layernorm", linear(tensors, f"{at}.mlp.wo", gelu(gate) * up) + x)
    return x


def jina(tensors: Tensors, tokens: Tensor, kinds: Tensor, prefix: str = "") -> Tensor:
    """Hidden states [T, width] of the models for text."""
    tensors = doubles(tensors)
    x = embedded(tensors, tokens, kinds, prefix)
    for layer in range(LAYERS):
        at = f"{prefix}encoder.layer.{layer}"
        q, k, v = (linear(tensors, f"{at}.attention.self.{name}", x) for name in ("query", "key", "value"))
        attended = linear(tensors, f"{at}.attention.output.dense", attention(q, k, v, causal=False))
        x = layer_norm(tensors, f"{at}.attention.output.LayerNorm", attended + x)
        gate, up = linear(tensors, f"{at}.mlp.gated_layers", x).chunk(2, -1)
        x = layer_norm(tensors, f"{at}.mlp.layernorm", linear(tensors, f"{at}.mlp.wo", gelu(gate) * up) + x)
    return x


def jina_code(tensors: Tensors, tokens: Tensor, kinds: Tensor, prefix: str = "") -> Tensor:
    """Hidden states [T, width] of the model for code."""
    tensors = doubles(tensors)
    x = embedded(tensors, tokens, kinds, prefix)
    for layer in range(LAYERS):
        at = f"{prefix}encoder.layer.{layer}"
        q, k, v = (linear(tensors, f"{at}.attention.self.{name}", x) for name in ("query", "key", "value"))
        q = layer_norm(tensors, f"{at}.attention.self.layer_norm_q", q)
        k = layer_norm(tensors, f"{at}.attention.self.layer_norm_k", k)
        attended = linear(tensors, f"{at}.attention.output.dense", attention(q, k, v, causal=False))
        inner = layer_norm(tensors, f"{at}.attention.output.LayerNorm", attended + x)
        x = layer_norm(tensors, f"{at}.layer_norm_1", inner + x)
        up, gate = linear(tensors, f"{at}.mlp.up_gated_layer", x).chunk(2, -1)
        x = layer_norm(tensors, f"{at}.layer_norm_2", linear(tensors, f"{at}.mlp.down_layer", gelu(gate) * up) + x)
    return x


def masked_logits(tensors: Tensors, hidden: Tensor, prefix: str = "bert.") -> Tensor:
    tensors = doubles(tensors)
    inner = gelu(linear(tensors, "cls.predictions.transform.dense", hidden))
    inner = layer_norm(tensors, "cls.predictions.transform.LayerNorm", inner)
    words = tensors[f"{prefix}embeddings.word_embeddings.weight"]
    return inner @ words.T + tensors["cls.predictions.decoder.bias"]
