"""ALiBiTransformer: jaketae/alibi's names and defaults, without its faults."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.models import dense
from tests.models.small import lively, small_config


def transformer(**changes: Any) -> ts.ALiBiTransformer:
    fields: dict[str, Any] = {"num_layers": 2, "d_model": 48, "num_heads": 3, "max_len": 64}
    return lively(ts.ALiBiTransformer(ts.ALiBiConfig(**(fields | changes)))).eval()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_fields_and_defaults_are_those_its_users_know() -> None:
    found = [(field.name, field.default) for field in dataclasses.fields(ts.ALiBiConfig)]
    assert found == [
        ("num_layers", 6),
        ("d_model", 256),
        ("num_heads", 8),
        ("max_len", 256),
        ("dropout", 0.1),
        ("causal", True),
        ("expansion_factor", 1),
    ]
    assert ts.ALiBiConfig(2, 64, 4) == ts.ALiBiConfig(num_layers=2, d_model=64, num_heads=4)
    assert list(inspect.signature(ts.ALiBiTransformer).parameters) == ["config"]


def test_the_example_of_its_readme() -> None:
    model = ts.ALiBiTransformer(ts.ALiBiConfig())
    x = torch.randn(8, 100, 256)
    assert model(x).shape == (8, 100, 256)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 300])
def test_lengths_beyond_max_len_work(length: int, causal: bool) -> None:
    out = transformer(causal=causal)(normal(2, length, 48))
    assert out.shape == (2, length, 48)
    assert bool(torch.isfinite(out).all())


def test_max_len_changes_nothing() -> None:
    x = normal(2, 150, 48)
    assert torch.equal(transformer(max_len=16)(x), transformer(max_len=4096)(x))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("expansion_factor", [1, 3])
def test_it_is_the_formula(expansion_factor: int, causal: bool) -> None:
    """Pre-norm blocks; scores divided by the root of the head dimension, not of d_model."""
    model = transformer(causal=causal, expansion_factor=expansion_factor).double()
    weights = dense.weights_of(model)
    assert weights["layers.0.ffn.up.weight"].shape == (48 * expansion_factor, 48)
    config = small_config(
        d_model=48, num_heads=3, d_ff=48 * expansion_factor, causal=causal, ffn_bias=True, ffn_out_bias=True
    )
    x = normal(2, 200, 48).double()
    found = model(x)
    positions = torch.arange(200)[None]
    bias = dense.position_bias(config, {}, 200, 200)[None]
    for layer in range(2):
        at = f"layers.{layer}"
        inner = dense.normed(config, weights, f"{at}.attention_norm", x)
        x = x + dense.self_attention(config, weights, f"{at}.attention", inner, positions, bias)
        inner = dense.normed(config, weights, f"{at}.ffn_norm", x)
        x = x + dense.feed_forward(config, weights, f"{at}.ffn", inner)
    torch.testing.assert_close(found, x, rtol=1e-6, atol=1e-6)


def test_causal_never_looks_ahead() -> None:
    model, x = transformer(), normal(1, 150, 48)
    changed = x.clone()
    changed[:, 100:] += 1.0
    torch.testing.assert_close(model(changed)[:, :100], model(x)[:, :100], rtol=1e-5, atol=1e-5)


def test_not_causal_is_symmetric() -> None:
    """The past and the future weigh the same: reversing the input reverses the output."""
    model, x = transformer(causal=False), normal(2, 150, 48)
    torch.testing.assert_close(model(x.flip(1)), model(x).flip(1), rtol=1e-4, atol=1e-4)
    causal = transformer()
    assert (causal(x.flip(1)) - causal(x).flip(1)).abs().max().item() > 0.1


@pytest.mark.parametrize(("heads", "d_model"), [(1, 16), (3, 48), (5, 40), (6, 48), (7, 56), (12, 96)])
def test_any_head_count(heads: int, d_model: int) -> None:
    model = transformer(num_heads=heads, d_model=d_model)
    assert model(normal(2, 30, d_model)).shape == (2, 30, d_model)
    bias = model.position.bias()
    assert isinstance(bias, ts.LinearBias)
    torch.testing.assert_close(bias.slopes, torch.tensor(dense.paper_slopes(heads)))


def test_nothing_stored_depends_on_max_len() -> None:
    small, large = (transformer(max_len=length).state_dict() for length in (16, 4000))
    assert {n: t.shape for n, t in small.items()} == {n: t.shape for n, t in large.items()}
    assert not [name for name in large if "mask" in name or "slope" in name or name.endswith(".m")]
    transformer(max_len=16).load_state_dict(large)


def test_dropout_acts_in_training_only() -> None:
    model, x = transformer(dropout=0.5), normal(1, 20, 48)
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.allclose(model(x), model(x), atol=0.1)


def test_every_parameter_learns() -> None:
    model = transformer()
    model(normal(1, 20, 48)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()), name


def test_padding_is_never_seen() -> None:
    model, x = transformer(causal=False), normal(2, 60, 48)
    mask = torch.arange(60)[None] < torch.tensor([60, 25])[:, None]
    out = model(x, mask)
    torch.testing.assert_close(out[1, :25], model(x[1:, :25])[0], rtol=1e-5, atol=1e-5)


def test_the_module_moves_with_its_slopes() -> None:
    model = transformer().to("meta")
    bias = model.position.bias()
    assert isinstance(bias, ts.LinearBias)
    assert bias.slopes.device.type == "meta"
    assert all(tensor.device.type == "meta" for tensor in (*model.parameters(), *model.buffers()))


def test_a_last_dimension_that_is_not_d_model_names_both() -> None:
    model = ts.ALiBiTransformer(ts.ALiBiConfig())
    with pytest.raises(ValueError, match=r"(?=.*\b128\b)(?=.*\b256\b)"):
        model(torch.zeros(1, 10, 128))


@pytest.mark.parametrize("shape", [(48,), (10, 48), (1, 2, 10, 48), ()], ids=str)
def test_another_rank_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\[batch, length, 48\]"):
        transformer()(torch.zeros(shape))


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"256 .* 3"):
        ts.ALiBiTransformer(ts.ALiBiConfig(num_heads=3))


@pytest.mark.parametrize("name", ["max_len", "expansion_factor"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "2"])
def test_sizes_of_its_own_are_positive_ints(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive int, got {value!r}"):
        ts.ALiBiConfig(**{name: value})  # pyright: ignore[reportArgumentType]
