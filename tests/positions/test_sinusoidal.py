"""Sinusoidal embeddings against Vaswani et al.'s formula, number by number."""

from __future__ import annotations

import math

import pytest
import torch

from trainshort.positions import Shape, build_position


def table(length: int, d_model: int, base: float = 10000.0) -> torch.Tensor:
    """Sines in the first half of the channels, cosines in the second; wavelengths from 2π to 2π·base."""
    half = d_model // 2
    rows = []
    for place in range(length):
        angles = [place / base ** (channel / max(half - 1, 1)) for channel in range(half)]
        rows.append([math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles])
    return torch.tensor(rows, dtype=torch.float64)


def embed(d_model: int, positions: torch.Tensor, x: torch.Tensor, **options) -> torch.Tensor:
    return build_position("sinusoidal", Shape(d_model=d_model, num_heads=1, head_dim=8), options).embed(x, positions)


@pytest.mark.parametrize("d_model", [2, 4, 32, 130])
@pytest.mark.parametrize("base", [10000.0, 50.0])
def test_the_table(d_model: int, base: float) -> None:
    positions = torch.arange(200)[None]
    out = embed(d_model, positions, torch.zeros(1, 200, d_model), base=base)
    torch.testing.assert_close(out[0].double(), table(200, d_model, base), rtol=0.0, atol=200 * 2.0**-22)


def test_it_is_added_to_the_scaled_input() -> None:
    """Section 3.4 of the paper: embeddings are multiplied by sqrt(d_model)."""
    x = torch.randn(3, 50, 16)
    out = embed(16, torch.arange(50)[None], x)
    torch.testing.assert_close(out.double(), 4.0 * x.double() + table(50, 16), rtol=0.0, atol=2e-5)


def test_rows_have_positions_of_their_own() -> None:
    positions = torch.tensor([[0, 1, 2, 3], [7, 8, 9, 30]])
    out = embed(8, positions, torch.zeros(2, 4, 8))
    torch.testing.assert_close(out.double(), table(31, 8)[positions], rtol=0.0, atol=1e-5)


def test_any_length() -> None:
    """There is no last position: far away the table goes on, within what float32 holds of an angle."""
    out = embed(16, torch.tensor([[100_000]]), torch.zeros(1, 1, 16))
    torch.testing.assert_close(out[0, 0].double(), table(100_001, 16)[-1], rtol=0.0, atol=100_000 * 2.0**-22)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_the_table_once(dtype: torch.dtype) -> None:
    """Angles are computed in float32: a 16-bit position would be wrong by whole units at 300."""
    positions = torch.arange(1500)[None]
    out = embed(32, positions, torch.zeros(1, 1500, 32, dtype=dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out[0].double(), table(1500, 32), rtol=0.0, atol=torch.finfo(dtype).eps)


def test_there_is_nothing_to_learn_and_nothing_to_store() -> None:
    position = build_position("sinusoidal", Shape(d_model=16, num_heads=2, head_dim=8), {})
    assert list(position.parameters()) == []
    assert position.state_dict() == {}
    assert position.max_length is None


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"even d_model, got 15"):
        build_position("sinusoidal", Shape(d_model=15, num_heads=1, head_dim=15), {})
