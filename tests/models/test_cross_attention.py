"""Cross-attention: query i stands at key position i + query_start, and padding of the memory is never seen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.models import dense
from tests.models.small import EVERY_POSITION, lively, small_config
from trainshort.positions import build_position


def layer_of(position: str = "alibi", **changes: Any) -> tuple[ts.CrossAttention, Any]:
    config = small_config(position, causal=False, **changes)
    built = lively(build_position(config.position, config.position_shape, config.position_options))
    return lively(ts.CrossAttention(config)).double(), built.double()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def formula(
    layer: ts.CrossAttention, x: Tensor, memory: Tensor, built: Any, *, real: Tensor | None = None, start: int = 0
) -> Tensor:
    """Dense, with distances |i + start - j| written out."""
    config, weights = layer.config, dense.weights_of(layer)
    positions = {f"position.{name}": tensor for name, tensor in dense.weights_of(built).items()}
    batch, queries, keys = x.shape[0], x.shape[1], memory.shape[1]

    def heads(name: str, rows: Tensor) -> Tensor:
        return dense.linear(weights, name, rows).view(batch, rows.shape[1], -1, config.width).transpose(1, 2)

    key_value = heads("key_value", memory)
    k, v = key_value[:, : config.kv_heads], key_value[:, config.kv_heads :]
    bias = dense.position_bias(config, positions, queries, keys, start)[None].expand(batch, -1, -1, -1)
    if real is not None:
        bias = bias.masked_fill(~real[:, None, None, :], -math.inf)
    out = dense.softmax_attention(heads("query", x), k, v, bias, config.width**-0.5)
    return dense.linear(weights, "out", out.transpose(1, 2).reshape(batch, queries, -1))


@pytest.mark.parametrize("position", EVERY_POSITION)
@pytest.mark.parametrize(
    ("queries", "keys", "start"), [(40, 40, 0), (5, 170, 0), (170, 5, 0), (1, 90, 63), (7, 20, 150)]
)
def test_it_is_the_formula(queries: int, keys: int, start: int, position: str) -> None:
    layer, built = layer_of(position)
    x, memory = normal(2, queries, 32), normal(2, keys, 32, seed=1)
    found = layer(x, memory, built.bias(), query_start=start)
    torch.testing.assert_close(found, formula(layer, x, memory, built, start=start), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 2},
        {"qkv_bias": True, "attention_out_bias": True},
        {"head_dim": 12},
        {"num_heads": 3, "d_model": 30},
    ],
    ids=str,
)
def test_variants(changes: dict[str, Any]) -> None:
    layer, built = layer_of(**changes)
    x, memory = normal(2, 30, layer.config.d_model), normal(2, 140, layer.config.d_model, seed=1)
    found = layer(x, memory, built.bias())
    torch.testing.assert_close(found, formula(layer, x, memory, built), rtol=1e-9, atol=1e-9)


def test_decoding_a_step_at_a_time_is_the_whole() -> None:
    layer, built = layer_of()
    x, memory = normal(2, 12, 32), normal(2, 50, 32, seed=1)
    whole = layer(x, memory, built.bias())
    steps = [layer(x[:, i : i + 1], memory, built.bias(), query_start=i) for i in range(12)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-9, atol=1e-9)


def test_rows_may_start_at_different_places() -> None:
    layer, built = layer_of()
    x, memory = normal(2, 3, 32), normal(2, 50, 32, seed=1)
    found = layer(x, memory, built.bias(), query_start=torch.tensor([4, 40]))
    for row, start in enumerate((4, 40)):
        expected = layer(x[row : row + 1], memory[row : row + 1], built.bias(), query_start=start)
        torch.testing.assert_close(found[row : row + 1], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_padding_of_the_memory(position: str) -> None:
    layer, built = layer_of(position)
    x, memory = normal(3, 20, 32), normal(3, 90, 32, seed=1)
    real = torch.arange(90)[None] < torch.tensor([90, 41, 2])[:, None]
    found = layer(x, memory, built.bias(), key_padding_mask=real)
    torch.testing.assert_close(found, formula(layer, x, memory, built, real=real), rtol=1e-9, atol=1e-9)
    garbage = memory.masked_fill(~real[..., None], math.nan)
    torch.testing.assert_close(layer(x, garbage, built.bias(), key_padding_mask=real), found, rtol=0.0, atol=0.0)


def test_memory_that_is_all_padding_gives_nothing() -> None:
    layer, built = layer_of()
    real = torch.zeros(1, 30, dtype=torch.bool)
    out = layer(normal(1, 4, 32), normal(1, 30, 32), built.bias(), key_padding_mask=real)
    assert not bool(out.any())


def test_no_bias_at_all() -> None:
    layer, built = layer_of("none")
    x, memory = normal(2, 20, 32), normal(2, 50, 32, seed=1)
    torch.testing.assert_close(layer(x, memory), formula(layer, x, memory, built), rtol=1e-9, atol=1e-9)


def test_gradients_reach_both_sequences_and_every_weight() -> None:
    layer, built = layer_of(position_options={"trainable": True})
    x, memory = normal(2, 20, 32).requires_grad_(), normal(2, 50, 32, seed=1).requires_grad_()
    upstream = normal(2, 20, 32, seed=2)
    leaves = [x, memory, *layer.parameters(), *built.parameters()]
    found = torch.autograd.grad(layer(x, memory, built.bias()), leaves, upstream)
    assert all(bool(gradient.any()) for gradient in found)
    wanted = torch.autograd.grad(formula(layer, x, memory, built), [x, memory], upstream)
    for one, two in zip(found[:2], wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
