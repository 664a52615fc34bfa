"""Learned embeddings: a row of a table for each position, and an end."""

from __future__ import annotations

import pytest
import torch

from trainshort.positions import Shape, build_position
from trainshort.positions.learned import Learned

SHAPE = Shape(d_model=16, num_heads=2, head_dim=8, max_length=40)


def learned() -> Learned:
    position = build_position("learned", SHAPE, {})
    assert isinstance(position, Learned)
    return position


def test_a_row_is_added_for_each_position() -> None:
    position = learned()
    x = torch.randn(3, 7, 16)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 2, 3], [39, 3, 3, 1, 9, 9, 0]])
    out = position.embed(x, positions)
    for row in range(3):
        for place in range(7):
            expected = x[row, place] + position.embedding.weight[positions[row, place]]
            torch.testing.assert_close(out[row, place], expected)


def test_one_row_of_positions_serves_the_batch() -> None:
    position = learned()
    x = torch.randn(3, 40, 16)
    torch.testing.assert_close(position.embed(x, torch.arange(40)[None]), x + position.embedding.weight)


def test_only_the_positions_used_get_a_gradient() -> None:
    position = learned()
    position.embed(torch.zeros(2, 5, 16), torch.arange(5)[None]).sum().backward()
    gradient = position.embedding.weight.grad
    assert gradient is not None
    assert torch.equal(gradient[:5], torch.full((5, 16), 2.0))
    assert not bool(gradient[5:].any())


def test_the_table_is_as_long_as_the_model_allows() -> None:
    position = learned()
    assert position.max_length == 40
    assert {name: tuple(tensor.shape) for name, tensor in position.state_dict().items()} == {
        "embedding.weight": (40, 16)
    }


def test_half_precision_keeps_its_dtype() -> None:
    position = learned()
    out = position.embed(torch.zeros(1, 4, 16, dtype=torch.bfloat16), torch.arange(4)[None])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out[0], position.embedding.weight[:4].bfloat16())


def test_a_length_is_needed() -> None:
    with pytest.raises(ValueError, match="max_length"):
        build_position("learned", Shape(d_model=16, num_heads=2, head_dim=8), {})
