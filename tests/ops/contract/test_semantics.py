"""Calls that must agree with each other, the same bits every time, and positions far apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.ops import hostile
from tests.ops.budget import error_budget, excess, size
from tests.ops.cases import left_padding, right_padding
from tests.ops.contract.features import feature_case
from tests.ops.contract.places import NOT_INTERPRETED, Place, at, formats, slow_in_interpreter
from tests.ops.dense import Case, Results, exact


def assert_agree(one: Results, two: Results, case: Case, place: Place) -> None:
    """Two computations of one thing may each be off by what the format allows for it."""
    allowed = {name: 2.0 * limit for name, limit in place.judge(case).allowed.items() if name in one}
    errors = excess(one, {name: two[name].double() for name in one}, allowed)
    assert max(errors.values()) <= 1.0, errors


# Calls that must agree


@slow_in_interpreter
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_distance_alone_counts(causal: bool, place: Place) -> None:
    """Keys moved by some places and queries with them: nothing changes."""
    here = place.case(
        batch=2, queries=130, keys=300, query_start=100, causal=causal, slopes=place.steep, dtype=place.quick
    )
    for shift in (1, 77) if place.interpreted else (1, 77, 128, 1000):
        there = replace(
            here,
            k=torch.nn.functional.pad(here.k, (0, 0, shift, 0), value=5.0),
            v=torch.nn.functional.pad(here.v, (0, 0, shift, 0), value=5.0),
            key_padding_mask=(torch.arange(300 + shift, device=place.device) >= shift).expand(2, -1),
            query_start=100 + shift,
        )
        results = there.run(place.backend)
        for name in ("k", "v"):
            results[name] = results[name][:, :, shift:]
        assert_agree(results, here.run(place.backend), here, place)


@slow_in_interpreter
@pytest.mark.parametrize("tolerance", [None, 1e-3])
def test_later_tokens_do_not_change_earlier_outputs(tolerance: float | None, place: Place) -> None:
    case = place.case(queries=330 if place.interpreted else 700, slopes=place.steep, tolerance=tolerance)
    for cut in (1, 128, 200) if place.interpreted else (1, 128, 500):
        changed = {n: getattr(case, n).clone() for n in ("q", "k", "v")}
        for tensor in changed.values():
            tensor[:, :, cut:] = 30.0 * tensor[:, :, cut:].flip(2)
        early = replace(case, q=case.q[:, :, :cut], k=case.k[:, :, :cut], v=case.v[:, :, :cut])
        allowed = 2.0 * error_budget(early)["out"]
        before, after = (c.attend(place.backend)[:, :, :cut] for c in (case, replace(case, **changed)))
        assert bool((size("out", before.double() - after) <= allowed).all())


@pytest.mark.parametrize("bias", ["linear", "bucket", "none"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_packed_documents_are_separate_ones(causal: bool, bias: str, place: Place) -> None:
    few = {"interpreted": [0, 1, 70, 70, 150, 200], "triton_gpu": [0, 141, 141, 300, 430]}  # one compilation for all
    borders = few.get(place.name, [0, 1, 140, 140, 300, 430])
    case = place.case(
        batch=1, queries=borders[-1], causal=causal, bias=bias, cu_seqlens=torch.tensor(borders), dtype=place.quick
    )
    results = case.run(place.backend)
    for first, end in itertools.pairwise(borders):
        if first == end:
            continue
        rows = slice(first, end)
        alone = replace(case, **{n: getattr(case, n)[:, :, rows] for n in ("q", "k", "v")}, cu_seqlens=None)
        upstream = case.upstream()[:, :, rows]
        leaves = [t.clone().requires_grad_() for t in (alone.q, alone.k, alone.v)]
        out = replace(alone, q=leaves[0], k=leaves[1], v=leaves[2]).attend(place.backend)
        gradients = torch.autograd.grad(out, leaves, upstream)
        separate = dict(zip(("out", "q", "k", "v"), (out.detach(), *gradients), strict=True))
        assert_agree({n: results[n][:, :, rows] for n in separate}, separate, alone, place)


@pytest.mark.parametrize("side", [left_padding, right_padding])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_padded_rows_are_trimmed_ones(causal: bool, side: Callable[..., Tensor], place: Place) -> None:
    length, real = (200, 130) if place.interpreted else (400, 270)
    case = place.case(batch=1, queries=length, causal=causal, slopes=place.steep, dtype=place.quick)
    rows = slice(length - real, None) if side is left_padding else slice(None, real)
    mask = side(real, length=length).to(place.device)
    padded = replace(case, key_padding_mask=mask).attend(place.backend)[:, :, rows]
    trimmed = replace(case, **{n: getattr(case, n)[:, :, rows] for n in ("q", "k", "v")})
    assert_agree({"out": padded}, {"out": trimmed.attend(place.backend)}, trimmed, place)


@slow_in_interpreter
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize(
    "slopes", [ts.alibi_slopes(6), torch.tensor([0.9, 0.5, 0.3, 0.2, 0.9, 0.05])], ids=["paper", "steep"]
)
def test_grouped_queries_are_repeated_heads(slopes: Tensor, kv_heads: int, place: Place) -> None:
    length = place.length if place.interpreted else 600
    case = place.case(queries=length, heads=6, kv_heads=kv_heads, slopes=slopes, dtype=place.quick)
    group = 6 // kv_heads
    repeated = replace(case, k=case.k.repeat_interleave(group, dim=1), v=case.v.repeat_interleave(group, dim=1))
    results = repeated.run(place.backend)
    for name in ("k", "v"):
        results[name] = results[name].unflatten(1, (kv_heads, group)).sum(2)
    assert_agree(results, case.run(place.backend), case, place)


@at("reference", "blocked", "interpreted", "triton_gpu")
@formats(torch.float32, "low")
@pytest.mark.parametrize("feature", ["causal", "causal_steep", "symmetric_steep", "bucket", "grouped"])
def test_the_same_bits_every_time(feature: str, dtype: torch.dtype, place: Place) -> None:
    case = feature_case(place, feature, dtype=dtype)
    first = case.run(place.backend)
    for _ in range(2):
        for name, tensor in case.run(place.backend).items():
            assert torch.equal(tensor, first[name]), name


# Far positions


@at(*NOT_INTERPRETED)
def test_the_bias_is_right_at_40_000_tokens(place: Place) -> None:
    """Output and gradients of the last queries, everything visited."""
    slopes = torch.tensor([2.0**-8, 1e-4])
    case = place.case(batch=1, heads=2, queries=40, keys=40_000, dim=8, slopes=slopes, tolerance=0.0)
    place.check(case)


@at("blocked", "blocked_gpu", "triton_gpu")
def test_a_whole_row_of_40_000_tokens(place: Place) -> None:
    """Spot checks near the end and in the middle of a row that no dense matrix could hold."""
    slopes = torch.tensor([0.5, 2.0**-5])
    case = place.case(batch=1, heads=2, queries=40_000, dim=8, slopes=slopes)
    out = case.attend(place.backend)
    for first in (39_950, 20_001):
        rows = slice(first, first + 50)
        spot = replace(case, q=case.q[:, :, rows], query_start=first)
        error = size("out", out[:, :, rows].double() - exact(spot)["out"])
        assert bool((error <= error_budget(spot)["out"]).all())


@at(*NOT_INTERPRETED)
def test_a_query_finds_its_key_10_000_back(place: Place) -> None:
    arguments = hostile.far_key_10_000_back()
    whole = place.here(Case(**arguments))
    spot = replace(whole, q=whole.q[:, :, -20:])
    place.check(spot)
    torch.testing.assert_close(spot.attend(place.backend)[0, 0, -1], whole.v[0, 0, -10_001])
    if place.backend != "reference":
        torch.testing.assert_close(whole.attend(place.backend)[0, 0, -1], whole.v[0, 0, -10_001])
