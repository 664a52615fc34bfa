"""Every backend computes attention: its output and all of its gradients agree with float64 dense attention.

The allowed error comes from `budget.py`. Each feature is tried alone, with nothing skipped (tolerance 0) and with
the default tolerance; a search over random combinations follows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import trainshort as ts
from tests.ops import hostile
from tests.ops.budget import Judge, assert_within_budget
from tests.ops.cases import BACKENDS, left_padding, random_case, right_padding
from tests.ops.dense import Case
from tests.ops.layouts import LAYOUTS

ONE_SIDED = ts.LinearBias.one_sided(torch.ones(5)).sees
STEEP = torch.tensor([0.9, 0.4, 0.05])

FEATURES: dict[str, dict] = {
    "causal": {"queries": 300},
    "symmetric": {"queries": 300, "causal": False},
    "one_sided": {"queries": 300, "heads": 5, "causal": False, "sees": ONE_SIDED},
    "left_right_slopes": {"queries": 300, "causal": False, "slopes": STEEP, "future": STEEP.flip(0)},
    "left_right_slopes_by_row": {
        "queries": 260,
        "causal": False,
        "slopes": STEEP,
        "future": torch.tensor([[0.9, 0.1, 0.3], [0.02, 0.6, 0.2]]),
    },
    "offset": {"queries": 300, "causal": False, "offset": 0.5},
    "offset_future_and_sight": {
        "queries": 300,
        "causal": False,
        "offset": 1.0,
        "slopes": STEEP,
        "future": STEEP.flip(0),
        "sees": ("both", "future", "past"),
    },
    "slopes_by_row": {"queries": 300, "slopes": torch.tensor([[0.9, 0.1, 0.3], [0.02, 0.6, 0.2]])},
    "float64_slopes": {"queries": 140, "slopes": STEEP.double()},
    "no_bias": {"queries": 300, "bias": "none"},
    "no_bias_symmetric": {"queries": 300, "bias": "none", "causal": False},
    "no_bias_query_start": {"queries": 40, "keys": 300, "bias": "none", "query_start": 200},
    "bucket": {"queries": 300, "bias": "bucket"},
    "bucket_symmetric": {"queries": 300, "bias": "bucket", "causal": False, "bidirectional": True},
    "bucket_causal_from_both": {"queries": 300, "bias": "bucket", "bidirectional": True},
    "bucket_symmetric_from_causal": {"queries": 300, "bias": "bucket", "causal": False},
    "bucket_small": {"queries": 300, "bias": "bucket", "num_buckets": 6, "max_distance": 20},
    "bucket_wide": {"queries": 700, "bias": "bucket", "max_distance": 600},
    "bucket_grouped": {
        "queries": 200,
        "bias": "bucket",
        "heads": 4,
        "kv_heads": 2,
        "num_buckets": 8,
        "max_distance": 64,
    },
    "bucket_padded": {"queries": 200, "bias": "bucket", "key_padding_mask": left_padding(150, 33, length=200)},
    "one_key_head": {"queries": 300, "heads": 4, "kv_heads": 1},
    "grouped": {"queries": 300, "heads": 6, "kv_heads": 2},
    "grouped_symmetric": {"queries": 300, "heads": 6, "kv_heads": 3, "causal": False},
    "grouped_one_sided": {
        "queries": 300,
        "heads": 6,
        "kv_heads": 2,
        "causal": False,
        "sees": ("past",) * 3 + ("future",) * 3,
    },
    "grouped_slopes_by_row": {
        "queries": 300,
        "heads": 4,
        "kv_heads": 2,
        "slopes": torch.tensor([[0.9, 0.1, 0.3, 0.5], [0.02, 0.6, 0.2, 0.1]]),
    },
    "fewer_queries": {"queries": 70, "keys": 500},
    "one_query": {"queries": 1, "keys": 500},
    "fewer_queries_symmetric": {"queries": 150, "keys": 500, "causal": False},
    "more_queries": {"queries": 400, "keys": 150},
    "more_queries_symmetric": {"queries": 400, "keys": 150, "causal": False},
    "query_start": {"queries": 50, "keys": 400, "query_start": 300},
    "query_start_zero": {"queries": 200, "keys": 400, "query_start": 0},
    "query_start_symmetric": {"queries": 150, "keys": 400, "query_start": 30, "causal": False},
    "query_start_beyond_the_keys": {"queries": 40, "keys": 200, "query_start": 900, "slopes": STEEP / 100},
    "query_start_before_the_keys": {"queries": 200, "keys": 200, "query_start": -70},
    "query_start_by_row": {"queries": 50, "keys": 400, "query_start": torch.tensor([300, 7])},
    "query_start_by_row_int32": {
        "queries": 50,
        "keys": 400,
        "query_start": torch.tensor([0, 350], dtype=torch.int32),
    },
    "query_start_by_row_symmetric": {
        "queries": 150,
        "keys": 400,
        "causal": False,
        "query_start": torch.tensor([300, 7]),
    },
    "left_padding": {"queries": 300, "key_padding_mask": left_padding(300, 140, length=300)},
    "left_padding_whole_blocks": {"queries": 300, "key_padding_mask": left_padding(10, 0, length=300)},
    "right_padding": {"queries": 300, "key_padding_mask": right_padding(300, 140, length=300)},
    "right_padding_symmetric": {
        "queries": 300,
        "causal": False,
        "key_padding_mask": right_padding(290, 1, length=300),
    },
    "left_padding_symmetric": {
        "queries": 300,
        "causal": False,
        "key_padding_mask": left_padding(200, 31, length=300),
    },
    "padding_and_fewer_queries": {"queries": 60, "keys": 300, "key_padding_mask": left_padding(300, 25, length=300)},
    "padding_and_query_start": {
        "queries": 60,
        "keys": 300,
        "query_start": torch.tensor([200, 100]),
        "key_padding_mask": torch.stack(
            (torch.arange(300) >= 20, (torch.arange(300) >= 3) & (torch.arange(300) < 150))
        ),
    },
    "packed": {"batch": 1, "queries": 300, "cu_seqlens": torch.tensor([0, 1, 150, 151, 300])},
    "packed_int32": {"batch": 1, "queries": 300, "cu_seqlens": torch.tensor([0, 100, 300], dtype=torch.int32)},
    "packed_symmetric": {"batch": 1, "queries": 300, "causal": False, "cu_seqlens": torch.tensor([0, 128, 140, 300])},
    "packed_empty_documents": {"batch": 1, "queries": 200, "cu_seqlens": torch.tensor([0, 0, 77, 77, 77, 200, 200])},
    "packed_bucket": {"batch": 1, "queries": 200, "bias": "bucket", "cu_seqlens": torch.tensor([0, 77, 200])},
    "packed_grouped": {
        "batch": 1,
        "queries": 260,
        "heads": 6,
        "kv_heads": 3,
        "cu_seqlens": torch.tensor([0, 130, 260]),
    },
    "packed_one_sided": {
        "batch": 1,
        "queries": 260,
        "heads": 5,
        "causal": False,
        "sees": ONE_SIDED,
        "cu_seqlens": torch.tensor([0, 130, 260]),
    },
    "scale": {"queries": 200, "scale": 1.0},
    "scale_zero": {"queries": 200, "scale": 0.0},
    "scale_negative": {"queries": 200, "scale": -0.7},
    "twelve_heads": {"batch": 1, "queries": 200, "heads": 12},
    "twelve_heads_four_key_heads": {"batch": 1, "queries": 200, "heads": 12, "kv_heads": 4},
}


@cache
def judge_of(feature: str, tolerance: float | None, dtype: torch.dtype = torch.float32) -> Judge:
    return Judge(random_case(**FEATURES[feature], tolerance=tolerance, dtype=dtype))


@cache
def judge_of_hostile(name: str, causal: bool, tolerance: float | None) -> Judge:
    return Judge(Case(**hostile.FINITE[name](400), causal=causal, tolerance=tolerance))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tolerance", [0.0, None], ids=["everything", "windows"])
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature: str, tolerance: float | None, backend: str) -> None:
    judge = judge_of(feature, tolerance)
    judge.check(judge.case.run(backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "feature",
    ["causal", "symmetric", "left_right_slopes", "bucket", "grouped", "fewer_queries", "left_padding", "packed"],
)
def test_feature_in_every_dtype(feature: str, dtype: torch.dtype, backend: str) -> None:
    for tolerance in (0.0, None):
        judge = judge_of(feature, tolerance, dtype)
        judge.check(judge.case.run(backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [1, 8, 33, 64])
@pytest.mark.parametrize("length", [1, 2, 17, 127, 128, 129, 257, 700])
def test_length_and_head_dim(length: int, dim: int, backend: str) -> None:
    for causal in (True, False):
        case = random_case(queries=length, dim=dim, causal=causal, tolerance=0.0)
        assert_within_budget(case.run(backend), case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tolerance", [0.0, None], ids=["everything", "windows"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("name", hostile.FINITE)
def test_hostile_inputs(name: str, causal: bool, tolerance: float | None, backend: str) -> None:
    judge = judge_of_hostile(name, causal, tolerance)
    judge.check(judge.case.run(backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_any_strides(layout, dtype: torch.dtype, backend: str) -> None:
    for length in (100, 300):
        case = random_case(queries=length, dim=16, dtype=dtype, heads=4, slopes=torch.tensor([0.9, 0.4, 0.1, 0.01]))
        strided = {name: layout(getattr(case, name)).to(dtype) for name in ("q", "k", "v")}
        assert_within_budget(replace(case, **strided).run(backend), replace(case, **strided))
        only_q = replace(case, q=strided["q"])
        assert_within_budget(only_q.run(backend), only_q)


@pytest.mark.parametrize("backend", BACKENDS)
def test_expanded_upstream_gradient(backend: str) -> None:
    """`out.sum()` hands back a gradient without memory of its own."""
    case = random_case(queries=300)
    leaves = [t.clone().requires_grad_() for t in (case.q, case.k, case.v)]
    ts.alibi_attention(*leaves, backend=backend).sum().backward()
    again = [t.clone().requires_grad_() for t in (case.q, case.k, case.v)]
    ts.alibi_attention(*again, backend=backend).backward(torch.ones_like(case.q))
    for one, two in zip(leaves, again, strict=True):
        assert one.grad is not None
        assert two.grad is not None
        torch.testing.assert_close(one.grad, two.grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_alibi_attention_is_attention_with_a_linear_bias(backend: str) -> None:
    case = random_case(queries=200, heads=6)
    short = ts.alibi_attention(case.q, case.k, case.v, backend=backend)
    assert torch.equal(short, case.attend(backend))
    slopes = torch.rand(6) + 0.1
    short = ts.alibi_attention(case.q, case.k, case.v, slopes, backend=backend, causal=False)
    assert torch.equal(short, replace(case, slopes=slopes, causal=False).attend(backend))


@pytest.mark.parametrize("feature", [name for name in FEATURES if name.startswith("no_bias")] + ["causal", "bucket"])
def test_auto_is_one_of_them(feature: str) -> None:
    case = random_case(**FEATURES[feature])
    assert ts.backend_for(case.q) in BACKENDS
    assert_within_budget(case.run("auto"), case)


def test_auto_without_bias_takes_a_start_for_each_row() -> None:
    case = random_case(queries=64, keys=64, bias="none", query_start=torch.tensor([0, 5]))
    assert_within_budget(case.run("auto"), case)


@st.composite
def combinations(draw) -> Case:
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    packed = draw(st.booleans())
    batch = 1 if packed else draw(st.integers(1, 3))
    keys = draw(st.integers(1, 420))
    queries = keys if packed else draw(st.one_of(st.just(keys), st.integers(1, 420)))
    causal = draw(st.booleans())
    features: dict = {"causal": causal, "tolerance": draw(st.sampled_from([None, 0.0, 1e-3]))}
    features["scale"] = draw(st.sampled_from([None, 1.0, 0.3]))
    bias = draw(st.sampled_from(["linear", "linear", "linear", "bucket", "none"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def slopes() -> Tensor:
        shape = (batch, heads) if draw(st.booleans()) else (heads,)
        return 2.0 ** (-10.0 * torch.rand(shape, generator=generator))

    if bias == "linear":
        features["slopes"] = slopes()
        if not causal:
            features["future"] = slopes() if draw(st.booleans()) else None
            features["offset"] = draw(st.sampled_from([0.0, 0.5, 1.0]))
            if draw(st.booleans()):
                features["sees"] = draw(
                    st.lists(st.sampled_from(["past", "future", "both"]), min_size=heads, max_size=heads)
                )
    elif bias == "bucket":
        features["bidirectional"] = draw(st.booleans())
        features["max_distance"] = draw(st.sampled_from([20, 128, 300]))
    if packed:
        borders = sorted(draw(st.lists(st.integers(0, keys), max_size=5)))
        features["cu_seqlens"] = torch.tensor([0, *borders, keys])
    else:
        if draw(st.booleans()):
            real = [draw(st.integers(0, keys)) for _ in range(batch)]
            side = draw(st.sampled_from([left_padding, right_padding]))
            features["key_padding_mask"] = side(*real, length=keys)
        if draw(st.booleans()):
            starts = [draw(st.integers(-10, keys + 10)) for _ in range(batch)]
            features["query_start"] = draw(st.sampled_from([starts[0], torch.tensor(starts)]))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    return random_case(
        batch=batch, heads=heads, kv_heads=kv_heads, queries=queries, keys=keys, bias=bias, dtype=dtype,
        dim=draw(st.sampled_from([1, 4, 16, 40])), seed=draw(st.integers(0, 2**20)), **features,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(case=combinations())
def test_combinations(backend: str, case: Case) -> None:
    assert_within_budget(case.run(backend), case)
