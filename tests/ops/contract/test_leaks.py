"""What nobody may look at never shows: padding, the unwritten end of a cache, other documents. What is not finite
shows where dense attention shows it. And where there is nothing to look at, zeros come out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import hostile
from tests.ops.cases import left_padding, right_padding
from tests.ops.contract.places import WITH_WINDOWS, Place, at, formats
from tests.ops.dense import Case, dense

# What is not finite shows


@pytest.mark.parametrize("tolerance", [None, 0.0], ids=["windows", "everything"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("name", hostile.NON_FINITE)
def test_nan_comes_out_where_dense_attention_shows_it(
    name: str, causal: bool, tolerance: float | None, place: Place
) -> None:
    for length in (150,) if place.interpreted else (100, 640):
        for dtype in (torch.float32, place.low):
            arguments = hostile.NON_FINITE[name](length, dtype)
            _, row, head, _ = arguments.pop("poisoned")
            if place.interpreted:  # the row and the head where it stands
                arguments |= {n: arguments[n][[row]][:, [head]] for n in ("q", "k", "v")}
                arguments["slopes"] = arguments["slopes"][[head]]
            for slopes in (arguments["slopes"], torch.full_like(arguments["slopes"], 0.9)):
                case = place.here(Case(**(arguments | {"slopes": slopes}), causal=causal, tolerance=tolerance))
                truth = dense(case)[0]
                assert bool(torch.isnan(truth).any()) or name == "minus_inf_in_k"
                with torch.no_grad():
                    out = case.attend(place.backend)
                differ = (torch.isnan(out) != torch.isnan(truth)).any(-1).nonzero()
                assert not len(differ), (
                    f"{len(differ)} queries differ, first (batch, head, query) {differ[0].tolist()}"
                )
                finite = ~torch.isnan(truth)
                if place.backend == "triton" and dtype == place.low:  # weights are rounded as the output is
                    unit = torch.finfo(dtype).eps
                    torch.testing.assert_close(out[finite], truth[finite].to(dtype), rtol=unit, atol=2 * unit)
                else:
                    torch.testing.assert_close(out[finite], truth[finite].to(dtype))


@at(*WITH_WINDOWS)  # the reference multiplies by weights of zero
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows_where_it_should(where: str, value: float, place: Place) -> None:
    """In the head and row it stands in, for every query that sees it and for no query of another tile or row."""
    case = place.case(batch=2, heads=2, queries=200, slopes=torch.tensor([0.9, 0.4]))
    getattr(case, where)[1, 0, 130, 3] = value
    with torch.no_grad():
        out = case.attend(place.backend)
    assert bool(torch.isfinite(out[0]).all())
    assert bool(torch.isfinite(out[1, 1]).all())
    assert bool(torch.isfinite(out[1, 0, :128]).all())
    if where == "q":
        assert bool(torch.isnan(out[1, 0, 130]).all())
        assert bool(torch.isfinite(out[1, 0, 131:]).all())
    elif where == "v":
        assert not bool(torch.isfinite(out[1, 0, 130:135, 3]).any())
    elif math.isnan(value):
        assert bool(torch.isnan(out[1, 0, 130:]).all())


# What is masked never leaks


def assert_holes_do_not_matter(case: Case, place: Place, garbages: tuple[float, ...]) -> None:
    """Whatever stands in keys that nobody sees, output and gradients are the same, and gradients are zero there.

    On a CPU to the last bit, and windows with them.
    """
    hole = ~case.seen.any(2).any(1)[:, None, :, None]
    assert bool(hole.any())
    clean = replace(case, k=case.k.masked_fill(hole, 0.0), v=case.v.masked_fill(hole, 0.0))
    expected = clean.run(place.backend)
    if place.backend != "triton" or case.q.shape[2] > 1:  # see test_decoding.test_recording_changes_nothing
        place.judge(clean).check(expected)
    exactly = place.device == "cpu" and not place.interpreted
    for garbage in garbages:
        dirty = replace(case, k=case.k.masked_fill(hole, garbage), v=case.v.masked_fill(hole, garbage))
        results = dirty.run(place.backend)
        for name, tensor in results.items():
            assert bool(torch.isfinite(tensor).all()), (name, garbage)
            if exactly:
                assert torch.equal(tensor, expected[name]), (garbage, name)
            torch.testing.assert_close(tensor, expected[name], msg=lambda m, name=name: f"{name}: {m}")
        for name in ("k", "v"):
            assert not bool(results[name].masked_fill(~hole, 0.0).any()), (garbage, name)
        if case.slopes is not None and exactly:
            assert torch.equal(dirty.windows(), clean.windows())


def biased(place: Place, bias: str, dtype: torch.dtype) -> dict[str, Any]:
    if place.name == "triton_gpu" and dtype == torch.float32 and bias != "linear":
        pytest.skip("what reads keys is the same for every bias, and takes thrice as long to compile as in 16 bits")
    return {"dtype": dtype} | {"linear": {"slopes": place.steep}, "bucket": place.bucket, "none": {"bias": "none"}}[
        bias
    ]


def garbage_for(dtype: torch.dtype, place: Place) -> tuple[float, ...]:
    if place.interpreted:
        return (math.nan,) if dtype == torch.float16 else (math.inf, 1e30)
    return (math.nan, math.inf, 6e4 if dtype == torch.float16 else 1e30, 7.0)


@formats(torch.float32, "low")
@pytest.mark.parametrize("bias", ["linear", "bucket", "none"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("side", [left_padding, right_padding])
def test_padding_never_leaks(
    side: Callable[..., Tensor], causal: bool, bias: str, dtype: torch.dtype, place: Place
) -> None:
    lengths = [(90, (90, 41)), (300, (290, 100)), (300, (17, 0))]
    for length, real in [(150, (140, 61))] if place.interpreted else lengths:
        mask = side(*real, length=length)
        case = place.case(batch=2, queries=length, causal=causal, key_padding_mask=mask, **biased(place, bias, dtype))
        assert_holes_do_not_matter(case, place, garbage_for(dtype, place))


@formats(torch.float32, "low")
@pytest.mark.parametrize("bias", ["linear", "bucket", "none"])
@pytest.mark.parametrize("queries", [1, 5, 70, 200])
@pytest.mark.parametrize("start", ["all_rows", "by_row"])
def test_the_end_of_a_cache_never_leaks(
    start: str, queries: int, bias: str, dtype: torch.dtype, place: Place
) -> None:
    keys = 700
    if place.interpreted:
        keys, queries = 190, min(queries, 70) + queries // 10
    starts = {"all_rows": keys // 5, "by_row": torch.tensor([keys // 3, 2])}[start]
    case = place.case(batch=2, queries=queries, keys=keys, query_start=starts, **biased(place, bias, dtype))
    assert_holes_do_not_matter(case, place, garbage_for(dtype, place))


def test_padding_and_the_end_of_a_cache_never_leak_together(place: Place) -> None:
    mask = torch.arange(500) >= torch.tensor([[30], [200]])
    case = place.case(batch=2, queries=9, keys=500, query_start=torch.tensor([60, 300]), key_padding_mask=mask)
    assert_holes_do_not_matter(case, place, garbage_for(torch.float32, place))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_other_documents(garbage: float, causal: bool, place: Place) -> None:
    case = place.case(
        batch=1,
        queries=260,
        causal=causal,
        slopes=place.steep,
        cu_seqlens=torch.tensor([0, 70, 200, 260]),
        dtype=place.quick,
    )
    bad = torch.zeros(260, dtype=torch.bool, device=place.device)
    bad[70:200] = True
    dirty = replace(case, **{n: getattr(case, n).masked_fill(bad[:, None], garbage) for n in ("k", "v")})
    results, clean = dirty.run(place.backend), case.run(place.backend)
    for name in ("out", "q", "k", "v"):
        one, two = results[name][:, :, ~bad], clean[name][:, :, ~bad]
        if place.backend == "triton":
            assert torch.equal(one, two), name
        torch.testing.assert_close(one, two)


# Nothing to look at


BLIND: dict[str, dict[str, Any]] = {
    "padded_row": {"queries": 150, "key_padding_mask": right_padding(150, 0, length=150)},
    "padded_row_symmetric": {"queries": 150, "causal": False, "key_padding_mask": right_padding(150, 0, length=150)},
    "before_left_padding": {"queries": 300, "key_padding_mask": left_padding(20, 170, length=300)},
    "more_queries": {"queries": 300, "keys": 130},
    "before_the_keys": {"queries": 200, "keys": 200, "query_start": -140},
    "all_before_the_keys": {"queries": 200, "keys": 200, "query_start": -500},
    "no_keys": {"queries": 40, "keys": 0},
    "no_keys_symmetric": {"queries": 40, "keys": 0, "causal": False},
    "no_keys_padded": {"queries": 3, "keys": 0, "key_padding_mask": torch.ones((2, 0), dtype=torch.bool)},
    "no_keys_bucket": {"queries": 40, "keys": 0, "bias": "bucket"},
    "no_keys_no_bias": {"queries": 40, "keys": 0, "bias": "none"},
    "one_sided": {
        "heads": 3,
        "queries": 40,
        "keys": 100,
        "causal": False,
        "query_start": 120,
        "sees": ("past", "future", "both"),
    },
    "bucket": {"queries": 300, "keys": 130, "bias": "bucket"},
    "grouped": {"queries": 300, "keys": 130, "heads": 4, "kv_heads": 2},
}


@formats(torch.float32, "low")
@pytest.mark.parametrize("name", BLIND)
def test_a_query_without_keys_gives_zeros(name: str, dtype: torch.dtype, place: Place) -> None:
    case = place.case(**{"batch": 2} | BLIND[name], dtype=dtype)
    blind = dense(case)[1].sum(-1) == 0  # [B, H, Tq]
    assert bool(blind.any())
    results = case.run(place.backend)
    for tensor in results.values():
        assert bool(torch.isfinite(tensor).all())
    assert not bool(results["out"][blind].any())
    assert not bool(results["q"][blind].any())
    if not bool(blind.all()):
        assert bool(results["out"][~blind].any(-1).all())
    place.judge(case).check(results)
    with torch.no_grad():
        assert not bool(case.attend(place.backend)[blind].any())


EMPTY: dict[str, dict[str, Any]] = {
    "no_rows": {"batch": 0, "queries": 5},
    "no_queries": {"queries": 0, "keys": 7},
    "no_keys": {"queries": 5, "keys": 0},
    "no_keys_and_gates": {"queries": 5, "keys": 0, "bias": "gates"},
    "no_keys_and_gates_of_both_sides": {"queries": 5, "keys": 0, "bias": "gates", "causal": False},
    "nothing": {"queries": 0},
    "no_documents": {"batch": 1, "queries": 0, "cu_seqlens": torch.tensor([0])},
    "an_empty_document": {"batch": 1, "queries": 0, "cu_seqlens": torch.tensor([0, 0])},
    "only_empty_documents": {"batch": 1, "queries": 0, "cu_seqlens": torch.tensor([0, 0, 0])},
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_tensors(name: str, place: Place) -> None:
    case = place.case(**EMPTY[name])
    results = case.run(place.backend)
    for key, like in (("out", case.q), ("q", case.q), ("k", case.k), ("v", case.v)):
        assert results[key].shape == like.shape
        assert not bool(results[key].any())
    with torch.no_grad():
        assert case.attend(place.backend).shape == case.q.shape
