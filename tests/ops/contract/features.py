"""Every feature of attention, by name: what it asks for at a place. Sizes that are not said are the place's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import trainshort as ts
from tests.ops.cases import left_padding, random_gates, random_times, right_padding
from tests.ops.contract.places import Place
from tests.ops.dense import Case

ONE_SIDED = ts.LinearBias.one_sided(torch.ones(5)).sees
THREE = torch.tensor([0.9, 0.4, 0.05])
FOUR_BY_ROW = torch.tensor([[0.9, 0.1, 0.3, 0.5], [0.02, 0.6, 0.2, 0.1]])


def symmetric(**features: Any) -> dict[str, Any]:
    return {"causal": False} | features


def packed(*borders: int, dtype: torch.dtype = torch.int64, **features: Any) -> dict[str, Any]:
    return {"batch": 1, "queries": borders[-1], "cu_seqlens": torch.tensor(borders, dtype=dtype)} | features


def middle(length: int) -> torch.Tensor:
    """Padding on the left of one row, on both sides of the other."""
    index = torch.arange(length)
    return torch.stack((index >= 20, (index >= 3) & (index < 2 * length // 3)))


FEATURES: dict[str, Callable[[Place], dict[str, Any]]] = {
    "causal": lambda p: {},
    "causal_steep": lambda p: {"queries": 2 * p.length + 30, "slopes": p.steep},
    "symmetric": lambda p: symmetric(),
    "symmetric_steep": lambda p: symmetric(queries=2 * p.length + 30, slopes=p.steep),
    "one_sided": lambda p: symmetric(heads=3, sees=("past", "past", "future")),
    "one_sided_five_heads": lambda p: symmetric(heads=5, sees=ONE_SIDED),
    "future_only": lambda p: symmetric(slopes=p.steep, sees=("future",) * p.heads),
    "left_right_slopes": lambda p: symmetric(slopes=p.steep, future=p.steep.flip(0)),
    "left_right_slopes_by_row": lambda p: symmetric(batch=2, slopes=p.steep, future=p.steep_by_row),
    "offset": lambda p: symmetric(offset=0.5),
    "offset_future_and_sight": lambda p: symmetric(
        heads=3, offset=1.0, slopes=THREE, future=THREE.flip(0), sees=("both", "future", "past")
    ),
    "slopes_by_row": lambda p: {"batch": 2, "slopes": p.steep_by_row},
    "slopes_by_row_symmetric": lambda p: symmetric(batch=2, slopes=p.steep_by_row),
    "float64_slopes": lambda p: {"queries": 140, "slopes": p.steep.double()},
    "half_slopes": lambda p: {"queries": 140, "slopes": p.steep.half()},
    "no_bias": lambda p: {"bias": "none"},
    "no_bias_symmetric": lambda p: symmetric(bias="none"),
    "no_bias_query_start": lambda p: {
        "bias": "none", "queries": 40, "keys": p.length, "query_start": p.length * 4 // 5,
    },
    "no_bias_query_start_by_row": lambda p: {
        "bias": "none", "batch": 2, "queries": 230, "query_start": torch.tensor([100, 0]),
    },
    "no_bias_padded": lambda p: {
        "bias": "none", "batch": 2, "key_padding_mask": left_padding(p.length, 33, length=p.length),
    },
    "bucket": lambda p: p.bucket,
    "bucket_symmetric": lambda p: symmetric(**p.bucket, bidirectional=True),
    "bucket_causal_from_both": lambda p: p.bucket | {"bidirectional": True},
    "bucket_symmetric_from_causal": lambda p: symmetric(**p.bucket),
    "bucket_odd_count": lambda p: p.bucket | {"num_buckets": 6, "max_distance": 20},
    "bucket_wide": lambda p: p.bucket | {"max_distance": p.length + 20},
    "bucket_wide_inside": lambda p: p.bucket | {"queries": 2 * p.length + 100, "max_distance": 2 * p.length},
    "bucket_far": lambda p: p.bucket | {"max_distance": 3000},
    "bucket_four_heads": lambda p: p.bucket | {"heads": 4},
    "bucket_grouped": lambda p: p.bucket | {"heads": 4, "kv_heads": 2, "num_buckets": 8, "max_distance": 64},
    "bucket_padded": lambda p: p.bucket | {
        "batch": 2, "key_padding_mask": left_padding(p.length * 3 // 4, 33, length=p.length),
    },
    "bucket_packed": lambda p: p.bucket | packed(0, 77, p.length),
    "bucket_query_start": lambda p: p.bucket | {"queries": 40, "keys": p.length, "query_start": p.length * 2 // 3},
    "bucket_query_start_by_row": lambda p: p.bucket | {
        "batch": 2, "queries": 230, "query_start": torch.tensor([159, 8]), "causal": False,
    },
    "kerple": lambda p: {"bias": "kerple"},
    "kerple_power": lambda p: {"bias": "kerple", "logarithmic": False},
    "kerple_symmetric": lambda p: symmetric(bias="kerple"),
    "kerple_power_symmetric": lambda p: symmetric(bias="kerple", logarithmic=False),
    "kerple_grouped": lambda p: {"bias": "kerple", "heads": 4, "kv_heads": 2, "queries": 3 * p.length},
    "kerple_padded": lambda p: {
        "bias": "kerple", "batch": 2, "key_padding_mask": left_padding(p.length * 3 // 4, 33, length=p.length),
    },
    "kerple_packed": lambda p: {"bias": "kerple"} | packed(0, 77, p.length),
    "kerple_query_start": lambda p: {
        "bias": "kerple", "queries": 40, "keys": p.length, "query_start": p.length * 2 // 3,
    },
    "kerple_query_start_beyond": lambda p: {
        "bias": "kerple", "queries": 40, "keys": p.length, "query_start": 5 * p.length, "logarithmic": False,
    },
    "one_key_head": lambda p: {"heads": 4, "kv_heads": 1},
    "grouped": lambda p: {"heads": 4, "kv_heads": 2},
    "grouped_symmetric": lambda p: symmetric(heads=6, kv_heads=3),
    "grouped_one_sided": lambda p: symmetric(heads=6, kv_heads=2, sees=("past",) * 3 + ("future",) * 3),
    "grouped_mixed_sight": lambda p: symmetric(heads=4, kv_heads=2, sees=("past", "future", "past", "both")),
    "grouped_slopes_by_row": lambda p: {"batch": 2, "heads": 4, "kv_heads": 2, "slopes": FOUR_BY_ROW},
    "three_heads": lambda p: {"heads": 3, "queries": 140},
    "five_heads_symmetric": lambda p: symmetric(heads=5, queries=130),
    "six_heads_two_key_heads": lambda p: {"heads": 6, "kv_heads": 2, "queries": p.length * 2 // 3},
    "six_heads_three_key_heads": lambda p: {"heads": 6, "kv_heads": 3, "queries": p.length * 2 // 3},
    "six_heads_one_key_head_symmetric": lambda p: symmetric(heads=6, kv_heads=1, queries=p.length * 2 // 3),
    "twelve_heads": lambda p: {"batch": 1, "heads": 12, "queries": p.length * 2 // 3},
    "twelve_heads_four_key_heads": lambda p: {"batch": 1, "heads": 12, "kv_heads": 4, "queries": p.length * 2 // 3},
    "fewer_queries": lambda p: {"queries": 70, "keys": 2 * p.length},
    "fewer_queries_symmetric": lambda p: symmetric(queries=p.length // 2, keys=2 * p.length),
    "one_query": lambda p: {"queries": 1, "keys": 2 * p.length - 100},
    "one_query_symmetric": lambda p: symmetric(queries=1, keys=2 * p.length - 100),
    "one_key": lambda p: {"queries": 100, "keys": 1},
    "more_queries": lambda p: {"queries": p.length * 4 // 3, "keys": p.length // 2},
    "more_queries_symmetric": lambda p: symmetric(queries=p.length * 4 // 3, keys=p.length // 2),
    "query_start": lambda p: {"queries": 50, "keys": p.length + 100, "query_start": p.length},
    "query_start_zero": lambda p: {"queries": p.length * 2 // 3, "keys": p.length + 100, "query_start": 0},
    "query_start_symmetric": lambda p: symmetric(queries=p.length // 2, keys=p.length + 100, query_start=30),
    "query_start_beyond_the_keys": lambda p: {
        "queries": 40, "keys": 200, "query_start": 900, "slopes": p.steep / 100,
    },
    "query_start_beyond_symmetric": lambda p: symmetric(queries=40, keys=200, query_start=400, slopes=p.steep / 100),
    "query_start_before_the_keys": lambda p: {"query_start": -70},
    "query_start_before_symmetric": lambda p: symmetric(queries=100, keys=p.length, query_start=-70),
    "query_start_all_before": lambda p: {"queries": 50, "keys": 100, "query_start": -50},
    "query_start_by_row": lambda p: {
        "batch": 2, "queries": 50, "keys": p.length + 100, "query_start": torch.tensor([p.length, 7]),
    },
    "query_start_by_row_int32": lambda p: {
        "batch": 2, "queries": 50, "keys": p.length + 50,
        "query_start": torch.tensor([-20, p.length + 20], dtype=torch.int32),
    },
    "query_start_by_row_symmetric": lambda p: symmetric(
        batch=2, queries=p.length // 2, keys=p.length + 100, query_start=torch.tensor([2 * p.length, -7])
    ),
    "left_padding": lambda p: {
        "batch": 2, "key_padding_mask": left_padding(p.length, p.length // 2 - 10, length=p.length),
    },
    "left_padding_whole_blocks": lambda p: {"batch": 2, "key_padding_mask": left_padding(10, 0, length=p.length)},
    "left_padding_symmetric": lambda p: symmetric(
        batch=2, key_padding_mask=left_padding(p.length * 2 // 3, 31, length=p.length)
    ),
    "right_padding": lambda p: {
        "batch": 2, "key_padding_mask": right_padding(p.length, p.length // 2 - 10, length=p.length),
    },
    "right_padding_symmetric": lambda p: symmetric(
        batch=2, key_padding_mask=right_padding(p.length - 10, 1, length=p.length)
    ),
    "padding_and_fewer_queries": lambda p: {
        "batch": 2, "queries": 60, "keys": p.length, "key_padding_mask": left_padding(p.length, 25, length=p.length),
    },
    "padding_and_query_start": lambda p: {
        "batch": 2, "queries": 60, "keys": p.length, "key_padding_mask": middle(p.length),
        "query_start": torch.tensor([p.length * 4 // 5, p.length * 2 // 5]),
    },
    "packed": lambda p: packed(0, 1, 150, 151, 300),
    "packed_int32": lambda p: packed(0, 60, p.length, dtype=torch.int32),
    "packed_symmetric": lambda p: packed(0, 128, 140, 300, causal=False),
    "packed_empty_documents": lambda p: packed(0, 0, 77, 77, 77, 150, 150),
    "packed_grouped": lambda p: packed(0, 130, 260, heads=6, kv_heads=3),
    "packed_one_sided": lambda p: packed(0, 130, 200, heads=5, causal=False, sees=ONE_SIDED),
    "packed_steep": lambda p: packed(0, 20, 390, 400, slopes=p.steep),
    "packed_many": lambda p: packed(*range(0, 151, 15), heads=1),
    "dropout": lambda p: {"dropout": 0.3, "dropout_seed": 5},
    "dropout_symmetric": lambda p: symmetric(dropout=0.5, dropout_seed=-(2**62) - 3, slopes=p.steep),
    "dropout_grouped_padded": lambda p: {
        "batch": 2, "heads": 4, "kv_heads": 2, "dropout": 0.1,
        "key_padding_mask": left_padding(p.length, p.length // 2 - 10, length=p.length),
    },
    "dropout_packed": lambda p: packed(0, 1, 150, 151, 300, dropout=0.2),
    "dropout_bucket": lambda p: p.bucket | {"dropout": 0.9},
    "dropout_without_bias": lambda p: {"bias": "none", "dropout": 1e-3, "dropout_seed": 2**40},
    "dropout_query_start": lambda p: {"queries": 50, "keys": p.length, "query_start": p.length - 80, "dropout": 0.3},
    "scale": lambda p: {"queries": p.length * 2 // 3, "scale": 1.0},
    "scale_zero": lambda p: {"queries": p.length * 2 // 3, "scale": 0.0},
    "scale_negative": lambda p: {"queries": p.length * 2 // 3, "scale": -0.7},
}  # fmt: skip


def borders(place: Place, **features: Any) -> dict[str, Any]:
    """Gates of zero: several in one head, of one token in each row, and at both ends."""
    gates = random_gates(place.batch, place.heads, place.length)
    gates[:, 0, [0, 40, 41, 140]] = -torch.inf
    gates[:, -1, 128] = gates[-1, -1, -1] = -torch.inf
    return {"bias": "gates", "log_gates": gates} | features


def extremes(place: Place) -> torch.Tensor:
    """Gates of one, of nearly one, and some that hardly let anything pass."""
    gates = random_gates(place.batch, place.heads, place.length)
    gates[:, 0] = 0.0
    gates[:, 0, place.length // 2] = -1e5
    gates[:, 1] = -1e-8
    gates[:, 1, 70:] = -300.0
    return gates


def cliffs(place: Place) -> torch.Tensor:
    """Gates that fall far at a few tokens, at any place of a block, and little between them."""
    gates = random_gates(place.batch, place.heads, place.length) / 10
    gates[:, :, [40, 41, 75, 104, 110, 141]] = torch.tensor([-1e5, -3000.0, -30.0, -300.0])[: place.heads, None]
    return gates


def times_with_a_gap(place: Place) -> torch.Tensor:
    """Seconds of which those before the 80th count from 0, the others from 1970, in microseconds."""
    times = torch.arange(place.length)
    times[80:] += 1_790_000_000_000_000
    return times


FEATURES |= {
    "gates": lambda p: {"bias": "gates"},
    "gates_long": lambda p: {"bias": "gates", "queries": 2 * p.length + 30},
    "gates_one_row_for_all": lambda p: {"bias": "gates", "log_gates": random_gates(1, p.heads, p.length)},
    "gates_in_half": lambda p: {"bias": "gates", "log_gates": random_gates(p.batch, p.heads, p.length).half()},
    "gates_in_float64": lambda p: {"bias": "gates", "log_gates": random_gates(p.batch, p.heads, p.length).double()},
    "gates_both_sides": lambda p: symmetric(bias="gates"),
    "gates_grouped": lambda p: {"bias": "gates", "heads": 4, "kv_heads": 2},
    "gates_grouped_both_sides": lambda p: symmetric(bias="gates", heads=6, kv_heads=3),
    "gates_fewer_queries": lambda p: {"bias": "gates", "queries": 70, "keys": 2 * p.length},
    "gates_one_query": lambda p: {"bias": "gates", "queries": 1, "keys": 2 * p.length - 100},
    "gates_query_start": lambda p: {"bias": "gates", "queries": 50, "keys": p.length, "query_start": p.length - 80},
    "gates_query_start_beyond": lambda p: {"bias": "gates", "queries": 40, "keys": 200, "query_start": 180},
    "gates_query_start_by_row": lambda p: symmetric(
        bias="gates", batch=2, queries=p.length // 2, query_start=torch.tensor([p.length // 3, -7])
    ),
    "gates_left_padding": lambda p: {
        "bias": "gates", "batch": 2, "key_padding_mask": left_padding(p.length, p.length // 2 - 10, length=p.length),
    },
    "gates_right_padding": lambda p: symmetric(
        bias="gates", batch=2, key_padding_mask=right_padding(p.length - 10, 1, length=p.length)
    ),
    "gates_packed": lambda p: packed(0, 1, 150, 150, 300, bias="gates"),
    "gates_packed_both_sides": lambda p: packed(0, 128, 140, 300, bias="gates", causal=False),
    "gates_extreme": lambda p: {"bias": "gates", "log_gates": extremes(p)},
    "gates_extreme_both_sides": lambda p: symmetric(
        bias="gates", log_gates=extremes(p), future_gates=extremes(p).flip(1)
    ),
    "gates_with_cliffs": lambda p: {"bias": "gates", "log_gates": cliffs(p)},
    "gates_with_cliffs_query_start": lambda p: {
        "bias": "gates", "queries": p.length - 83, "keys": p.length, "log_gates": cliffs(p),
    },
    "gates_with_cliffs_both_sides": lambda p: symmetric(
        bias="gates", log_gates=cliffs(p), future_gates=cliffs(p).flip(2)
    ),
    "borders": lambda p: borders(p),
    "borders_both_sides": lambda p: borders(p, causal=False, future_gates=borders(p)["log_gates"].flip(1, 2)),
    "borders_and_fewer_queries": lambda p: borders(p, queries=p.length // 3, keys=p.length),
    "borders_and_padding": lambda p: borders(
        p, key_padding_mask=left_padding(*[p.length - 45 * (row + 1) for row in range(p.batch)], length=p.length)
    ),
    "borders_everywhere": lambda p: {
        "bias": "gates", "log_gates": torch.full((p.batch, p.heads, p.length), -torch.inf),
    },
    "gates_dropout": lambda p: {"bias": "gates", "dropout": 0.3},
    "gates_dropout_both_sides": lambda p: symmetric(bias="gates", dropout=0.3, dropout_seed=1),
    "times": lambda p: {"bias": "times"},
    "times_dropout": lambda p: {"bias": "times", "dropout": 0.3},
    "times_both_sides": lambda p: symmetric(bias="times", slopes=p.steep),
    "times_by_row": lambda p: {
        "bias": "times", "batch": 2, "slopes": p.steep_by_row,
        "times": torch.stack((random_times(p.length), random_times(p.length, 1))),
    },
    "times_of_integers": lambda p: {"bias": "times", "times": random_times(p.length).long()},
    "times_with_a_slope_of_zero": lambda p: {
        "bias": "times", "batch": 2, "times": torch.stack((random_times(p.length), 1e6 * random_times(p.length, 1))),
        "slopes": torch.cat((torch.zeros(1), p.steep[1:])) * torch.tensor([1.0] + [1e-6] * (p.heads - 1)),
    },
    "times_with_a_gap": lambda p: {
        "bias": "times", "queries": 100, "query_start": 10, "keys": p.length, "times": times_with_a_gap(p),
        "slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])[: p.heads],
    },
    "times_packed": lambda p: packed(0, 77, p.length, bias="times"),
    "times_right_padding": lambda p: symmetric(
        bias="times", batch=2, slopes=p.steep, key_padding_mask=right_padding(p.length - 10, 1, length=p.length)
    ),
    "times_query_start": lambda p: symmetric(bias="times", queries=100, query_start=-70, keys=p.length),
}  # fmt: skip
WITHOUT_KERNELS = [name for name in FEATURES if name.startswith("kerple")]


def feature_case(place: Place, feature: str, **more: Any) -> Case:
    if feature in WITHOUT_KERNELS and place.backend == "triton":
        pytest.skip("no kernels for this bias yet")
    return place.case(**FEATURES[feature](place) | more)
