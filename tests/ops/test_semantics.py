"""What attention means at its edges: what comes out, what never leaks, and which calls must agree with each other."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.ops import hostile
from tests.ops.budget import assert_within_budget, error_budget, excess, size
from tests.ops.cases import BACKENDS, left_padding, random_case, right_padding
from tests.ops.dense import Case, Results, dense, exact

STEEP = torch.tensor([0.9, 0.3, 0.05])
pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def assert_agree(one: Results, two: Results, case: Case) -> None:
    """Two computations of one thing may each be off by what the format allows for it."""
    allowed = {name: 2.0 * limit for name, limit in error_budget(case).items() if name in one}
    errors = excess(one, {name: two[name].double() for name in one}, allowed)
    assert max(errors.values()) <= 1.0, errors


# What is not finite shows


@pytest.mark.parametrize("tolerance", [None, 0.0], ids=["windows", "everything"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("name", hostile.NON_FINITE)
def test_nan_comes_out_where_dense_attention_shows_it(
    name: str, causal: bool, tolerance: float | None, backend: str
) -> None:
    for length in (100, 640):
        for dtype in (torch.float32, torch.bfloat16):
            arguments = hostile.NON_FINITE[name](length, dtype)
            arguments.pop("poisoned")
            for slopes in (arguments["slopes"], torch.full((4,), 0.9)):
                case = Case(**(arguments | {"slopes": slopes}), causal=causal, tolerance=tolerance)
                truth = dense(case)[0]
                assert bool(torch.isnan(truth).any()) or name == "minus_inf_in_k"
                out = case.attend(backend)
                differ = (torch.isnan(out) != torch.isnan(truth)).any(-1).nonzero()
                assert not len(differ), (
                    f"{len(differ)} queries differ, first (batch, head, query) {differ[0].tolist()}"
                )
                finite = ~torch.isnan(truth)
                torch.testing.assert_close(out[finite], truth[finite].to(dtype))


# What is masked never leaks


def assert_holes_do_not_matter(case: Case, hole: Tensor, backend: str) -> None:
    """Whatever stands in `hole` [B, Tk], output and gradients are the same to the last bit, and zero in the hole."""
    where = hole[:, None, :, None]
    clean = replace(case, k=case.k.masked_fill(where, 0.0), v=case.v.masked_fill(where, 0.0))
    expected = clean.run(backend)
    assert_within_budget(expected, clean)
    for garbage in (math.nan, math.inf, 1e30, 7.0):
        dirty = replace(case, k=case.k.masked_fill(where, garbage), v=case.v.masked_fill(where, garbage))
        results = dirty.run(backend)
        for name, tensor in results.items():
            assert torch.equal(tensor, expected[name]), (garbage, name)
        for name in ("k", "v"):
            assert not bool(results[name].masked_fill(~where, 0.0).any()), (garbage, name)
        if case.slopes is not None:
            assert torch.equal(dirty.windows(), clean.windows())


@pytest.mark.parametrize("bias", ["linear", "bucket", "none"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("side", [left_padding, right_padding])
def test_padding_never_leaks(side, causal: bool, bias: str, backend: str) -> None:
    for length, real in ((90, (90, 41)), (300, (290, 100)), (300, (17, 0))):
        mask = side(*real, length=length)
        slopes = {"slopes": STEEP} if bias == "linear" else {}
        case = random_case(queries=length, causal=causal, bias=bias, key_padding_mask=mask, **slopes)
        assert_holes_do_not_matter(case, ~mask, backend)


@pytest.mark.parametrize("queries", [1, 5, 70, 200])
@pytest.mark.parametrize("start", [130, torch.tensor([300, 2])], ids=["all_rows", "by_row"])
def test_the_end_of_a_cache_never_leaks(start: int | Tensor, queries: int, backend: str) -> None:
    case = random_case(queries=queries, keys=700, query_start=start, slopes=STEEP)
    last = torch.as_tensor(start).expand(2) + queries - 1
    unwritten = torch.arange(700) > last[:, None]
    assert_holes_do_not_matter(case, unwritten, backend)


def test_padding_and_the_end_of_a_cache_never_leak_together(backend: str) -> None:
    key = torch.arange(500).expand(2, -1)
    mask = key >= torch.tensor([[30], [200]])
    case = random_case(queries=9, keys=500, query_start=torch.tensor([60, 300]), key_padding_mask=mask)
    assert_holes_do_not_matter(case, ~mask | (key > torch.tensor([[68], [308]])), backend)


# Nothing to look at


BLIND: dict[str, dict] = {
    "padded_row": {"queries": 150, "key_padding_mask": right_padding(150, 0, length=150)},
    "padded_row_symmetric": {"queries": 150, "causal": False, "key_padding_mask": right_padding(150, 0, length=150)},
    "before_left_padding": {"queries": 300, "key_padding_mask": left_padding(20, 170, length=300)},
    "more_queries": {"queries": 300, "keys": 130},
    "before_the_keys": {"queries": 200, "keys": 200, "query_start": -140},
    "all_before_the_keys": {"queries": 200, "keys": 200, "query_start": -500},
    "no_keys": {"queries": 40, "keys": 0},
    "no_keys_symmetric": {"queries": 40, "keys": 0, "causal": False},
    "no_keys_bucket": {"queries": 40, "keys": 0, "bias": "bucket"},
    "no_keys_no_bias": {"queries": 40, "keys": 0, "bias": "none"},
    "one_sided": {
        "queries": 40,
        "keys": 100,
        "causal": False,
        "query_start": 120,
        "sees": ("past", "future", "both"),
    },
    "bucket": {"queries": 300, "keys": 130, "bias": "bucket"},
    "grouped": {"queries": 300, "keys": 130, "heads": 4, "kv_heads": 2},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BLIND)
def test_a_query_without_keys_gives_zeros(name: str, dtype: torch.dtype, backend: str) -> None:
    case = random_case(**BLIND[name], dtype=dtype)
    blind = dense(case)[1].sum(-1) == 0  # [B, H, Tq]
    assert bool(blind.any())
    results = case.run(backend)
    for tensor in results.values():
        assert bool(torch.isfinite(tensor).all())
    assert not bool(results["out"][blind].any())
    assert not bool(results["q"][blind].any())
    assert_within_budget(results, case)


@pytest.mark.parametrize("shape", [(0, 3, 5, 5), (2, 3, 0, 5), (2, 3, 0, 0)], ids=["batch", "queries", "both"])
def test_empty_tensors(shape: tuple[int, int, int, int], backend: str) -> None:
    batch, heads, queries, keys = shape
    case = random_case(batch=batch, heads=heads, queries=queries, keys=keys)
    results = case.run(backend)
    for name, like in (("out", case.q), ("q", case.q), ("k", case.k), ("v", case.v)):
        assert results[name].shape == like.shape
        assert not bool(results[name].any())


def test_an_empty_packed_row(backend: str) -> None:
    case = random_case(batch=1, queries=0, cu_seqlens=torch.tensor([0, 0]))
    assert case.run(backend)["out"].shape == case.q.shape


# Calls that must agree


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_distance_alone_counts(causal: bool, backend: str) -> None:
    """Keys moved by some places and queries with them: nothing changes."""
    here = random_case(queries=200, keys=400, query_start=150, causal=causal, slopes=STEEP)
    for shift in (1, 77, 128, 1000):
        there = replace(
            here,
            k=torch.nn.functional.pad(here.k, (0, 0, shift, 0), value=5.0),
            v=torch.nn.functional.pad(here.v, (0, 0, shift, 0), value=5.0),
            key_padding_mask=(torch.arange(400 + shift) >= shift).expand(2, -1),
            query_start=150 + shift,
        )
        results = there.run(backend)
        for name in ("k", "v"):
            results[name] = results[name][:, :, shift:]
        assert_agree(results, here.run(backend), here)


@pytest.mark.parametrize("tolerance", [None, 1e-3])
def test_later_tokens_do_not_change_earlier_outputs(tolerance: float | None, backend: str) -> None:
    case = random_case(queries=700, slopes=STEEP, tolerance=tolerance)
    for cut in (1, 128, 500):
        changed = {n: getattr(case, n).clone() for n in ("q", "k", "v")}
        for tensor in changed.values():
            tensor[:, :, cut:] = 30.0 * tensor[:, :, cut:].flip(2)
        early = replace(case, q=case.q[:, :, :cut], k=case.k[:, :, :cut], v=case.v[:, :, :cut])
        allowed = 2.0 * error_budget(early)["out"]
        before, after = (c.attend(backend)[:, :, :cut] for c in (case, replace(case, **changed)))
        assert bool((size("out", before.double() - after) <= allowed).all())


@pytest.mark.parametrize("bias", ["linear", "bucket", "none"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_packed_documents_are_separate_ones(causal: bool, bias: str, backend: str) -> None:
    borders = [0, 1, 140, 140, 300, 430]
    case = random_case(batch=1, queries=430, causal=causal, bias=bias, cu_seqlens=torch.tensor(borders))
    results = case.run(backend)
    for first, end in itertools.pairwise(borders):
        if first == end:
            continue
        rows = slice(first, end)
        alone = replace(case, **{n: getattr(case, n)[:, :, rows] for n in ("q", "k", "v")}, cu_seqlens=None)
        upstream = case.upstream()[:, :, rows]
        leaves = [t.clone().requires_grad_() for t in (alone.q, alone.k, alone.v)]
        out = replace(alone, q=leaves[0], k=leaves[1], v=leaves[2]).attend(backend)
        gradients = torch.autograd.grad(out, leaves, upstream)
        separate = dict(zip(("out", "q", "k", "v"), (out.detach(), *gradients), strict=True))
        assert_agree({n: results[n][:, :, rows] for n in separate}, separate, alone)


@pytest.mark.parametrize("side", [left_padding, right_padding])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_padded_rows_are_trimmed_ones(causal: bool, side, backend: str) -> None:
    length, real = 400, 270
    case = random_case(batch=1, queries=length, causal=causal, slopes=STEEP)
    rows = slice(length - real, None) if side is left_padding else slice(None, real)
    padded = replace(case, key_padding_mask=side(real, length=length)).attend(backend)[:, :, rows]
    trimmed = replace(case, **{n: getattr(case, n)[:, :, rows] for n in ("q", "k", "v")})
    assert_agree({"out": padded}, {"out": trimmed.attend(backend)}, trimmed)


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize(
    "slopes", [ts.alibi_slopes(6), torch.tensor([0.9, 0.5, 0.3, 0.2, 0.9, 0.05])], ids=["paper", "steep"]
)
def test_grouped_queries_are_repeated_heads(slopes: Tensor, kv_heads: int, backend: str) -> None:
    case = random_case(queries=600, heads=6, kv_heads=kv_heads, slopes=slopes)
    group = 6 // kv_heads
    repeated = replace(case, k=case.k.repeat_interleave(group, dim=1), v=case.v.repeat_interleave(group, dim=1))
    results = repeated.run(backend)
    for name in ("k", "v"):
        results[name] = results[name].unflatten(1, (kv_heads, group)).sum(2)
    assert_agree(results, case.run(backend), case)


@pytest.mark.parametrize(
    "features",
    [
        {"queries": 300},
        {"queries": 1100, "slopes": STEEP},
        {"queries": 600, "slopes": STEEP, "causal": False},
        {"queries": 300, "bias": "bucket"},
        {"queries": 300, "heads": 6, "kv_heads": 2},
        {"queries": 300, "dtype": torch.bfloat16},
    ],
    ids=["causal", "windows", "symmetric", "bucket", "grouped", "bfloat16"],
)
def test_the_same_bits_every_time(features: dict, backend: str) -> None:
    case = random_case(**features)
    first = case.run(backend)
    for _ in range(2):
        for name, tensor in case.run(backend).items():
            assert torch.equal(tensor, first[name]), name


# Far positions


def test_the_bias_is_right_at_40_000_tokens(backend: str) -> None:
    """Output and gradients of the last queries, everything visited."""
    slopes = torch.tensor([2.0**-8, 1e-4])
    case = random_case(batch=1, heads=2, queries=40, keys=40_000, dim=8, slopes=slopes, tolerance=0.0)
    assert_within_budget(case.run(backend), case)


def test_a_whole_row_of_40_000_tokens(backend: str) -> None:
    """Spot checks near the end and in the middle of a row that no dense matrix could hold."""
    if backend == "reference":
        pytest.skip("the reference builds the whole matrix")
    slopes = torch.tensor([0.5, 2.0**-5])
    case = random_case(batch=1, heads=2, queries=40_000, dim=8, slopes=slopes)
    out = case.attend(backend)
    for first in (39_950, 20_001):
        rows = slice(first, first + 50)
        spot = replace(case, q=case.q[:, :, rows], query_start=first)
        error = size("out", out[:, :, rows].double() - exact(spot)["out"])
        assert bool((error <= error_budget(spot)["out"]).all())


def test_a_query_finds_its_key_10_000_back(backend: str) -> None:
    arguments = hostile.far_key_10_000_back()
    whole = Case(**arguments)
    spot = replace(whole, q=whole.q[:, :, -20:])
    assert_within_budget(spot.run(backend), spot)
    torch.testing.assert_close(spot.attend(backend)[0, 0, -1], whole.v[0, 0, -10_001])
    if backend != "reference":
        torch.testing.assert_close(whole.attend(backend)[0, 0, -1], whole.v[0, 0, -10_001])
