"""Every shape that a config can describe, in both models, against the formulas: loss and all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainshort as ts
from tests.models import dense
from tests.models.small import EVERY_POSITION, encoder, language_model, random_tokens, small_config

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "layernorm_without_bias": {"norm": "layernorm_without_bias"},
    "rmsnorm": {"norm": "rmsnorm"},
    "large_epsilon": {"norm_eps": 0.1},
    "post_norm": {"norm_place": "post"},
    "embedding_norm": {"embedding_norm": True},
    "no_final_norm": {"final_norm": False},
    "parallel": {"parallel_residual": True},
    "parallel_norms": {"parallel_residual": True, "parallel_norms": True},
    "relu": {"activation": "relu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "gated": {"gated": True, "activation": "silu"},
    "gated_gelu": {"gated": True, "d_ff": 24},
    "qkv_bias": {"qkv_bias": True},
    "attention_out_bias": {"attention_out_bias": True},
    "ffn_biases": {"ffn_bias": True, "ffn_out_bias": True},
    "head_bias": {"head_bias": True},
    "untied": {"tie_embeddings": False},
    "clipped": {"clip_qkv": 0.5},
    "grouped": {"num_kv_heads": 2},
    "one_key_head": {"num_kv_heads": 1},
    "wide_heads": {"head_dim": 12},
    "grouped_wide": {"num_kv_heads": 2, "head_dim": 12, "qkv_bias": True},
    "scaled": {"attention_scale": 0.1},
    "token_types": {"token_types": 2},
    "three_heads": {"num_heads": 3, "d_model": 30},
    "one_layer": {"num_layers": 1},
    "bloom": {"embedding_norm": True, "activation": "gelu_tanh", "qkv_bias": True, "ffn_bias": True},
    "mosaic_bert": {
        "norm_place": "post",
        "gated": True,
        "embedding_norm": True,
        "ffn_out_bias": True,
        "token_types": 2,
    },
}
ALIBI: dict[str, dict[str, Any]] = {
    "trainable": {"trainable": True},
    "scaled": {"scale": 0.35},
    "local": {"slopes": [0.7, 0.3, 0.1, 0.02]},
}


def assert_same_as_dense(model: ts.LanguageModel | ts.Encoder, limit: float, tokens: Tensor, targets: Tensor) -> None:
    """Loss and gradient of every parameter; `limit` is relative to the largest number in each."""
    loss = model.loss(tokens, targets)
    names = [name for name, _ in model.named_parameters()]
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    weights = dense.weights_of(model)
    if isinstance(model, ts.LanguageModel):
        scores = dense.logits(model.config, weights, tokens)
    else:
        states = dense.hidden_states(model.config, weights, tokens)
        dense_part = dense.activated(model.config, dense.linear(weights, "head_dense", states))
        scores = dense.linear(weights, "head", dense.normed(model.config, weights, "head_norm", dense_part))
    truth = dense.cross_entropy(scores, targets)
    expected = torch.autograd.grad(truth, [weights[name] for name in names])
    torch.testing.assert_close(loss.double(), truth, rtol=limit, atol=0.0)
    for name, mine, theirs in zip(names, found, expected, strict=True):
        assert mine is not None, f"{name} gets no gradient"
        allowed = limit * float(theirs.abs().max())
        assert allowed > 0, f"{name} does not matter"
        torch.testing.assert_close(mine.double(), theirs, rtol=0.0, atol=allowed, msg=lambda m, n=name: f"{n}: {m}")


def limit_of(position: str) -> float:
    """Float64 models are exact; sines and cosines of angles may be float32."""
    return 1e-3 if position in ("sinusoidal", "rotary") else 1e-9


@pytest.mark.parametrize("name", VARIANTS)
def test_language_model(name: str) -> None:
    model = language_model(dtype=torch.float64, **VARIANTS[name])
    tokens = random_tokens(2, 150)
    assert_same_as_dense(model, 1e-9, tokens, random_tokens(2, 150, seed=1))


@pytest.mark.parametrize("name", VARIANTS)
def test_encoder(name: str) -> None:
    model = encoder(dtype=torch.float64, **VARIANTS[name])
    tokens, targets = random_tokens(2, 150), random_tokens(2, 150, seed=1)
    targets[random_tokens(2, 150, seed=2) > 20] = -100
    assert_same_as_dense(model, 1e-9, tokens, targets)


@pytest.mark.parametrize("position", EVERY_POSITION)
@pytest.mark.parametrize("kind", [language_model, encoder])
def test_every_position(kind, position: str) -> None:
    tokens, targets = random_tokens(2, 200), random_tokens(2, 200, seed=1)
    model = kind(position, dtype=torch.float64, max_length=200)
    assert_same_as_dense_where_used(model, limit_of(position), tokens, targets)


def assert_same_as_dense_where_used(model, limit: float, tokens: Tensor, targets: Tensor) -> None:
    assert_same_as_dense(model, limit, tokens, targets)


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_float32_loses_what_float32_loses(position: str) -> None:
    """Logits in float32 are as near the truth as the formulas computed in float32, certified windows or not."""
    model = language_model(position)
    tokens = random_tokens(1, 600)
    with torch.no_grad():
        truth = dense.logits(model.config, dense.weights_of(model), tokens)
        plain = dense.logits(model.config, dense.weights_of(model, torch.float32), tokens)
        error = (model(tokens) - truth).abs().max()
    allowed = 4.0 * (plain - truth).abs().max()
    assert error <= allowed, f"error {float(error):.2e}, allowed {float(allowed):.2e}"


@pytest.mark.parametrize("name", ALIBI)
def test_options_of_alibi(name: str) -> None:
    model = language_model(dtype=torch.float64, position_options=ALIBI[name])
    limit = 1e-6 if name != "trainable" else 1e-9  # fixed slopes are float32
    assert_same_as_dense(model, limit, random_tokens(2, 150), random_tokens(2, 150, seed=1))


@pytest.mark.parametrize("trainable", [False, True])
def test_one_sided_alibi(trainable: bool) -> None:
    model = encoder(dtype=torch.float64, position_options={"one_sided": True, "trainable": trainable})
    assert_same_as_dense(model, 1e-9, random_tokens(2, 150), random_tokens(2, 150, seed=1))


def test_options_of_t5() -> None:
    model = language_model("t5", dtype=torch.float64, position_options={"buckets": 8, "max_distance": 40})
    assert_same_as_dense(model, 1e-9, random_tokens(2, 150), random_tokens(2, 150, seed=1))


@pytest.mark.parametrize("position", EVERY_POSITION)
@pytest.mark.parametrize("kind", [language_model, encoder])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str, kind, position: str) -> None:
    """Padding is never looked at, and positions count from the first real token."""
    model = kind(position, dtype=torch.float64)
    tokens = random_tokens(3, 150)
    count = torch.tensor([150, 90, 3])[:, None]
    index = torch.arange(150)[None]
    real = index >= 150 - count if side == "left" else index < count
    with torch.no_grad():
        states = model.trunk(tokens, key_padding_mask=real)
        expected = dense.hidden_states(model.config, dense.weights_of(model), tokens, real=real)
    limit = limit_of(position) * float(expected.abs().max())
    torch.testing.assert_close(states[real], expected[real], rtol=0.0, atol=limit)


def test_shards_of_a_tensor_parallel_layer_sum_to_the_whole() -> None:
    """Each of two devices holds some heads, with the slopes of exactly those heads."""
    from trainshort.models.layers import Context, SelfAttention
    from trainshort.positions import build_position

    def attend(layer: nn.Module, config: ts.ModelConfig, x: Tensor) -> Tensor:
        position = build_position(config.position, config.position_shape, config.position_options)
        return layer(x, Context(position, torch.arange(x.shape[1])[None], position.bias()))

    torch.manual_seed(0)
    full = small_config(num_heads=6, d_model=48)
    layer = SelfAttention(full, 0)
    x = torch.randn(2, 140, 48)
    slopes = dense.paper_slopes(6)
    total = torch.zeros_like(x)
    for heads in ([0, 1, 2, 3], [4, 5]):
        options = {"slopes": [slopes[head] for head in heads]}
        config = small_config(num_heads=len(heads), d_model=48, head_dim=8, position_options=options)
        shard = SelfAttention(config, 0)
        rows = torch.cat([torch.arange(8) + 8 * head for head in heads])
        with torch.no_grad():
            shard.qkv.weight.copy_(layer.qkv.weight[torch.cat([rows + 48 * part for part in range(3)])])
            shard.out.weight.copy_(layer.out.weight[:, rows])
        total += attend(shard, config, x)
    torch.testing.assert_close(total, attend(layer, full, x), rtol=1e-5, atol=1e-5)


def test_dropout_acts_in_training_only() -> None:
    model = language_model(dropout=0.5)
    tokens = random_tokens(2, 30)
    assert torch.equal(model(tokens), model(tokens))
    torch.testing.assert_close(model(tokens), language_model()(tokens))
    model.train()
    assert not torch.allclose(model(tokens), model(tokens), atol=0.1)
