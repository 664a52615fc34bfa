"""T5's buckets against the published rule, and the one table that all layers share."""

from __future__ import annotations

import pytest
import torch

import trainshort as ts
from trainshort.positions import Shape, build_position
from trainshort.positions.t5 import T5


def t5(*, causal: bool = True, heads: int = 4, **options) -> T5:
    position = build_position("t5", Shape(d_model=8 * heads, num_heads=heads, head_dim=8, causal=causal), options)
    assert isinstance(position, T5)
    return position


def published_bucket(distance: int, buckets: int, furthest: int, bidirectional: bool) -> int:
    """Raffel et al.'s rule in whole numbers. `distance` is key position - query position.

    Of the buckets of one direction, half hold one distance each; the others end at exact · (furthest/exact)^(b/n),
    and whatever lies beyond falls into the last one.
    """
    offset = 0
    if bidirectional:
        buckets //= 2
        offset = buckets if distance > 0 else 0
        steps = abs(distance)
    else:
        steps = max(-distance, 0)
    exact = buckets // 2
    if steps < exact:
        return offset + steps
    shared = buckets - exact
    bucket = 0
    while bucket + 1 < shared and steps**shared * exact ** (bucket + 1) >= exact**shared * furthest ** (bucket + 1):
        bucket += 1
    return offset + exact + bucket


def buckets_of(position: T5, distances: list[int]) -> list[int]:
    """Which row of the table a distance reads: each row of a one-head table holds its own number."""
    with torch.no_grad():
        position.table.copy_(torch.arange(position.table.shape[0])[:, None].expand_as(position.table))
    bias = position.bias()
    assert isinstance(bias, ts.BucketBias)
    return bias.table[bias.bucket(torch.tensor(distances)), 0].long().tolist()


CAUSAL = {
    0: 0,
    1: 1,
    7: 7,
    8: 8,
    15: 15,
    16: 16,
    18: 16,
    19: 17,
    32: 21,
    64: 26,
    112: 30,
    113: 31,
    127: 31,
    128: 31,
    1000: 31,
}
BOTH = {
    0: 0,
    1: 1,
    7: 7,
    8: 8,
    11: 8,
    12: 9,
    15: 9,
    16: 10,
    31: 11,
    32: 12,
    64: 14,
    90: 14,
    91: 15,
    127: 15,
    128: 15,
    1000: 15,
}


def test_known_buckets_of_a_decoder() -> None:
    """Worked out by hand for 32 buckets and 128: 16 alone, then 16 + floor(16 ln(d/16) / ln 8)."""
    position = t5()
    assert buckets_of(position, [-distance for distance in CAUSAL]) == list(CAUSAL.values())
    assert buckets_of(position, [1, 5, 1000]) == [0, 0, 0]


def test_known_buckets_of_an_encoder() -> None:
    """Worked out by hand for 32 buckets and 128: 8 alone, then 8 + floor(8 ln(d/8) / ln 16); the future 16 above."""
    position = t5(causal=False)
    assert buckets_of(position, [-distance for distance in BOTH]) == list(BOTH.values())
    future = [distance for distance in BOTH if distance]
    assert buckets_of(position, future) == [16 + BOTH[distance] for distance in future]


@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 20), (64, 1000), (12, 7), (6, 50)])
def test_every_distance_follows_the_published_rule(buckets: int, furthest: int, causal: bool) -> None:
    position = t5(causal=causal, buckets=buckets, max_distance=furthest)
    distances = list(range(-1500, 1501))
    expected = [published_bucket(distance, buckets, furthest, not causal) for distance in distances]
    found = buckets_of(position, distances)
    differ = [(d, a, b) for d, a, b in zip(distances, found, expected, strict=True) if a != b]
    assert not differ, f"(distance, bucket, published): {differ[:5]}"


@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
def test_attention_adds_the_number_of_the_bucket(causal: bool) -> None:
    """With queries of zero, attention is the softmax of the table's numbers."""
    length = 300
    position = t5(causal=causal, heads=2)
    with torch.no_grad():
        position.table.normal_()
    v = torch.randn(1, 2, length, 8)
    out = ts.attention(torch.zeros_like(v), v, v, bias=position.bias(), causal=causal)
    for query in (0, 1, 17, 150, 299):
        keys = range(query + 1) if causal else range(length)
        rows = [published_bucket(key - query, 32, 128, not causal) for key in keys]
        weights = position.table.detach()[rows].double().softmax(0)  # [keys, H]
        expected = torch.einsum("kh,hkd->hd", weights, v[0, :, : len(rows)].double())
        torch.testing.assert_close(out[0, :, query].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [ts.LanguageModel, ts.Encoder])
def test_all_layers_share_one_table(kind: type) -> None:
    config = ts.ModelConfig(
        position="t5", causal=kind is ts.LanguageModel, num_layers=3, d_model=16, num_heads=2, vocab_size=11
    )
    model = kind(config)
    tables = [p for p in model.parameters() if tuple(p.shape) == (32, 2)]
    assert len(tables) == 1
    tokens = torch.randint(11, (2, 40))
    model.loss(tokens, tokens).backward()
    assert tables[0].grad is not None
    assert bool(tables[0].grad.any())


def test_buckets_that_are_used_get_a_gradient() -> None:
    position = t5(heads=2)
    x = torch.randn(1, 2, 10, 8)
    ts.attention(x, x, x, bias=position.bias()).square().sum().backward()
    gradient = position.table.grad
    assert gradient is not None
    assert bool((gradient[:10] != 0).all())
    assert not bool(gradient[10:].any())


def test_what_is_stored_does_not_grow_with_length() -> None:
    assert {name: tuple(t.shape) for name, t in t5().state_dict().items()} == {"table": (32, 4)}
    assert t5().max_length is None


@pytest.mark.parametrize(
    ("options", "causal", "match"),
    [
        ({"buckets": 1}, True, "buckets, got 1"),
        ({"buckets": 7}, False, "buckets, got 7"),
        ({"max_distance": 16}, True, "max_distance must exceed the 16 .* got 16"),
        ({"max_distance": 8}, False, "max_distance must exceed the 8 .* got 8"),
    ],
)
def test_impossible_numbers_are_refused_when_built(options: dict, causal: bool, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        t5(causal=causal, **options)
