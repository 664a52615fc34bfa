"""Every shape that a config can describe, in both models, against the formulas: logits and all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainshort as ts
from tests.models import dense
from tests.models.small import EVERY_POSITION, FOX_PRO, encoder, language_model, random_tokens, small_config

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
    "tied": {"tie_embeddings": True},
    "clipped": {"clip_qkv": 0.5},
    "grouped": {"num_kv_heads": 2},
    "one_key_head": {"num_kv_heads": 1},
    "wide_heads": {"head_dim": 12},
    "grouped_wide": {"num_kv_heads": 2, "head_dim": 12, "qkv_bias": True},
    "scaled": {"attention_scale": 0.1},
    "qk_norm": {"qk_norm": True, "num_kv_heads": 2},
    # Turned, because what is added to all keys alike does not matter.
    "wide_qk_norm": {
        "wide_qk_norm": True,
        "num_kv_heads": 2,
        "position_options": {"rotary": True, "rotary_base": 100.0},
    },
    "second_residual": {"norm_place": "post", "second_residual": True},
    "kv_shift": {"kv_shift": True, "num_kv_heads": 2},
    "output_norm": {"output_norm": True, "head_dim": 12},
    "output_gate": {"output_gate": True, "head_dim": 12},
    "all_of_attention": {
        "qk_norm": True,
        "kv_shift": True,
        "output_norm": True,
        "output_gate": True,
        "clip_qkv": 1.0,
    },
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
    "without_slopes": {"slopes": [0.7, 0.0, 0.1, 0.0]},
    "biased_heads": {"biased_heads": 2},
    "linear": {"scaling": "linear", "factor": 3.0},
    "linear_by_length": {"scaling": "linear", "trained_length": 64},
    "linear_trained_longer": {"scaling": "linear", "trained_length": 640},
    "ntk": {"scaling": "ntk", "factor": 8.0, "scale": 2.0},
    "ntk_by_length": {"scaling": "ntk", "trained_length": 30, "trainable": False},
    "ntk_of_two_heads": {"scaling": "ntk", "factor": 8.0, "biased_heads": 2},
    "rotary": {"rotary": True, "rotary_base": 100.0, "scaling": "linear", "factor": 2.0},
}


def assert_same_as_dense(model: ts.LanguageModel | ts.Encoder, limit: float, length: int = 150) -> None:
    """Logits, and their gradient to every parameter; `limit` is relative to the largest number in each."""
    tokens = random_tokens(2, length)
    weights = dense.weights_of(model)
    if isinstance(model, ts.LanguageModel):
        found = model(tokens)
        truth = dense.logits(model.config, weights, tokens)
    else:
        found = model.logits(model(tokens))
        inner = dense.linear(weights, "head_dense", dense.hidden_states(model.config, weights, tokens))
        inner = dense.normed(model.config, weights, "head_norm", dense.activated(model.config, inner))
        truth = dense.linear(weights, "head", inner)
    assert_near(found, truth, limit, "logits")
    upstream = torch.randn(truth.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    names = [name for name, _ in model.named_parameters()]
    mine = torch.autograd.grad(found, list(model.parameters()), upstream, allow_unused=True)
    theirs = torch.autograd.grad(truth, [weights[name] for name in names], upstream)
    for name, gradient, expected in zip(names, mine, theirs, strict=True):
        assert gradient is not None, f"{name} gets no gradient"
        assert_near(gradient, expected, limit, name)


def assert_near(found: Tensor, expected: Tensor, limit: float, name: str) -> None:
    largest = float(expected.detach().abs().max())
    assert largest > 0, f"{name} does not matter"
    error = float((found.detach() - expected.detach()).abs().max()) / largest
    assert error <= limit, f"{name}: off by {error:.1e} of its largest number, allowed {limit:.1e}"


def limit_of(position: str) -> float:
    """Float64 models are exact; only the sines that are added to embeddings may come from float32 angles."""
    return 1e-3 if position == "sinusoidal" else 1e-9


@pytest.mark.parametrize("kind", [language_model, encoder])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant(name: str, kind) -> None:
    assert_same_as_dense(kind(dtype=torch.float64, **VARIANTS[name]), 1e-9)


@pytest.mark.parametrize("position", EVERY_POSITION)
@pytest.mark.parametrize("kind", [language_model, encoder])
def test_every_position(kind, position: str) -> None:
    model = kind(position, dtype=torch.float64, max_length=200)
    assert_same_as_dense(model, limit_of(position), length=200)


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
    assert_same_as_dense(model, 1e-6)  # slopes are float32


@pytest.mark.parametrize("trainable", [False, True])
def test_one_sided_alibi(trainable: bool) -> None:
    model = encoder(dtype=torch.float64, position_options={"one_sided": True, "trainable": trainable})
    assert_same_as_dense(model, 1e-6)  # slopes are float32


@pytest.mark.parametrize("kind", [language_model, encoder])
@pytest.mark.parametrize("options", [{}, {"rotary": True}, {"rotary": True, "rotary_base": 100.0}], ids=str)
def test_fox_pro(options: dict[str, Any], kind) -> None:
    """The published block, with a gate, and with rotary positions besides."""
    assert_same_as_dense(kind("fox", dtype=torch.float64, position_options=options, **FOX_PRO), 1e-9)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_fox_pro(side: str) -> None:
    model = language_model("fox", dtype=torch.float64, **FOX_PRO)
    tokens = random_tokens(3, 60)
    count = torch.tensor([60, 31, 2])[:, None]
    real = torch.arange(60) >= 60 - count if side == "left" else torch.arange(60) < count
    with torch.no_grad():
        states = model.trunk(tokens, key_padding_mask=real)
        expected = dense.hidden_states(model.config, dense.weights_of(model), tokens, real=real)
    torch.testing.assert_close(states[real], expected[real], rtol=0.0, atol=1e-9)


def test_trainable_slopes_are_stretched_too() -> None:
    options = {"trainable": True, "scaling": "linear", "factor": 4.0}
    assert_same_as_dense(language_model(dtype=torch.float64, position_options=options), 1e-6)  # slopes are float32


ROTARY: dict[str, dict[str, Any]] = {
    "ntk": {"scaling": "ntk", "factor": 4.0},
    "ntk_by_length": {"scaling": "ntk", "trained_length": 40},
    "ntk_trained_longer": {"scaling": "ntk", "trained_length": 640},
    "yarn": {"scaling": "yarn", "factor": 4.0, "trained_length": 100, "base": 50.0},
    "yarn_by_length": {"scaling": "yarn", "trained_length": 100},
}


@pytest.mark.parametrize("kind", [language_model, encoder])
@pytest.mark.parametrize("name", ROTARY)
def test_options_of_rotary(name: str, kind) -> None:
    assert_same_as_dense(kind("rotary", dtype=torch.float64, position_options=ROTARY[name]), 1e-9)


@pytest.mark.parametrize("kind", [language_model, encoder])
def test_options_of_kerple(kind) -> None:
    assert_same_as_dense(kind("kerple", dtype=torch.float64, position_options={"kind": "power"}), 1e-9)


def test_options_of_t5() -> None:
    model = language_model("t5", dtype=torch.float64, position_options={"buckets": 8, "max_distance": 40})
    assert_same_as_dense(model, 1e-9)


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


@pytest.mark.parametrize("kind", ["lm", "encoder", "cross"])
def test_attention_dropout_acts_in_training_only(kind: str) -> None:
    config = ts.ModelConfig(
        vocab_size=40, d_model=32, num_heads=4, num_layers=2, attention_dropout=0.5, causal=kind == "lm"
    )
    tokens = torch.arange(20)[None]
    module = {"lm": ts.LanguageModel, "encoder": ts.Encoder, "cross": ts.CrossAttention}[kind](config)
    inputs = (torch.randn(1, 20, 32), torch.randn(1, 30, 32)) if kind == "cross" else (tokens,)
    torch.manual_seed(0)
    one, two = module(*inputs), module(*inputs)
    assert not torch.equal(one, two)
    torch.manual_seed(0)
    assert torch.equal(module(*inputs), one)
    module.eval()
    assert torch.equal(module(*inputs), module(*inputs))


def test_dropout_acts_in_training_only() -> None:
    model = language_model(dropout=0.5)
    tokens = random_tokens(2, 30)
    assert torch.equal(model(tokens), model(tokens))
    torch.testing.assert_close(model(tokens), language_model()(tokens))
    model.train()
    assert not torch.allclose(model(tokens), model(tokens), atol=0.1)
