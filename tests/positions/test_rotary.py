"""Rotary embeddings: explicit rotations of channel pairs, and scores that depend on distance alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.models.small import language_model, random_tokens
from trainshort.positions import Position, Shape, build_position


def rotate(q: Tensor, k: Tensor, positions: Tensor, **options) -> tuple[Tensor, Tensor]:
    shape = Shape(d_model=4 * q.shape[-1], num_heads=4, head_dim=q.shape[-1])
    return build_position("rotary", shape, options).rotate(q, k, positions)


def rotated(row: Tensor, place: int, base: float = 10000.0) -> Tensor:
    """One vector, turned plane by plane: channels (i, i + D/2) by the angle place · base^(-2i/D)."""
    dim = row.shape[0]
    out = torch.zeros(dim, dtype=torch.float64)
    for i in range(dim // 2):
        angle = place * base ** (-2.0 * i / dim)
        turn = torch.tensor(
            [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64
        )
        out[[i, i + dim // 2]] = turn @ row.double()[[i, i + dim // 2]]
    return out


@pytest.mark.parametrize("dim", [2, 4, 10, 64])
@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_each_pair_of_channels_turns_by_its_angle(dim: int, base: float) -> None:
    q, k = torch.randn(2, 4, 5, dim), torch.randn(2, 2, 5, dim)
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 17, 100, 129, 1000]])
    for before, after in zip((q, k), rotate(q, k, positions, base=base), strict=True):
        assert after.shape == before.shape
        for row in range(2):
            for head in range(before.shape[1]):
                for place in range(5):
                    vector, where = before[row, head, place], int(positions[row, place])
                    limit = (where + 4) * 2.0**-22 * float(vector.norm())  # what float32 holds of an angle
                    expected = rotated(vector, where, base)
                    torch.testing.assert_close(after[row, head, place].double(), expected, rtol=0.0, atol=limit)


def test_position_zero_changes_nothing() -> None:
    q, k = torch.randn(2, 3, 1, 8).unbind(0)
    turned = rotate(q[None], k[None], torch.zeros(1, 1, dtype=torch.int64))
    assert torch.equal(turned[0], q[None])
    assert torch.equal(turned[1], k[None])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    first=st.integers(0, 3000), second=st.integers(0, 3000), shift=st.integers(0, 3000), seed=st.integers(0, 2**31)
)
def test_scores_depend_on_the_difference_of_positions_alone(first: int, second: int, shift: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn((2, 1, 1, 1, 16), generator=generator).unbind(0)

    def score(query_place: int, key_place: int) -> Tensor:
        turned_query, _ = rotate(q, k, torch.tensor([[query_place]]))
        _, turned_key = rotate(q, k, torch.tensor([[key_place]]))
        return (turned_query * turned_key).sum()

    limit = 4.0 * float(q.norm() * k.norm()) * (max(first, second) + shift + 4) * 2.0**-22
    torch.testing.assert_close(score(first + shift, second + shift), score(first, second), rtol=0.0, atol=limit)


def test_scores_do_depend_on_the_difference() -> None:
    q = torch.ones(1, 1, 50, 8)
    turned, _ = rotate(q, q, torch.arange(50)[None])
    scores = (turned[0, 0] @ turned[0, 0].T)[0]
    assert float((scores[1:] - scores[0]).max()) < -0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_are_preserved(dtype: torch.dtype) -> None:
    q, k = torch.randn((2, 2, 3, 400, 16), dtype=dtype).unbind(0)
    for before, after in zip((q, k), rotate(q, k, 7 * torch.arange(400)[None]), strict=True):
        assert after.dtype == dtype
        torch.testing.assert_close(
            after.norm(dim=-1), before.norm(dim=-1), rtol=16 * torch.finfo(dtype).eps, atol=0.0
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_the_result_once(dtype: torch.dtype) -> None:
    """Angles and products are float32 whatever comes in, also where a 16-bit position would be far off."""
    q, k = torch.randn(2, 1, 3, 1500, 16).to(dtype).unbind(0)
    positions = torch.arange(1500)[None]
    exact = rotate(q.float(), k.float(), positions)
    for half, full in zip(rotate(q, k, positions), exact, strict=True):
        assert half.dtype == dtype
        assert torch.equal(half, full.to(dtype))


def test_grouped_keys_turn_like_queries() -> None:
    x = torch.randn(1, 4, 9, 8)
    q, k = rotate(x, x[:, 1:2], torch.arange(9)[None])
    torch.testing.assert_close(k, q[:, 1:2])


def test_there_is_nothing_to_learn_and_nothing_to_store() -> None:
    position = build_position("rotary", Shape(d_model=16, num_heads=2, head_dim=8), {})
    assert list(position.parameters()) == []
    assert position.state_dict() == {}
    assert position.max_length is None


def test_an_odd_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"even head_dim, got 5"):
        build_position("rotary", Shape(d_model=10, num_heads=2, head_dim=5), {})


# Longer texts than those of the training


def frequencies(scaling: Position) -> Tensor:
    """How far each pair of channels turns from one position to the next, read off turned vectors."""
    half = 8
    q = torch.zeros(1, 1, 2, 2 * half, dtype=torch.float64)
    q[..., :half] = 1.0
    turned, _ = scaling.rotate(q, q, torch.tensor([[0, 1]]))
    return torch.atan2(turned[0, 0, 1, half:], turned[0, 0, 1, :half])


def rotary(**options: Any) -> Position:
    return build_position("rotary", Shape(d_model=16, num_heads=1, head_dim=16), options)


def test_ntk_slows_the_slowest_channel_by_the_factor_and_the_fastest_not_at_all() -> None:
    ratio = frequencies(rotary(scaling="ntk", factor=4.0)) / frequencies(rotary())
    assert ratio[0].item() == pytest.approx(1.0)
    assert ratio[-1].item() == pytest.approx(0.25)
    assert bool((ratio.diff() < 0).all())


def test_yarn_keeps_fast_channels_and_divides_slow_ones() -> None:
    plain = frequencies(rotary())
    ratio = frequencies(rotary(scaling="yarn", factor=4.0, trained_length=1000)) / plain
    turns = 1000 * plain / (2 * math.pi)
    assert ratio[turns >= 32].tolist() == pytest.approx([1.0] * int((turns >= 32).sum()))
    assert ratio[turns <= 1].tolist() == pytest.approx([0.25] * int((turns <= 1).sum()))
    between = (turns > 1) & (turns < 32)
    assert bool(between.any())
    assert bool(((ratio > 0.25) & (ratio < 1.0))[between].all())


def test_yarn_makes_queries_and_keys_longer() -> None:
    q = torch.randn(1, 1, 5, 16)
    turned, _ = rotary(scaling="yarn", factor=8.0, trained_length=100).rotate(q, q, torch.arange(5)[None])
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1) * (0.1 * math.log(8.0) + 1.0))


@pytest.mark.parametrize("scaling", ["ntk", "yarn"])
def test_a_growing_cache_refuses_to_turn_keys_anew(scaling: str) -> None:
    model = language_model("rotary", position_options={"scaling": scaling, "trained_length": 20})
    cache = model.make_cache(1)
    with torch.no_grad():
        model(random_tokens(1, 20), cache=cache)
        with pytest.raises(ValueError, match="give a factor, or a cache with the capacity"):
            model(random_tokens(1, 1), cache=cache)


@pytest.mark.parametrize("scaling", ["ntk", "yarn"])
@pytest.mark.parametrize("factor", [None, 3.0])
def test_a_cache_of_the_whole_text(scaling: str, factor: float | None) -> None:
    options = {"scaling": scaling, "trained_length": 20, "factor": factor}
    model, tokens = language_model("rotary", position_options=options), random_tokens(1, 90)
    cache = model.make_cache(1, 90)
    with torch.no_grad():
        found = torch.cat([model(part, cache=cache) for part in tokens.split([50, 1, 39], dim=1)], dim=1)
        torch.testing.assert_close(found, model(tokens), rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"scaling": "yarn", "factor": 4.0}, "'yarn' needs trained_length"),
        ({"scaling": "ntk"}, "needs a factor, or trained_length"),
        ({"scaling": "linear", "factor": 2.0}, "must be one of none, ntk, yarn; got 'linear'"),
        ({"trained_length": 5}, "belong to a scaling"),
    ],
)
def test_scalings_that_cannot_be(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        rotary(**options)
